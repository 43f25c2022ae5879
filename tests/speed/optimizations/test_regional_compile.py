"""Compiled blocks: kinds, sharing, fallbacks, and everything that must never be ignored."""

import gc
import sys
import weakref
from typing import ClassVar

import pytest
import torch
import torch._dynamo
from speed_tier.speed.optimizations import dynamo
from speed_tier.speed.optimizations.base import HostFacts
from speed_tier.speed.optimizations.regional_compile import (
    CompileConfig,
    RegionalCompile,
    build_blocks,
    kind_signature,
)
from speed_tier.speed.patching import active_patches
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.process import full_state
from speed_tier.tests.speed.tiny import Toy, ToyBlock, toy, toy_input
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_hook

EAGER = RegionalCompile(CompileConfig(backend="eager"))


def with_config(**more):
    return RegionalCompile(CompileConfig(**{"backend": "eager", **more}))


def graphs():
    return counters["stats"]["unique_graphs"]


def config():
    settings = torch._dynamo.config
    return {
        name: getattr(settings, name)
        for name in (
            *("recompile_limit", "accumulated_recompile_limit"),
            *("fail_on_recompile_limit_hit", "suppress_errors"),
        )
    } | {"duck": torch.fx.experimental._config.use_duck_shape}


@pytest.fixture(autouse=True)
def nothing_leaks():
    before, settings = full_state(), config()
    yield
    assert full_state() == before
    assert config() == settings
    assert active_patches() == 0


def check_same(run, *args):
    got = run.call(*args)
    torch.testing.assert_close(got, tiny.plain(run.denoiser, *args))
    return got


class Raises:
    """Something a pack puts into the options, that fails inside the block."""

    def __init__(self, error, opaque=False):
        self.error = error
        self.attend = torch.compiler.disable(self.fail) if opaque else self.fail

    def fail(self, *_):
        raise self.error


def test_kinds_are_class_shapes_and_dtypes():
    alike, wide, half = ToyBlock(), ToyBlock(48), ToyBlock().to(torch.bfloat16)
    signatures = [kind_signature(block) for block in (ToyBlock(), alike, wide, half)]
    assert signatures[0] == signatures[1]
    assert len(set(signatures)) == 3
    assert kind_signature(ToyBlock(bias=False)) not in signatures
    assert kind_signature(type("Other", (ToyBlock,), {})()) not in signatures
    packed = ToyBlock()
    packed.norm.weight = type("Packed", (nn.Parameter,), {})(packed.norm.weight.detach())
    assert kind_signature(packed) not in signatures


def test_blocks_are_sorted_into_kinds_with_names_of_their_own():
    model = Toy(ToyBlock(), ToyBlock(48), ToyBlock(), ToyBlock())
    built = build_blocks(tiny.TOY.repeated_blocks(model), CompileConfig(backend="eager"))
    assert [(kind.name, kind.blocks) for kind in built.kinds] == [("blocks", 3), ("blocks#2", 1)]
    assert built.calls["blocks.1"].kind is built.kinds[1]
    codes = {kind.compiled.__wrapped__.__code__ for kind in built.kinds}
    assert len(codes) == 2, "the recompile limit would count both kinds together"


def test_every_block_of_a_kind_shares_one_artefact():
    model, x = toy(blocks=20), toy_input()
    before = graphs()
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, x)
        check_same(run, x)
        facts = run.handles[0].compile_facts()
    assert graphs() - before == 1
    assert (facts.graphs, facts.recompiles, facts.graph_breaks) == (1, 0, {})
    (kind,) = facts.kinds
    assert (kind.name, kind.blocks, kind.compiles) == ("blocks", 20, 1)
    assert kind.seconds == facts.seconds > 0


@pytest.mark.parametrize("looks_itself_up", [False, True], ids=["delta", "keyed table"])
def test_lora_with_a_key_in_each_block_is_not_a_graph_each(looks_itself_up):
    """The host's LoRA on offloaded weights; it once used up the recompile limit (20 of 20)."""

    class LowVramPatch:
        def __init__(self, key, patches):
            self.key, self.patches = key, patches

        def __call__(self, weight):
            return weight + (self.patches[self.key] if looks_itself_up else self.patches)

    class HostLinear(nn.Linear):
        weight_function: ClassVar[list] = []

        def forward(self, x):
            weight = self.weight
            for function in self.weight_function:
                weight = function(weight)
            return nn.functional.linear(x, weight, self.bias)

    model, table = toy(blocks=20), {}
    for index, block in enumerate(model.blocks):
        block.attention.out = HostLinear(tiny.WIDTH, tiny.WIDTH).requires_grad_(False)
        table[f"blocks.{index}"] = torch.randn(tiny.WIDTH, tiny.WIDTH)
    with tiny.engaged(EAGER, on=model) as run:
        without = check_same(run, toy_input())
        before = graphs()
        for key, block in zip(table, model.blocks, strict=True):
            patches = table if looks_itself_up else table[key]
            block.attention.out.weight_function = [LowVramPatch(key, patches)]
        assert not torch.allclose(check_same(run, toy_input()), without)
        assert graphs() - before <= 2
        assert "20 block calls ran eager: LoRA is applied" in run.handles[0].note
        for block in model.blocks:
            block.attention.out.weight_function = []
        torch.testing.assert_close(run.call(toy_input()), without)
        assert graphs() - before <= 1  # an empty list in the instance is not the class's


def test_sizes_and_batches_walk_within_the_bound():
    """One compile and one more for the step from batch 1 to 2; then none on any return."""
    model, new = toy(), []
    with tiny.engaged(EAGER, on=model) as run:
        for batch, tokens in [(1, 8), (1, 12), (1, 40), (2, 8), (3, 12), (1, 300), (1, 8), (2, 40)]:
            before = graphs()
            check_same(run, toy_input(batch, tokens))
            new.append(graphs() - before)
    assert new == [1, 0, 0, 1, 0, 0, 0, 0]


def test_equal_sizes_are_not_taken_for_the_same_size():
    """64 text tokens beside 64 image tokens, then 64 beside 80: no compile of its own."""

    class TwoStreams(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, image, text):
            return self.linear(torch.cat([image, text], 1))

    model = Toy(TwoStreams().requires_grad_(False))
    model.forward = lambda image, text: model.blocks[0](image, text)
    before = graphs()
    with tiny.engaged(EAGER, on=model) as run:
        for image, text in [(8, 8), (8, 16), (24, 8)]:
            check_same(run, torch.ones(1, image, 8), torch.ones(1, text, 8))
    assert graphs() - before == 1


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, table=None, tables=None):
        for part in (table, *(tables or ())):
            if part is not None:
                x = x * part[:, : x.shape[1]]
        return self.linear(x)


@pytest.mark.parametrize("place", ["argument", "keyword", "tuple"])
def test_slices_and_views_are_no_graphs_of_their_own(place):
    model = Toy(Rotary().requires_grad_(False))
    whole = torch.randn(1, 64, 8)

    tables = [
        whole.clone(),
        whole.flatten()[: 16 * 8].view(1, 16, 8),
        *(whole[:, start : start + 16] for start in (4, 9)),
        *(whole.flatten()[start:][: 16 * 8].view(1, 16, 8) for start in (8, 24)),
    ]

    def forward(x, table):
        if place == "argument":
            return model.blocks[0](x, table)
        if place == "keyword":
            return model.blocks[0](x, table=table)
        return model.blocks[0](x, tables=(table, whole))

    model.forward = forward
    before = graphs()
    with tiny.engaged(EAGER, on=model) as run:
        for table in tables:
            check_same(run, torch.ones(1, 16, 8), table)
    assert graphs() - before == 1


def test_parameters_that_want_gradients_cost_no_graph_and_get_them_back():
    model = toy(blocks=4)
    for block in model.blocks[::2]:
        block.requires_grad_(True)
    wanted = [p.requires_grad for p in model.parameters()]
    before = graphs()
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, toy_input())
        assert not any(p.requires_grad for p in model.parameters())
    assert graphs() - before == 1
    assert [p.requires_grad for p in model.parameters()] == wanted


def test_a_block_of_another_dtype_gives_its_own_right_result():
    model = toy(blocks=2)
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, toy_input())
    model.to(torch.bfloat16)
    with tiny.engaged(EAGER, on=model) as run:
        assert check_same(run, toy_input().bfloat16()).dtype == torch.bfloat16


def test_a_swapped_block_gets_fresh_kinds():
    model = toy(blocks=2)
    with tiny.engaged(EAGER, on=model) as run:
        before = check_same(run, toy_input())
    model.blocks[1] = ToyBlock().requires_grad_(False)
    with tiny.engaged(EAGER, on=model) as run:
        assert not torch.allclose(check_same(run, toy_input()), before)


def test_a_second_run_compiles_nothing():
    model = toy()
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, toy_input())
    before = graphs()
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, toy_input())
        facts = run.handles[0].compile_facts()
    assert graphs() == before
    assert (facts.graphs, facts.seconds) == (0, 0)


def broken_backend(gm, inputs):
    raise RuntimeError("no compiler for you\nand more lines")


def test_a_backend_that_raises_falls_back_and_the_run_goes_on():
    model, x = toy(), toy_input()
    compiled = with_config(backend=broken_backend)
    with tiny.engaged(compiled, on=model) as run:
        for _ in range(3):
            torch.testing.assert_close(run.call(x), tiny.plain(model, x), rtol=0, atol=0)
        reason = run.handles[0].fell_back
        assert "blocks: compile failed: " in reason
        assert "no compiler for you" in reason
        assert "\n" not in reason
    with tiny.engaged(compiled, on=model) as run:  # known to be broken: not tried again
        before = dict(counters["frames"])
        check_same(run, x)
        assert dict(counters["frames"]) == before
        assert "no compiler for you" in run.handles[0].fell_back


def test_a_host_that_hides_compile_errors_does_not_hide_ours():
    model = toy(blocks=1)
    with (
        torch._dynamo.config.patch(suppress_errors=True),
        tiny.engaged(with_config(backend=broken_backend), on=model) as run,
    ):
        check_same(run, toy_input())
        assert "no compiler for you" in run.handles[0].fell_back


def test_one_kind_that_fails_leaves_the_others_compiled():
    def fails_on_wide(gm, inputs):
        if any(getattr(x, "shape", None) == (48,) for x in inputs):
            raise RuntimeError("too wide")
        return gm.forward

    class Wide(ToyBlock):
        def forward(self, x, options):
            return x + super().forward(x.repeat(1, 1, 2)[..., :48], options)[..., : x.shape[-1]]

    model = Toy(ToyBlock(), Wide(48), ToyBlock()).requires_grad_(False)
    before = graphs()
    with tiny.engaged(with_config(backend=fails_on_wide), on=model) as run:
        check_same(run, toy_input())
        check_same(run, toy_input())
        handle = run.handles[0]
        assert handle.fell_back == ""
        assert handle.note.startswith("runs eager in part (blocks#2: compile failed: ")
        assert [kind.compiles for kind in handle.compile_facts().kinds] == [1, 0]
    assert graphs() > before


@pytest.mark.parametrize("lengths", [(8, 9, 10, 11, 12, 13)])
def test_the_recompile_limit_falls_back_with_its_reason_and_goes_on(lengths):
    model = toy(blocks=2)
    compiled = with_config(dynamic=False, recompile_limit=3)
    before = graphs()
    with tiny.engaged(compiled, on=model) as run:
        for tokens in lengths:
            check_same(run, toy_input(tokens=tokens))
        assert run.handles[0].fell_back.startswith("blocks: recompile limit hit (")
        assert run.handles[0].compile_facts().graphs == 3
    assert graphs() - before == 3
    with tiny.engaged(compiled, on=model) as run:  # with a size it knows, compiled code runs
        check_same(run, toy_input(tokens=8))
        assert run.handles[0].fell_back == ""
    assert graphs() - before == 3


def test_the_limit_counts_for_each_kind():
    model = Toy(ToyBlock(), ToyBlock(bias=False), ToyBlock()).requires_grad_(False)
    with tiny.engaged(with_config(recompile_limit=1), on=model) as run:
        check_same(run, toy_input())
        assert run.handles[0].fell_back == ""
        assert run.handles[0].compile_facts().graphs == 2


def test_a_hook_added_after_the_first_compiled_call_is_honoured():
    model, x = toy(), toy_input()
    with tiny.engaged(EAGER, on=model) as run:
        without = check_same(run, x)
        before = graphs()
        hook = model.blocks[1].mlp[0].register_forward_hook(lambda _, __, out: out * 0)
        assert not torch.allclose(check_same(run, x), without)
        assert run.handles[0].note == "1 block calls ran eager: a part has a forward hook"
        assert run.handles[0].fell_back == "", "the other blocks are compiled"
        hook.remove()
        pre = model.blocks[0].norm.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        assert check_same(run, x).shape == x.shape
        pre.remove()
        torch.testing.assert_close(run.call(x), without)
        assert graphs() == before


def test_a_hook_on_the_block_itself_runs_around_compiled_code():
    model, x = toy(), toy_input()
    with tiny.engaged(EAGER, on=model) as run:
        without = check_same(run, x)
        seen = []
        hook = model.blocks[1].register_forward_hook(lambda _, __, out: seen.append(1) or out * 2)
        assert not torch.allclose(check_same(run, x), without)
        assert seen == [1, 1]
        assert run.handles[0].note.startswith("1 kinds")
        hook.remove()


def test_a_hook_on_every_module_of_the_process_is_honoured():
    model, x = toy(), toy_input()
    with tiny.engaged(EAGER, on=model) as run:
        without = check_same(run, x)
        hook = register_module_forward_hook(
            lambda module, _, out: out * 0 if isinstance(module, nn.SiLU) else None
        )
        try:
            assert not torch.allclose(check_same(run, x), without)
            assert "3 block calls ran eager" in run.handles[0].note
        finally:
            hook.remove()


def test_hooks_on_every_block_are_no_victory():
    model = toy(blocks=2)
    for block in model.blocks:
        block.norm.register_forward_hook(lambda *_: None)
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, toy_input())
        assert run.handles[0].fell_back == "2 block calls ran eager: a part has a forward hook"


def test_a_foreign_forward_on_a_block_is_honoured():
    model, x = toy(), toy_input()
    expected = tiny.plain(model, x)
    model.blocks[1].forward = lambda x, options: x * 3
    with tiny.engaged(EAGER, on=model) as run:
        assert not torch.allclose(check_same(run, x), expected)
        assert "; 1 blocks run eager: another pack has replaced their forward" in (
            run.handles[0].note
        )
    assert "forward" in vars(model.blocks[1]), "it stays"
    for block in model.blocks:
        block.forward = lambda x, options: x
    assert EAGER.check(tiny.context(model)) == (
        "another pack has replaced the forward of every block"
    )


def test_a_foreign_forward_on_a_part_in_mid_run_is_honoured():
    model, x = toy(), toy_input()
    with tiny.engaged(EAGER, on=model) as run:
        without = check_same(run, x)
        model.blocks[1].mlp[0].forward = lambda x: x * 3
        assert not torch.allclose(check_same(run, x), without)
        del model.blocks[1].mlp[0].forward
        torch.testing.assert_close(run.call(x), without)


@pytest.mark.parametrize("name", ["attention", "patches"])
def test_options_added_after_the_first_compiled_call_are_honoured(name):
    """An attention override or a block patch of another node, and its removal."""
    model, x = toy(), toy_input()
    added = {
        "attention": {"attention": lambda q, k, v: v * 2},
        "patches": {"patches": [lambda x: x * 0.5]},
    }[name]
    with tiny.engaged(EAGER, on=model) as run:
        without = check_same(run, x, {})
        assert not torch.allclose(check_same(run, x, added), without)
        torch.testing.assert_close(run.call(x, {}), without)
        other = (
            {"attention": lambda q, k, v: q} if name == "attention" else {"patches": [torch.neg]}
        )
        assert not torch.allclose(check_same(run, x, other), without)
        assert run.handles[0].compile_facts().graph_breaks == {}


def test_an_override_that_breaks_the_graph_is_counted_and_right():
    def attend(q, k, v):
        torch._dynamo.graph_break()
        return v * 2

    with tiny.engaged(EAGER, on=toy(blocks=1)) as run:
        check_same(run, toy_input(), {"attention": attend})
        facts = run.handles[0].compile_facts()
    assert sum(facts.graph_breaks.values()) >= 1
    assert all("\n" not in reason for reason in facts.graph_breaks)


@pytest.mark.parametrize("opaque", [False, True], ids=["traced", "opaque"])
@pytest.mark.parametrize(
    "error", [ValueError("a pack's own"), torch.OutOfMemoryError("pretended"), KeyboardInterrupt()]
)
def test_an_exception_inside_a_block_comes_out_unchanged(error, opaque):
    model, x = toy(blocks=2), toy_input()
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, x)
        raising = Raises(error, opaque)
        with pytest.raises(type(error)) as raised:
            run.call(x, {"attention": raising.attend})
        assert str(raised.value) == str(error)
        assert active_patches() == 0
        assert run.handles[0].fell_back == ""
        check_same(run, x)
    assert full_state()["matmul.allow_tf32"] is False


def test_a_block_that_fails_by_itself_breaks_no_kind():
    """A wrong LoRA or ControlNet fails while it is traced; that says nothing of the compiler."""
    model = toy(blocks=2)
    with tiny.engaged(EAGER, on=model) as run:
        with pytest.raises(RuntimeError, match="shape") as raised:
            run.call(torch.zeros(1, 8, tiny.WIDTH + 1))
        assert type(raised.value) is RuntimeError
        assert run.handles[0].fell_back == ""
        check_same(run, toy_input())
        assert run.handles[0].compile_facts().graphs == 1


def test_a_fallback_is_kept_when_the_call_then_fails():
    model = toy(blocks=2)
    model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with tiny.engaged(with_config(backend=broken_backend), on=model) as run:
        with pytest.raises(ZeroDivisionError):
            run.call(toy_input())
        assert "no compiler for you" in run.handles[0].fell_back


def test_an_interrupt_is_asked_for_between_blocks():
    asked = []
    host = HostFacts(check_interrupt=lambda: asked.append(1))
    with tiny.engaged(EAGER, on=toy(blocks=5), host=host) as run:
        run.call(toy_input())
    assert len(asked) == 5


def test_an_interrupt_stops_at_the_next_block():
    class InterruptProcessingException(BaseException):
        pass

    asked, ran = [], []

    def check():
        asked.append(1)
        if len(asked) == 3:
            raise InterruptProcessingException

    model = toy(blocks=5)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: ran.append(1))
    with (
        tiny.engaged(EAGER, on=model, host=HostFacts(check_interrupt=check)) as run,
        pytest.raises(InterruptProcessingException),
    ):
        run.call(toy_input())
    assert len(ran) == 2
    assert not any("forward" in vars(block) for block in model.blocks)


def test_a_compile_is_announced_once_a_kind():
    told = []
    model = Toy(ToyBlock(), ToyBlock(bias=False), ToyBlock()).requires_grad_(False)

    def compiling(kind, index, count):
        told.append((kind, index, count))

    with tiny.engaged(EAGER, on=model, compiling=compiling) as run:
        for batch in (1, 1, 2):
            run.call(toy_input(batch))
    assert told == [("blocks", 1, 2), ("blocks#2", 2, 2)]


def test_a_nested_run_leaves_the_outer_one_compiled():
    model, x = toy(), toy_input()
    with tiny.engaged(EAGER, on=model) as outer:
        check_same(outer, x)
        with tiny.engaged(EAGER, on=model) as inner:
            check_same(inner, x)
        asked = []
        outer.handles[0].run._interrupt = lambda: asked.append(1)
        check_same(outer, x)
        assert len(asked) == 3, "its blocks ran eager"
    assert all(not call.runs for call in outer.handles[0].blocks.calls.values())


def test_dynamo_is_set_inside_a_call_and_put_back():
    outside, inside = config(), []
    model = toy(blocks=1)
    model.blocks[0].register_forward_hook(lambda *_: inside.append(config()))
    with tiny.engaged(with_config(recompile_limit=5), on=model) as run:
        run.call(toy_input())
        assert config() == outside
    assert inside[0]["recompile_limit"] == 5 != outside["recompile_limit"]
    assert inside[0]["fail_on_recompile_limit_hit"] is True
    assert inside[0]["duck"] is False


def test_a_config_is_validated_and_typed():
    with pytest.raises(ValueError, match="recompile_limit needs to be at least 1; found 0"):
        CompileConfig(recompile_limit=0)
    for mode in ("reduce-overhead", "max-autotune"):  # CUDA graphs overwrite a block's output
        with pytest.raises(ValueError, match="mode needs one of .* found '" + mode):
            CompileConfig(mode=mode)
    assert CompileConfig().options() is None
    assert CompileConfig(emulate_precision_casts=True).options() == {
        "emulate_precision_casts": True
    }
    assert CompileConfig(backend="eager", emulate_precision_casts=True).options() is None
    assert CompileConfig().dynamic is True


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (
            HostFacts(compiled_by="a torch.compile node"),
            "a torch.compile node compiles this model already",
        ),
        (
            HostFacts(dynamic_vram=True),
            "dynamic VRAM loads weights inside the code that would be compiled",
        ),
    ],
)
def test_the_host_can_rule_it_out(host, reason):
    assert EAGER.check(tiny.context(toy(), host=host)) == reason


def test_no_compiler_on_the_path_is_said_before_anything_is_tried(monkeypatch, tmp_path):
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "found none on PATH" in RegionalCompile().check(tiny.context(toy()))
    assert EAGER.check(tiny.context(toy())) is None


def test_no_triton_is_said_on_a_card(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = RegionalCompile().check(tiny.context(toy(), device=torch.device("cuda")))
    assert reason.startswith("Triton is not installed")


def test_only_failures_to_compile_count_as_such():
    failures = dynamo.compile_failures()
    assert issubclass(torch._dynamo.exc.BackendCompilerFailed, failures)
    assert issubclass(torch._dynamo.exc.FailOnRecompileLimitHit, failures)
    for other in (RuntimeError, torch.OutOfMemoryError, ValueError, KeyboardInterrupt):
        assert not issubclass(other, failures)


def test_a_reason_is_one_short_line():
    assert dynamo.plain_reason(ValueError("\n  first \nsecond")) == (
        "compile failed: ValueError: first"
    )
    assert len(dynamo.plain_reason(ValueError("x" * 5000))) < 400
    assert dynamo.plain_reason(ValueError()) == "compile failed: ValueError: no message"


@pytest.mark.parametrize("ran", [False, True])
def test_nothing_keeps_the_model_alive(ran):
    model = toy(blocks=2)
    with tiny.engaged(EAGER, on=model) as run:
        if ran:
            run.call(toy_input())
    references = [weakref.ref(model), weakref.ref(model.blocks[0])]
    del model, run
    gc.collect()
    assert [reference() for reference in references] == [None, None]
