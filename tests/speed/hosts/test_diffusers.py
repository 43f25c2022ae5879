"""The engine on bare diffusers transformers: engages, matches, leaves nothing, recompiles not."""

import copy
import gc
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
from speed_tier.speed.errors import UnsupportedModelError
from speed_tier.speed.hosts.diffusers import apply_tier
from speed_tier.speed.optimizations import OPTIMIZATIONS
from speed_tier.speed.optimizations.fused_qkv import FusedQkv
from speed_tier.speed.optimizations.regional_compile import CompileConfig, RegionalCompile
from speed_tier.speed.optimizations.tf32 import Tf32
from speed_tier.speed.report import State
from speed_tier.speed.tiers import Switch
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.process import full_state
from speed_tier.tests.speed.tiny import Size, output
from torch._dynamo.utils import counters

pytestmark = [
    pytest.mark.usefixtures("process_as_found"),
    pytest.mark.slow,
]  # compiled blocks of both families, by Inductor too

FORCED = {"tf32": Switch.ON, "fused_qkv": Switch.ON}
ENGAGED = ["tf32", "fused_qkv", "regional_compile"]

# (model, inputs, a part outside the repeated blocks, kinds of blocks)
CASES = {
    "z_image": (tiny.z_image, tiny.z_image_inputs, "t_embedder", 3),
    "qwen_image": (tiny.qwen_image, tiny.qwen_image_inputs, "time_text_embed", 1),
}

# What a session goes through, and the graphs each step costs (Z-Image, Qwen-Image). design.md
# allows a kind one compile, one more at the second size and one more at the second batch. A new
# picture size is none for Z-Image's context refiner, which sees the text only.
WALK = [
    (Size(), (3, 1)),
    (Size(), (0, 0)),
    (Size(12, 8), (0, 1)),  # Z-Image pads to 32 tokens, as the first size
    (Size(16, 16), (2, 0)),
    (Size(batch=2), (3, 1)),
    (Size(batch=3), (0, 0)),
    (Size(), (0, 0)),
    (Size(text=40), (1, 0)),
    (Size(text=150), (0, 0)),
    (Size(text=300), (0, 0)),
    (Size(16, 16, batch=2, text=40), (0, 0)),
    (Size(), (0, 0)),
]


def optimizations(backend):
    compiled = RegionalCompile(CompileConfig(backend=backend))
    return tuple(compiled if row.name == compiled.name else row for row in OPTIMIZATIONS)


def graphs():
    return counters["stats"]["unique_graphs"]


def storages(model):
    return {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }


def own_forwards(model):
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.fixture(scope="module", params=CASES)
def session(request):
    """One model through a whole session in max, with what was seen on the way."""
    make, inputs, outside, kinds = CASES[request.param]
    seen = SimpleNamespace(name=request.param, kinds=kinds, during=[], walk=[])
    seen.model = model = make()
    seen.state = {name: value.clone() for name, value in model.state_dict().items()}
    seen.grads = [p.requires_grad for p in model.parameters()]
    seen.storages_before = storages(model)
    seen.flags_before = full_state()
    seen.off = {size: output(model, inputs(size)) for size, _ in WALK}
    seen.exact = output(copy.deepcopy(model).double(), inputs(dtype=torch.float64))
    hook = model.get_submodule(outside).register_forward_hook(
        lambda *_: seen.during.append((full_state(), storages(model), list(model.state_dict())))
    )
    handle = apply_tier(model, "max", FORCED, optimizations("eager"))
    for size, allowed in WALK:
        before = graphs()
        got = output(model, inputs(size))
        expected = allowed[list(CASES).index(seen.name)]
        seen.walk.append((size, got, graphs() - before, expected))
    seen.report = handle.finish_run()
    seen.flags_between = full_state()
    before = graphs()
    seen.second = output(model, inputs())
    seen.second_graphs = graphs() - before
    seen.second_report = handle.finish_run()
    handle.remove()
    handle.remove()
    hook.remove()
    seen.flags_after = full_state()
    seen.storages_after = storages(model)
    seen.off_again = output(model, inputs())
    return seen


def test_what_engages_is_named(session):
    assert session.report.engaged() == ENGAGED
    assert session.report.outcome == "done"
    assert (session.report.model.family, session.report.model.stack) == (session.name, "diffusers")
    for name, reason in (("cudnn_benchmark", "no convolutions"), ("attention_backend", "NVIDIA")):
        assert session.report.feature(name).state is State.SKIPPED
        assert reason in session.report.feature(name).reason


def test_the_output_matches(session):
    off_error = tiny.relative_error(session.off[Size()], session.exact)
    for size, got, _, _ in session.walk:
        torch.testing.assert_close(got, session.off[size], rtol=1e-4, atol=1e-5)
    tier_error = tiny.relative_error(session.walk[0][1], session.exact)
    assert tier_error <= 1.1 * off_error + 1e-7


def test_recompiles_stay_within_the_bound(session):
    found = [(size, count) for size, _, count, _ in session.walk]
    assert found == [(size, expected) for size, _, _, expected in session.walk]


def test_the_report_counts_what_dynamo_counted(session):
    compiled = session.report.compile
    assert compiled.graphs == sum(count for _, _, count, _ in session.walk)
    assert compiled.recompiles == 2 * session.kinds
    assert compiled.graph_breaks == {}
    assert [kind.compiles for kind in compiled.kinds] == [3] * session.kinds
    assert sum(kind.blocks for kind in compiled.kinds) == (4 if session.name == "z_image" else 2)
    assert compiled.seconds > 0
    assert session.report.evaluations == len(WALK)


def test_a_second_run_compiles_nothing(session):
    assert session.second_graphs == 0
    assert session.second_report.engaged() == ENGAGED
    assert session.second_report.compile.graphs == 0
    assert session.second_report.compile.recompiles == 0
    assert torch.equal(session.second, session.walk[0][1])


def test_flags_differ_in_mid_run_and_are_equal_after_it(session):
    untiered, _, _ = session.during[0]  # the self-check's, of the first call
    assert untiered["matmul.fp32_precision"] == session.flags_before["matmul.fp32_precision"]
    during, _, _ = session.during[1]
    assert (
        during["matmul.fp32_precision"] == "tf32" != session.flags_before["matmul.fp32_precision"]
    )
    assert during["matmul.allow_tf32"] is True
    assert during["cudnn.conv"] == "tf32"
    assert session.flags_between == session.flags_before
    assert session.flags_after == session.flags_before
    assert session.report.flags["before"] == session.report.flags["after"]
    assert session.report.flags["during"]["matmul.tf32"]["allow_tf32"] is True


def test_fused_weights_cost_no_bytes_and_come_apart_again(session):
    _, while_fused, _ = session.during[1]
    assert len(while_fused) < len(session.storages_before)
    assert sum(while_fused.values()) == sum(session.storages_before.values())
    assert len(session.storages_after) == len(session.storages_before)
    assert sum(session.storages_after.values()) == sum(session.storages_before.values())


def test_names_of_weights_stay_visible_in_mid_run(session):
    """LoRA is matched by name; a compiled wrapper around a module would hide it."""
    assert all(names == list(session.state) for _, _, names in session.during)


def test_the_model_is_as_it_was(session):
    assert own_forwards(session.model) == []
    assert list(session.model.state_dict()) == list(session.state)
    for name, value in session.model.state_dict().items():
        assert torch.equal(value, session.state[name]), name
    assert [p.requires_grad for p in session.model.parameters()] == session.grads
    assert torch.equal(session.off_again, session.off[Size()]), "off is not off any more"


@pytest.mark.filterwarnings("ignore:.*complex operators")
@pytest.mark.parametrize(
    ("name", "backend"), [("qwen_image", "inductor"), ("z_image", "aot_eager")]
)
def test_complex_rope_compiles_and_matches(name, backend, monkeypatch, tmp_path):
    """diffusers' RoPE is complex; Inductor runs those operations eager inside its one graph.

    The cache folder has a blank and an apostrophe, where every build fails: it is replaced.
    """
    make, inputs, outside, kinds = CASES[name]
    bad_folder = str(tmp_path / "o'brien and co")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", bad_folder)
    during = []
    model = make(layers=1)
    off = output(model, inputs())
    exact = output(copy.deepcopy(model).double(), inputs(dtype=torch.float64))
    model.get_submodule(outside).register_forward_hook(lambda *_: during.append(full_state()))
    handle = apply_tier(model, "max", FORCED, optimizations(backend))
    got = output(model, inputs())
    report = handle.finish_run()
    handle.remove()
    assert report.engaged() == ENGAGED
    assert report.compile.graphs == kinds
    assert report.compile.graph_breaks == {}
    found, inside = (state["env"]["TORCHINDUCTOR_CACHE_DIR"] for state in during)
    assert found == bad_folder  # of the self-check's untiered call
    assert (inside != bad_folder) is (backend == "inductor")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == bad_folder
    bound = 1.1 * tiny.relative_error(off, exact) + 1e-7
    assert tiny.relative_error(got, exact) <= bound
    if backend == "inductor":
        assert not torch.equal(got, off), "nothing was compiled"
    assert torch.equal(output(model, inputs()), off)


@pytest.mark.parametrize("name", CASES)
def test_off_is_bit_identical_and_opens_nothing(name):
    make, inputs, outside, _ = CASES[name]
    model = make()
    expected = output(model, inputs())
    during = []
    with torch.no_grad():
        before = full_state()
    hook = model.get_submodule(outside).register_forward_hook(
        lambda *_: during.append((full_state(), own_forwards(model)))
    )
    handle = apply_tier(model, "off")
    assert torch.equal(output(model, inputs()), expected)
    report = handle.finish_run()
    handle.remove()
    hook.remove()
    assert report.features == []
    assert during == [(before, [""])], "only the entry point itself is wrapped"


def test_another_family_is_refused_in_words():
    with pytest.raises(UnsupportedModelError, match="Qwen-Image transformer; found Linear"):
        apply_tier(torch.nn.Linear(1, 1), "max")


def test_an_unknown_tier_lists_the_three():
    with pytest.raises(ValueError, match="off, default, max"):
        apply_tier(tiny.z_image(), "turbo")


LIGHT = (Tf32(), FusedQkv())


def test_an_exception_in_a_block_ends_the_run_and_restores_all():
    model, inputs = tiny.qwen_image(), tiny.qwen_image_inputs()
    expected = output(model, inputs)
    before = full_state()
    handle = apply_tier(model, "max", FORCED, LIGHT)
    break_it = model.norm_out.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output(model, inputs)
    assert full_state() == before
    assert own_forwards(model) == [""]
    assert handle.finish_run() is None
    break_it.remove()
    assert torch.allclose(output(model, inputs), expected, atol=1e-5)
    assert handle.finish_run().engaged() == ["tf32", "fused_qkv"]
    handle.remove()
    assert torch.equal(output(model, inputs), expected)


def test_an_out_of_memory_ends_the_run_as_failed():
    from speed_tier.speed import REPORTS

    model = tiny.z_image()
    handle = apply_tier(model, "max", FORCED, LIGHT)

    def fail(*_):
        raise torch.OutOfMemoryError("pretended")

    model.t_embedder.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        output(model, tiny.z_image_inputs())
    assert REPORTS.runs()[0].outcome == "failed"
    assert REPORTS.runs()[0].error == "OutOfMemoryError: pretended"
    handle.remove()


def test_two_models_interleaved_and_removed_in_the_other_order():
    first, second = tiny.z_image(), tiny.qwen_image()
    before = full_state()
    handles = [apply_tier(model, "max", FORCED, LIGHT) for model in (first, second)]
    output(first, tiny.z_image_inputs())
    output(second, tiny.qwen_image_inputs())
    assert full_state()["matmul.allow_tf32"] is True
    handles[0].remove()
    assert full_state()["matmul.allow_tf32"] is True, "the second still wants it"
    handles[1].remove()
    assert full_state() == before


def test_omni_inputs_are_described():
    """Lists of condition images and the target; each feature works or is skipped."""
    model = tiny.z_image(siglip_feat_dim=8)
    image = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    inputs = {
        "x": [[image, image]],
        "t": torch.tensor([0.5]),
        "cap_feats": [[torch.ones(3, 16), torch.ones(5, 16), torch.ones(2, 16)]],
        "siglip_feats": [[torch.ones(2, 2, 8), None]],
        "image_noise_mask": [[0, 1]],
    }
    expected = output(model, inputs)
    handle = apply_tier(model, "max", FORCED, LIGHT)
    assert torch.allclose(output(model, inputs), expected, atol=1e-5)
    assert handle.finish_run().engaged() == ["tf32", "fused_qkv"]
    handle.remove()


def test_nothing_keeps_the_model_alive():
    model = tiny.qwen_image()
    handle = apply_tier(model, "max", FORCED, optimizations("eager"))
    output(model, tiny.qwen_image_inputs())
    handle.remove()
    block = weakref.ref(model.transformer_blocks[0])
    dies = weakref.ref(model)
    del model, handle
    gc.collect()
    assert dies() is None
    assert block() is None


@pytest.mark.parametrize("name", CASES)
def test_blocks_that_keep_state_are_not_called_twice(name):
    make, inputs, *_ = CASES[name]
    model = make(layers=1)
    block = (getattr(model, "layers", None) or model.transformer_blocks)[0]
    original, calls = block.forward, []
    block.forward = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    handle = apply_tier(model, "max", FORCED, optimizations("eager"))
    output(model, inputs())
    report = handle.finish_run()
    handle.remove()
    assert "has a forward hook or another forward" in report.check.unchecked
    assert (len(calls), report.check.calls) == (1, 0)
