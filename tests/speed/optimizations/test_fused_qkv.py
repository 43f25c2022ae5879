"""q, k and v over one weight: the same numbers, no second copy, and everything back."""

import gc
import weakref

import pytest
import torch
from speed_tier.speed.optimizations import fused_qkv
from speed_tier.speed.optimizations.base import HostFacts
from speed_tier.speed.optimizations.fused_qkv import FusedQkv, group_problem
from speed_tier.speed.optimizations.regional_compile import CompileConfig, RegionalCompile
from speed_tier.speed.patching import active_patches
from speed_tier.tests.speed import tiny
from torch import nn
from torch._dynamo.utils import counters

FUSED = FusedQkv()


def fused(model, **more):
    return tiny.engaged(FUSED, on=model, forced=True, **more)


def projections(model, index=0):
    return tiny.TOY.projections(model)[index]


def weights(model, index=0):
    group = projections(model, index)
    return [group.q.weight, group.k.weight, group.v.weight]


def storages(model):
    return {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }


def share_one_storage(tensors):
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


pytestmark = pytest.mark.usefixtures("process_as_found")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_same_numbers_within_rounding(dtype, bias):
    model = tiny.toy(bias=bias).to(dtype)
    x = tiny.toy_input(tokens=16).to(dtype)
    expected = tiny.plain(model, x)
    exact = tiny.plain(tiny.toy(bias=bias).to(dtype).double(), x.double())
    with fused(model) as run:
        got = run.call(x)
        assert run.handles[0].note == "3 of 3 groups, no extra bytes"
    off_error = tiny.relative_error(expected, exact)
    assert tiny.relative_error(got, exact) <= 1.1 * off_error + 1e-7
    assert got.dtype == dtype


def test_one_product_in_place_of_three(monkeypatch):
    model, products = tiny.toy(blocks=2), []
    linear = torch.nn.functional.linear

    def counting(x, weight, bias=None):
        products.append(tuple(weight.shape))
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counting)
    with fused(model) as run:
        run.call(tiny.toy_input())
    assert products.count((3 * tiny.WIDTH, tiny.WIDTH)) == 2
    assert len(products) == 2 * (1 + 1 + 2), "qkv, out and the two of the mlp"


def test_weights_are_bit_equal_and_apart_again_after_release():
    model = tiny.toy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters, apart = dict(model.named_parameters()), storages(model)
    expected = tiny.plain(model, tiny.toy_input())
    with fused(model) as run:
        run.call(tiny.toy_input())
        assert share_one_storage(weights(model))
        together = storages(model)
        assert len(together) == len(apart) - 3 * 2 * 2, "three blocks, weight and bias"
        assert sum(together.values()) == sum(apart.values()), "a second copy is kept"
    assert share_one_storage(weights(model)), "kept for the next run"
    FUSED.release(model)
    assert not share_one_storage(weights(model))
    assert storages(model).values() and sum(storages(model).values()) == sum(apart.values())
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
    assert torch.equal(tiny.plain(model, tiny.toy_input()), expected)
    FUSED.release(model)  # twice


def test_between_runs_no_tensor_is_kept():
    model = tiny.toy()
    with fused(model) as run:
        run.call(tiny.toy_input())
        groups = list(fused_qkv._groups[model].values())
        joined = weakref.ref(groups[0].weight)
        assert joined() is not None
    assert all(group.weight is None and group.bias is None for group in groups)
    gc.collect()
    assert joined() is None
    assert "forward" not in vars(projections(model).q)


def test_a_weight_swapped_between_runs_is_picked_up():
    """A merged LoRA puts a new Parameter in; a fresh run must read that one."""
    model, x = tiny.toy(), tiny.toy_input()
    for name in ("to_q", "to_k", "to_v"):
        with fused(model) as run:
            run.call(x)
        linear = getattr(model.blocks[0].attention, name)
        linear.weight = nn.Parameter(linear.weight * 1.5, requires_grad=False)
        expected = tiny.plain(model, x)
        with fused(model) as run:
            torch.testing.assert_close(run.call(x), expected)
            assert share_one_storage(weights(model))


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_a_parameter_swapped_in_mid_run_is_picked_up(what):
    model, x = tiny.toy(), tiny.toy_input()
    with fused(model) as run:
        before = run.call(x)
        linear = model.blocks[0].attention.to_k
        setattr(linear, what, nn.Parameter(getattr(linear, what) * 2 + 1, requires_grad=False))
        got = run.call(x)
        torch.testing.assert_close(got, tiny.plain(model, x))
        assert not torch.allclose(got, before)
        assert share_one_storage(weights(model))


def test_a_weight_swapped_for_one_that_cannot_be_fused_runs_apart():
    model, x = tiny.toy(), tiny.toy_input()
    with fused(model) as run:
        run.call(x)
        linear = model.blocks[0].attention.to_k
        linear.weight = type("Quantised", (nn.Parameter,), {})(linear.weight * 2)
        torch.testing.assert_close(run.call(x), tiny.plain(model, x))


@pytest.mark.parametrize("when", ["before", "during", "between"])
def test_a_copy_in_place_reaches_the_fused_weight(when):
    """A scheduled LoRA copies into the same storage, unseen by version counters."""
    model, x = tiny.toy(), tiny.toy_input()

    def merge():
        for linear in (model.blocks[1].attention.to_q, model.blocks[1].attention.to_v):
            linear.weight.data.copy_(linear.weight.data * 1.5)

    if when == "before":
        merge()
    with fused(model) as run:
        run.call(x)
        if when == "during":
            merge()
            torch.testing.assert_close(run.call(x), tiny.plain(model, x))
    if when == "between":
        merge()
    with fused(model) as run:
        torch.testing.assert_close(run.call(x), tiny.plain(model, x))


def test_lora_before_or_after_fusing_ends_in_the_same_weights():
    """Fuse, merge a LoRA on q, k and v, take it out, unfuse: what was there comes back."""
    model, x = tiny.toy(blocks=1), tiny.toy_input()
    original = [weight.clone() for weight in weights(model)]
    deltas = [torch.randn_like(weight) for weight in original]
    unfused = tiny.plain(tiny.toy(blocks=1), x)
    with fused(model) as run:
        for weight, delta in zip(weights(model), deltas, strict=True):
            weight.data.add_(delta)
        with_lora = run.call(x)
    for weight, value in zip(weights(model), original, strict=True):
        weight.data.copy_(value)
    FUSED.release(model)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), original, strict=True))
    torch.testing.assert_close(tiny.plain(model, x), unfused, rtol=0, atol=0)
    assert not torch.allclose(with_lora, unfused)
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in tiny.toy(blocks=1).named_parameters()
    ]


def test_weights_made_in_inference_mode_come_apart_outside_of_it():
    """The host loads and runs in inference mode; an unload may come from anywhere."""
    with torch.inference_mode():
        model, x = tiny.toy(), tiny.toy_input()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        expected = model(x)
        with fused(model) as run:
            torch.testing.assert_close(run.call(x), expected)
    assert share_one_storage(weights(model))
    FUSED.release(model)
    assert not share_one_storage(weights(model))
    assert all(weight.is_inference() for weight in weights(model))
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
        model.blocks[0].attention.to_q.weight.mul_(2)  # a merge is possible as before
    assert torch.equal(model.state_dict()["blocks.1.norm.weight"], before["blocks.1.norm.weight"])


def test_projections_called_on_different_inputs_run_apart():
    model = tiny.toy(blocks=1)
    group = projections(model)
    x, y = tiny.toy_input(seed=1), tiny.toy_input(seed=2)
    expected = [tiny.plain(m, t) for m, t in ((group.q, x), (group.k, y), (group.v, x))]
    expected_again = tiny.plain(group.v, x)

    class Cross(nn.Module):
        def forward(self):
            first = [group.q(x), group.k(y), group.v(x)]
            return first, group.v(x), group.k(x)

    with fused(model) as run:
        run.denoiser = Cross()
        first, again, late = run.call()
    for got, wanted in zip(first, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(again, expected_again)
    torch.testing.assert_close(late, tiny.plain(group.k, x))


def test_an_exception_between_q_and_v_leaves_nothing_behind():
    model, x = tiny.toy(blocks=1), tiny.toy_input()
    expected = tiny.plain(model, x)
    with fused(model) as run:
        hook = model.blocks[0].attention.to_v.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.call(x)
        hook.remove()
        assert active_patches() == 0
        torch.testing.assert_close(run.call(x), expected)
        with pytest.raises(RuntimeError):
            run.call(torch.zeros(1, 2, tiny.WIDTH + 1))
    (group,) = fused_qkv._groups[model].values()
    assert (group._input, group._k, group._v) == (None, None, None)


def test_a_nested_run_does_not_take_the_weight_from_the_outer_one():
    model, x = tiny.toy(), tiny.toy_input()
    expected = tiny.plain(model, x)
    with fused(model) as outer:
        outer.call(x)
        with fused(model) as inner:
            torch.testing.assert_close(inner.call(x), expected)
        group = fused_qkv._groups[model]["blocks.0.attention"]
        assert group.weight is not None
        torch.testing.assert_close(outer.call(x), expected)
    assert group.weight is None


def test_an_install_that_runs_out_of_memory_keeps_no_tensor(monkeypatch):
    model = tiny.toy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cat, calls = torch.cat, []

    def failing(tensors, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:  # the bias of the second block
            raise torch.OutOfMemoryError("pretended")
        return cat(tensors, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "cat", failing)
        with pytest.raises(torch.OutOfMemoryError):
            FUSED.install(tiny.context(model, forced=True))
    assert len(calls) == 4
    groups = fused_qkv._groups[model].values()
    assert all(group._holders == 0 for group in groups)
    assert all(group.weight is None and group.bias is None for group in groups)
    FUSED.release(model)
    assert not share_one_storage(weights(model))
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())


def alter(model, change):
    change(model.blocks[0].attention)
    return projections(model)


def replace_weight(name, make):
    def change(attention):
        linear = getattr(attention, name)
        linear.weight = make(linear.weight)

    return change


class HostLinear(nn.Linear):
    """The host's Linear, as far as its markers go."""

    comfy_cast_weights = False
    weight_function = ()
    bias_function = ()


def host_linear(**markers):
    def change(attention):
        for name in ("to_q", "to_k", "to_v"):
            linear = HostLinear(tiny.WIDTH, tiny.WIDTH)
            setattr(attention, name, linear)
        vars(attention.to_k).update(markers)

    return change


class Packed(nn.Parameter):
    """Stands for any tensor class that holds packed data."""


DECLINES = {
    "mixed dtype": (
        replace_weight("to_v", lambda w: nn.Parameter(w.to(torch.bfloat16))),
        "weights differ in dtype (torch.float32, torch.float32, torch.bfloat16)",
    ),
    "quantised dtype": (
        replace_weight("to_k", lambda w: nn.Parameter(w.to(torch.float8_e4m3fn), False)),
        "weights are quantised or of a special type (torch.float32, torch.float8_e4m3fn)",
    ),
    "packed bytes": (
        replace_weight("to_q", lambda w: nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), False)),
        "weights are quantised or of a special type (torch.float32, torch.uint8)",
    ),
    "tensor class": (
        replace_weight("to_v", lambda w: Packed(w)),
        "weights are quantised or of a special type (Packed, torch.float32)",
    ),
    "another width": (
        replace_weight("to_v", lambda w: nn.Parameter(torch.zeros(8, 16))),
        "weights differ in width ([(32, 32), (32, 32), (8, 16)])",
    ),
    "offloaded": (
        replace_weight("to_k", lambda w: nn.Parameter(w.to("meta"))),
        "weights are not all on cpu",
    ),
    "one bias": (
        lambda attention: setattr(attention.to_k, "bias", None),
        "only some of the three have a bias",
    ),
    "foreign forward": (
        lambda attention: setattr(attention.to_q, "forward", lambda x: x),
        "another pack has replaced a projection's forward",
    ),
    "hook": (
        lambda attention: attention.to_q.register_forward_hook(lambda *_: None),
        "a projection has a forward hook",
    ),
    "pre-hook": (
        lambda attention: attention.to_v.register_forward_pre_hook(lambda *_: None),
        "a projection has a forward hook",
    ),
    "host casts": (
        host_linear(comfy_cast_weights=True),
        "weights are cast or loaded at every call",
    ),
    "host patches": (host_linear(weight_function=[1]), "weights are patched at every call"),
    "host patches a bias": (host_linear(bias_function=[1]), "weights are patched at every call"),
    "three classes": (
        lambda attention: setattr(attention, "to_v", HostLinear(tiny.WIDTH, tiny.WIDTH)),
        "the three are of different classes (Linear, Linear, HostLinear)",
    ),
}


@pytest.mark.parametrize("name", DECLINES)
def test_a_group_declines_in_words_and_the_others_fuse(name):
    change, reason = DECLINES[name]
    model = tiny.toy(blocks=2)
    group = alter(model, change)
    assert group_problem(group, tiny.CPU) == reason
    handle = FUSED.install(tiny.context(model, forced=True))
    assert handle.note == "1 of 2 groups, no extra bytes"
    assert {patch.target for patch in handle.patches} == {
        *(projections(model, 1).q, projections(model, 1).k, projections(model, 1).v)
    }
    handle.remove()


def test_plain_host_modules_are_fused():
    model = tiny.toy(blocks=1)
    assert group_problem(alter(model, host_linear()), tiny.CPU) is None


def test_the_whole_declines_when_no_group_can_be_fused():
    model = tiny.toy(blocks=1)
    alter(model, DECLINES["mixed dtype"][0])
    reason = FUSED.check(tiny.context(model, forced=True))
    assert reason == f"no group can be fused: {DECLINES['mixed dtype'][1]}"


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (HostFacts(dynamic_vram=True), "dynamic VRAM may move weights at any call"),
        (
            HostFacts(compiled_by="a torch.compile node"),
            "a torch.compile node compiles this model; its projections stay",
        ),
    ],
)
def test_the_host_can_rule_it_out(host, reason):
    assert FUSED.check(tiny.context(tiny.toy(), forced=True, host=host)) == reason


def test_nothing_to_do_where_the_model_has_one_projection():
    reason = FUSED.check(tiny.context(tiny.Toy(), forced=True))
    assert reason == "nothing to do: this model's q, k and v are one projection already"


def test_compiled_over_fused_all_blocks_share_one_graph():
    model, x = tiny.toy(blocks=6), tiny.toy_input()
    expected = tiny.plain(model, x)
    compiled = RegionalCompile(CompileConfig(backend="eager"))
    before = counters["stats"]["unique_graphs"]
    for _ in range(2):  # and none in the second run
        with tiny.engaged(FUSED, compiled, on=model, forced=True) as run:
            for _ in range(2):
                torch.testing.assert_close(run.call(x), expected)
            facts = run.handles[1].compile_facts()
            assert facts.graph_breaks == {}
    assert counters["stats"]["unique_graphs"] - before == 1


def test_compiled_over_fused_honours_a_swapped_weight():
    model, x = tiny.toy(), tiny.toy_input()
    compiled = RegionalCompile(CompileConfig(backend="eager"))
    with tiny.engaged(FUSED, compiled, on=model, forced=True) as run:
        run.call(x)
        linear = model.blocks[0].attention.to_q
        linear.weight = nn.Parameter(linear.weight * 3, requires_grad=False)
        torch.testing.assert_close(run.call(x), tiny.plain(model, x))
        linear.weight.data.mul_(2)
        torch.testing.assert_close(run.call(x), tiny.plain(model, x))


def test_nothing_keeps_the_model_alive():
    model = tiny.toy()
    with fused(model) as run:
        run.call(tiny.toy_input())
    dies = weakref.ref(model)
    del model, run
    gc.collect()
    assert dies() is None
