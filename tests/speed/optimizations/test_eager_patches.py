"""When fused blocks stand in for a model's own. The blocks themselves are in tests/host."""

import contextlib

import pytest
import torch
from speed_tier.speed.optimizations import call_mode, eager_patches
from speed_tier.speed.optimizations.base import HostFacts
from speed_tier.speed.optimizations.eager_patches import EagerPatches
from speed_tier.speed.optimizations.regional_compile import CompileConfig, RegionalCompile
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.fused_block_fake import FusedToy

PATCHES = EagerPatches()
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fused_toy(monkeypatch, process_as_found):
    """The toy family has a fused block, and the device can run it."""
    monkeypatch.setitem(eager_patches.FUSED_BLOCKS, "toy", FusedToy)
    monkeypatch.setattr(eager_patches, "kernel_refusal", lambda device: None)
    monkeypatch.setattr(FusedToy, "calls", 0)


def model(**more):
    return tiny.toy(**more).to(BF16)


def x(seed=1):
    return tiny.toy_input(seed=seed).to(BF16)


def engaged(*others, on, **more):
    return tiny.engaged(PATCHES, *others, on=on, dtype=BF16, **more)


def counted(run, *args):
    before = FusedToy.calls
    return run.call(*args), FusedToy.calls - before


def test_every_block_is_stood_in_for_during_a_call_only():
    toy = model()
    with engaged(on=toy) as run:
        FusedToy.calls = 0  # the comparison
        got, calls = counted(run, x())
        assert calls == 3
        tiny.plain(toy, x())
        assert FusedToy.calls == 3
    assert run.handles[0].note == "3 blocks"
    assert tiny.relative_error(got, tiny.plain(toy, x())) < 0.02


def test_one_comparison_a_kind_of_block(monkeypatch):
    compared = []
    original = FusedToy.disagreement
    monkeypatch.setattr(
        FusedToy, "disagreement", lambda self, *a: compared.append(self) or original(self, *a)
    )
    toy = model()
    for _ in range(2):
        with engaged(on=toy):
            pass
    assert len(compared) == 1
    PATCHES.release(toy)
    with engaged(on=toy):
        assert len(compared) == 2


@pytest.mark.parametrize("factor", [0.1, float("nan")])
def test_a_block_that_gives_another_result_is_left_alone(monkeypatch, factor):
    monkeypatch.setattr(FusedToy, "wrong_by", factor)
    reason = PATCHES.check(tiny.context(model(), dtype=BF16))
    assert "from the host's own on a random input" in reason


def test_a_block_of_other_code_is_left_alone(monkeypatch):
    class Changed(tiny.ToyBlock):
        def forward(self, x, options):
            return x + self.mlp(x) * 2

    mixed = tiny.Toy(tiny.ToyBlock(), Changed()).to(BF16).requires_grad_(False)
    with engaged(on=mixed) as run:
        FusedToy.calls = 0
        got, calls = counted(run, x())
    assert calls == 1
    assert "1 blocks; 1 as they are: " in run.handles[0].note
    assert "no longer contains" in run.handles[0].note
    assert tiny.relative_error(got, tiny.plain(mixed, x())) < 0.02
    only = tiny.Toy(Changed()).to(BF16)
    assert "no longer contains" in PATCHES.check(tiny.context(only, dtype=BF16))


def test_what_comes_between_is_never_read_past():
    toy = model()
    with engaged(on=toy) as run:
        for disturb in (
            lambda: toy.blocks[1].norm.register_forward_hook(lambda m, i, o: o * 2),
            lambda: toy.blocks[1].attention.register_forward_pre_hook(
                lambda m, i: (i[0] * 2, i[1])
            ),
        ):
            hook = disturb()
            got, calls = counted(run, x())
            assert calls == 2
            assert tiny.relative_error(got, tiny.plain(toy, x())) < 0.02
            hook.remove()
        toy.blocks[2].attention.forward = lambda x, options: x * 3
        got, calls = counted(run, x())
        assert calls == 2
        assert tiny.relative_error(got, tiny.plain(toy, x())) < 0.02
        del toy.blocks[2].attention.forward
        toy.blocks[0].norm.weight_function = [lambda w: w * 2]
        with engaged(on=toy) as later:
            assert counted(later, x())[1] == 2
        del toy.blocks[0].norm.weight_function
        assert counted(run, x())[1] == 3
        patch = {"patches": [lambda x: x * 2]}
        got, calls = counted(run, x(), patch)
        assert calls == 0
        assert torch.equal(got, tiny.plain(toy, x(), patch))


def test_a_block_replaced_in_mid_run_is_the_other_packs():
    toy = model()
    with engaged(on=toy) as run:
        counted(run, x())
        toy.blocks[1].forward = lambda x, options: x * 3
        got, calls = counted(run, x())
        assert calls == 2
        assert tiny.relative_error(got, tiny.plain(toy, x())) < 0.02
    note = "; 1 block calls as they are: patched or hooked, or unusual inputs"
    assert run.handles[0].note == "3 blocks" + note


def test_a_part_that_somebody_gave_back_is_not_replaced():
    """A host that restores an object patch leaves the class's own method in the instance."""
    toy = model()
    attention = toy.blocks[0].attention
    attention.forward = attention.forward
    with engaged(on=toy) as run:
        FusedToy.calls = 0
        assert counted(run, x())[1] == 3


def test_parts_that_somebody_replaced_before_the_run():
    toy = model()
    toy.blocks[0].attention.forward = lambda x, options: x
    with engaged(on=toy) as run:
        FusedToy.calls = 0
        assert counted(run, x())[1] == 2
    assert "1 as they are: another pack has replaced a part's forward" in run.handles[0].note


def test_a_norm_that_the_host_brings_when_asked():
    toy = model()
    expected = tiny.plain(toy, x())
    weights = {}
    for block in toy.blocks:
        weights[block.norm] = block.norm.weight
        block.norm.weight = torch.nn.Parameter(block.norm.weight.to("meta"), requires_grad=False)
    entered = []

    @contextlib.contextmanager
    def norm_weight(norm, like):
        entered.append(norm)
        yield weights[norm]
        entered.remove(norm)

    fused = FusedToy(toy.blocks[0], norm_weight)
    assert fused.problem(torch.device("cpu")) == ""
    got = x()
    for block in toy.blocks:
        got = FusedToy(block, norm_weight)(got, {})
    assert tiny.relative_error(got, expected) < 0.02
    assert entered == []


def test_a_norm_that_is_not_there():
    toy = model()
    for block in toy.blocks:
        block.norm.to("meta")
    reason = PATCHES.check(tiny.context(toy, dtype=BF16))
    assert reason == "the weight of a norm is not on cpu"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"stack": "diffusers"}, "written for the host's own blocks; found diffusers's"),
        ({"dtype": torch.float16}, "used in bfloat16; found torch.float16"),
        ({"dtype": torch.float32}, "used in bfloat16; found torch.float32"),
        ({"host": HostFacts(compiled_by="a torch.compile node")}, "a torch.compile node compiles"),
    ],
)
def test_where_it_steps_aside(more, reason):
    assert reason in PATCHES.check(tiny.context(model(), **{"dtype": BF16, **more}))


def test_without_a_device_for_the_kernels(monkeypatch):
    monkeypatch.setattr(eager_patches, "kernel_refusal", lambda device: "kernels need CUDA")
    assert PATCHES.check(tiny.context(model(), dtype=BF16)) == "kernels need CUDA"


def test_compiled_blocks_are_not_fused_and_their_eager_code_is():
    toy = model()
    compiled = RegionalCompile(CompileConfig(backend="eager"))
    with engaged(compiled, on=toy) as run:
        FusedToy.calls = 0
        assert counted(run, x())[1] == 0
        with call_mode.eager_blocks(True):
            got, calls = counted(run, x())
        assert calls == 3
    assert tiny.relative_error(got, tiny.plain(toy, x())) < 0.02
