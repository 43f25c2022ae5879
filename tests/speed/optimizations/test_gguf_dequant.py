"""The fast dequantisation: engages on packed layers of ours and of another pack, leaves nothing."""

import gc
import weakref
from operator import is_

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from speed_tier.speed.apply import Call, TieredModel, TierRequest
from speed_tier.speed.gguf.linear import QuantLinear, QuantState
from speed_tier.speed.kernels import chosen_path
from speed_tier.speed.optimizations import gguf_dequant
from speed_tier.speed.optimizations.gguf_dequant import GgufDequant
from speed_tier.speed.patching import active_patches
from speed_tier.speed.report import State
from speed_tier.speed.tiers import resolve_tier
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.gguf.layers import (
    TOY_LAYERS,
    Lora,
    Random,
    StoredLinear,
    StoredTensor,
    bytes_of,
    counted_fast_calls,
    fresh_seed,
    packed_toy,
    quantised,
    stored_toy,
    swap_linears,
)
from speed_tier.tests.speed.optimizations.compiling import EAGER
from speed_tier.tests.speed.process import full_state
from speed_tier.tests.speed.tiny import WIDTH, toy, toy_input

DEQUANT = GgufDequant()


@pytest.fixture(autouse=True)
def fast_calls():
    before = full_state()
    with counted_fast_calls() as calls:
        yield calls
    assert full_state() == before
    assert active_patches() == 0


@pytest.fixture
def rng():
    return Random(fresh_seed())


def check_same(run, x=None):
    """One call of a run, checked against the plain denoiser."""
    x = toy_input() if x is None else x
    got = run.call(x)
    torch.testing.assert_close(got, tiny.plain(run.denoiser, x))
    return got


# ---- ours ----


def test_packed_layers_of_ours_go_the_fast_path_while_a_call_runs(rng, fast_calls):
    model, layers = packed_toy(rng)
    state = layers[0].state
    during = []
    model.blocks[1].register_forward_hook(lambda *_: during.append(state.fast))
    with tiny.engaged(DEQUANT, on=model) as run:
        assert not state.fast
        got = run.call(toy_input())
        assert (during, fast_calls) == ([True], {"Q8_0": TOY_LAYERS})
        assert not state.fast
    assert torch.equal(got, tiny.plain(model, toy_input()))
    assert fast_calls == {"Q8_0": TOY_LAYERS}, "off goes by the reference"
    assert "loaded by another GGUF loader" not in run.handles[0].note


def test_every_state_of_a_model_is_switched(rng, fast_calls):
    model, layers = packed_toy(rng)
    for layer in layers[::2]:
        layer.state = QuantState()
    with tiny.engaged(DEQUANT, on=model) as run:
        check_same(run)
    assert fast_calls == {"Q8_0": TOY_LAYERS}
    assert not any(layer.state.fast for layer in layers)


def test_an_exception_in_a_call_restores_all(rng):
    (model, layers), (other, stored) = packed_toy(rng), stored_toy(rng)
    for one in (model, other):
        one.blocks[2].register_forward_hook(lambda *_: 1 / 0)
        with tiny.engaged(DEQUANT, on=one) as run, pytest.raises(ZeroDivisionError):
            run.call(toy_input())
    assert not layers[0].state.fast
    assert not any("forward" in vars(layer) for layer in stored)


def test_what_was_fast_before_stays_so(rng):
    model, layers = packed_toy(rng)
    layers[0].state.fast = True
    with tiny.engaged(DEQUANT, on=model) as run:
        run.call(toy_input())
    assert layers[0].state.fast


# ---- another pack's ----


def test_layers_of_another_pack_are_stood_in_for_while_a_call_runs(rng, fast_calls):
    model, layers = stored_toy(rng)
    attributes = [dict(vars(layer)) for layer in layers]
    keys = list(model.state_dict())
    with tiny.engaged(DEQUANT, on=model) as run:
        got = run.call(toy_input())
        assert fast_calls == {"Q8_0": TOY_LAYERS}
        assert not any(layer.own_calls for layer in layers)
        assert not any("forward" in vars(layer) for layer in layers)
        assert list(model.state_dict()) == keys
    assert [vars(layer) for layer in layers] == attributes
    torch.testing.assert_close(got, tiny.plain(model, toy_input()))
    assert fast_calls == {"Q8_0": TOY_LAYERS}
    assert all(len(layer.own_calls) == 1 for layer in layers)
    assert run.handles[0].note.endswith("loaded by another GGUF loader")


def test_both_in_one_model(rng, fast_calls):
    model, _ = stored_toy(rng, "Q4_0")
    model.blocks[0] = packed_toy(rng, "Q8_0")[0].blocks[0]
    with tiny.engaged(DEQUANT, on=model) as run:
        check_same(run)
    assert fast_calls == {"Q8_0": 6, "Q4_0": 12}


def test_a_dense_model_has_nothing_to_do():
    assert DEQUANT.check(tiny.context(toy())) == "nothing to do: no GGUF weights"
    empty = toy()
    swap_linears(empty, lambda old: QuantLinear(WIDTH, WIDTH))  # a host's, with no packed weight
    assert DEQUANT.check(tiny.context(empty)) == "nothing to do: no GGUF weights"


def test_weights_and_patches_are_followed_between_calls(rng, fast_calls):
    model, layers = stored_toy(rng)
    lora = Lora(rng.tensor(WIDTH, 3), rng.tensor(3, WIDTH))
    with tiny.engaged(DEQUANT, on=model) as run:
        first = check_same(run)
        for layer in layers:
            layer.weight = rng.stored_layer("Q8_0", WIDTH, WIDTH)[0].weight
        second = check_same(run)
        layers[4].hold(layers[4].weight, [lora.patch(0.5)])
        third = check_same(run)
        layers[4].hold(layers[4].weight, [lora.patch(-2.0)])
        fourth = check_same(run)
        layers[4].weight.patches = []
        torch.testing.assert_close(check_same(run), second)
    for one, two in ((first, second), (second, third), (third, fourth)):
        assert not torch.allclose(one, two)
    assert fast_calls == {"Q8_0": 5 * TOY_LAYERS}


def test_a_patch_beyond_low_rank_is_that_layers_own(rng, fast_calls):
    model, layers = stored_toy(rng)
    change = Lora(rng.tensor(WIDTH, 3), rng.tensor(3, WIDTH)).patch(model_strength=0.5)
    layers[7].hold(layers[7].weight, [change])
    with tiny.engaged(DEQUANT, on=model) as run:
        run.call(toy_input())
        assert [index for index, layer in enumerate(layers) if layer.own_calls] == [7]
        assert fast_calls == {"Q8_0": TOY_LAYERS - 1}
        check_same(run)


def hook(layer):
    layer.register_forward_hook(lambda module, args, output: output * 2)


def hook_before(layer):
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def replace(layer):
    layer.forward = lambda x: StoredLinear.forward(layer, x) * 2


@pytest.mark.parametrize("take", [hook, hook_before, replace])
def test_a_hooked_or_replaced_layer_is_left_alone(rng, fast_calls, take):
    model, layers = stored_toy(rng)
    take(layers[5])
    theirs = vars(layers[5]).get("forward")
    with tiny.engaged(DEQUANT, on=model) as run:
        check_same(run)
        assert fast_calls == {"Q8_0": TOY_LAYERS - 1}
    assert vars(layers[5]).get("forward") is theirs
    assert "17 Q8_0" in run.handles[0].note
    assert run.handles[0].note.endswith(
        "1 layers left alone: another pack has replaced or hooked them"
    )


def test_all_hooked_or_replaced_is_nothing_engaged(rng):
    model, layers = stored_toy(rng)
    for layer in layers:
        hook(layer)
    reason = "another pack has replaced or hooked every GGUF layer"
    assert DEQUANT.check(tiny.context(model)) == reason


def test_the_layers_own_method_in_its_instance_is_no_replacement(rng, fast_calls):
    """What a host leaves behind that has restored an object patch."""
    model, layers = stored_toy(rng)
    layers[0].forward = own = layers[0].forward
    with tiny.engaged(DEQUANT, on=model) as run:
        check_same(run)
    assert fast_calls == {"Q8_0": TOY_LAYERS}
    assert vars(layers[0])["forward"] == own


def test_a_layer_that_is_replaced_for_another_is_found_in_the_next_run(rng, fast_calls):
    model, _ = stored_toy(rng)
    with tiny.engaged(DEQUANT, on=model) as run:
        check_same(run)
    model.blocks[0].attention.out = rng.stored_layer("Q4_0", WIDTH, WIDTH)[0]
    model.blocks[0].attention.to_q.weight = rng.stored_layer("Q5_0", WIDTH, WIDTH)[0].weight
    fast_calls.clear()
    with tiny.engaged(DEQUANT, on=model) as run:
        check_same(run)
    assert fast_calls == {"Q8_0": TOY_LAYERS - 2, "Q4_0": 1, "Q5_0": 1}


def test_the_next_run_meets_the_same_stand_ins_and_factors(rng):
    model, layers = stored_toy(rng)
    layers[0].hold(layers[0].weight, [Lora(rng.tensor(WIDTH, 3), rng.tensor(3, WIDTH)).patch()])
    seen = []
    for _ in range(2):
        with tiny.engaged(DEQUANT, on=model) as run:
            run.call(toy_input())
            first = run.handles[0].foreign[0]
            seen.append((first, first.adapters, first.adapters._factors))
    assert all(map(is_, *seen))


def test_a_nested_run_leaves_the_outer_one_engaged(rng, fast_calls):
    for model, _ in (packed_toy(rng), stored_toy(rng)):
        fast_calls.clear()
        with tiny.engaged(DEQUANT, on=model) as outer:
            check_same(outer)
            with tiny.engaged(DEQUANT, on=model) as inner:
                check_same(inner)
            check_same(outer)
        assert fast_calls == {"Q8_0": 3 * TOY_LAYERS}


# ---- what is kept ----


def in_buffers(model):
    """Every stored weight moved into a numpy buffer; weak references to those."""
    references = []
    for layer in model.modules():
        if isinstance(layer, StoredLinear):
            buffer = bytes_of(layer.weight).numpy().copy()
            references.append(weakref.ref(buffer))
            layer.hold(StoredTensor.of(torch.from_numpy(buffer), Q.Q8_0, (WIDTH, WIDTH)))
    return references


@pytest.mark.parametrize("compiled", [False, True])
def test_no_weight_is_kept_after_a_run(rng, compiled):
    model, layers = stored_toy(rng)
    buffers = in_buffers(model)
    with tiny.engaged(DEQUANT, *[EAGER] * compiled, on=model) as run:
        run.call(toy_input())
        for layer in layers:
            layer.weight = None  # the host takes the model off the card
        assert all(buffer() is not None for buffer in buffers), "the run still has them"
    gc.collect()
    assert [buffer() for buffer in buffers] == [None] * TOY_LAYERS


@pytest.mark.parametrize("compiled", [False, True])
def test_release_drops_all(rng, compiled):
    model, _ = stored_toy(rng)
    with tiny.engaged(DEQUANT, *[EAGER] * compiled, on=model) as run:
        run.call(toy_input())
        stand_ins = [weakref.ref(layer) for layer in run.handles[0].foreign]
    assert model in gguf_dequant._foreign
    run.handles.clear()
    DEQUANT.release(model)
    DEQUANT.release(model)
    gc.collect()
    assert model not in gguf_dequant._foreign
    assert [reference() for reference in stand_ins] == [None] * TOY_LAYERS


@pytest.mark.parametrize("make", [packed_toy, stored_toy])
def test_nothing_keeps_the_model_alive(rng, make):
    model, layers = make(rng)
    with tiny.engaged(DEQUANT, EAGER, on=model) as run:
        run.call(toy_input())
    dying = [weakref.ref(one) for one in (model, model.blocks[0], layers[0])]
    del model, layers, run
    gc.collect()
    assert [reference() for reference in dying] == [None] * 3


def test_the_note_counts_types_and_names_the_slow_ones(rng):
    state = QuantState(notes=("1 tensors of type IQ3_S have no fast kernel: slow",))
    model, _ = packed_toy(rng, "Q8_0", state)
    model.wide = rng.layer("IQ3_S", 8, 256, state=state)[0]
    model.blocks[0].attention.out = rng.stored_layer("Q4_0", WIDTH, WIDTH)[0]
    with tiny.engaged(DEQUANT, on=model) as run:
        note = run.handles[0].note
    why = chosen_path(Q.Q8_0, tiny.CPU)[1]  # other words under the interpreter
    assert note == (
        f"layers by type: 17 Q8_0 (reference: {why}), "
        "1 IQ3_S (reference: IQ3_S has no kernel; timed), "
        f"1 Q4_0 (reference: {why}); "
        "1 tensors of type IQ3_S have no fast kernel: slow; loaded by another GGUF loader"
    )


@pytest.mark.parametrize("another_packs", [False, True])
def test_engaged_by_name_in_a_run_of_the_default_tier(rng, fast_calls, another_packs):
    model = quantised("z_image", rng, another_packs)
    packed = sum(isinstance(module, (QuantLinear, StoredLinear)) for module in model.modules())
    tiered = TieredModel(TierRequest(resolve_tier(None, is_gguf=True), self_check=False))
    run = tiered.begin(tiered.new_report(), tiny.CPU)
    call = Call(model, tiny.CPU, torch.float32, (1, 4, 1, 8, 8))
    inputs = tiny.z_image_inputs()
    got = run.call(call, lambda options: tiny.output(model, inputs))
    report = run.close("done")
    tiered.release(model)
    assert report.tier == "default"
    assert report.feature("gguf_dequant").state is State.ENGAGED
    assert report.feature("gguf_dequant").note.startswith("layers by type: ")
    assert sum(fast_calls.values()) == packed
    torch.testing.assert_close(got, tiny.output(model, inputs))
