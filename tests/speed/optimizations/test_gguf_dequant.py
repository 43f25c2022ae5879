"""The fast dequantisation: engages on packed layers of ours and of another pack, leaves nothing."""

import contextlib
import gc
import weakref
from collections import Counter

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from speed_tier.speed.apply import Call, TieredModel, TierRequest
from speed_tier.speed.families import detect_family
from speed_tier.speed.gguf.linear import QuantLinear, QuantState
from speed_tier.speed.kernels import chosen_path, dispatch, launch
from speed_tier.speed.optimizations import gguf_dequant
from speed_tier.speed.optimizations.gguf_dequant import GgufDequant
from speed_tier.speed.patching import active_patches
from speed_tier.speed.report import State
from speed_tier.speed.tiers import resolve_tier
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.gguf.layers import (
    Lora,
    Random,
    StoredLinear,
    StoredTensor,
    bytes_of,
    counted_fast_calls,
    fresh_seed,
    swap_linears,
)
from speed_tier.tests.speed.optimizations.compiling import EAGER, graphs
from speed_tier.tests.speed.process import full_state
from speed_tier.tests.speed.tiny import WIDTH, toy, toy_input

DEQUANT = GgufDequant()
BLOCKS, LAYERS = 3, 18  # of the toy: six Linear a block


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


def ours(rng, name="Q8_0", state=None):
    """The toy with packed layers of ours, and those."""
    model, state = toy(BLOCKS), state or QuantState()
    made = swap_linears(model, lambda old: rng.layer(name, WIDTH, WIDTH, state=state)[0])
    return model, made


def foreign(rng, name="Q8_0"):
    """The toy with another pack's packed layers, and those."""
    model = toy(BLOCKS)
    return model, swap_linears(model, lambda old: rng.stored_layer(name, WIDTH, WIDTH)[0])


def check_same(run, x=None):
    """One call of a run, checked against the plain denoiser."""
    x = toy_input() if x is None else x
    got = run.call(x)
    torch.testing.assert_close(got, tiny.plain(run.denoiser, x))
    return got


# ---- ours ----


def test_packed_layers_of_ours_go_the_fast_path_while_a_call_runs(rng, fast_calls):
    model, layers = ours(rng)
    state = layers[0].state
    during = []
    model.blocks[1].register_forward_hook(lambda *_: during.append(state.fast))
    with tiny.engaged(DEQUANT, on=model) as run:
        assert not state.fast
        got = run.call(toy_input())
        assert (during, fast_calls) == ([True], {"Q8_0": LAYERS})
        assert not state.fast
    assert torch.equal(got, tiny.plain(model, toy_input()))
    assert fast_calls == {"Q8_0": LAYERS}, "off goes by the reference"
    assert "loaded by another GGUF pack" not in run.handles[0].note


def test_every_state_of_a_model_is_switched(rng, fast_calls):
    model, layers = ours(rng)
    for layer in layers[::2]:
        layer.state = QuantState()
    with tiny.engaged(DEQUANT, on=model) as run:
        check_same(run)
    assert fast_calls == {"Q8_0": LAYERS}
    assert not any(layer.state.fast for layer in layers)


def test_an_exception_in_a_call_restores_all(rng):
    (model, layers), (other, stored) = ours(rng), foreign(rng)
    for one in (model, other):
        one.blocks[2].register_forward_hook(lambda *_: 1 / 0)
        with tiny.engaged(DEQUANT, on=one) as run, pytest.raises(ZeroDivisionError):
            run.call(toy_input())
    assert not layers[0].state.fast
    assert not any("forward" in vars(layer) for layer in stored)


def test_what_was_fast_before_stays_so(rng):
    model, layers = ours(rng)
    layers[0].state.fast = True
    with tiny.engaged(DEQUANT, on=model) as run:
        run.call(toy_input())
    assert layers[0].state.fast


# ---- another pack's ----


def test_layers_of_another_pack_are_stood_in_for_while_a_call_runs(rng, fast_calls):
    model, layers = foreign(rng)
    attributes = [dict(vars(layer)) for layer in layers]
    keys = list(model.state_dict())
    with tiny.engaged(DEQUANT, on=model) as run:
        got = run.call(toy_input())
        assert fast_calls == {"Q8_0": LAYERS}
        assert not any(layer.own_calls for layer in layers)
        assert not any("forward" in vars(layer) for layer in layers)
        assert list(model.state_dict()) == keys
    assert [vars(layer) for layer in layers] == attributes
    torch.testing.assert_close(got, tiny.plain(model, toy_input()))
    assert fast_calls == {"Q8_0": LAYERS}
    assert all(len(layer.own_calls) == 1 for layer in layers)
    assert run.handles[0].note.endswith("loaded by another GGUF pack")


def test_both_in_one_model(rng, fast_calls):
    model, _ = foreign(rng, "Q4_0")
    model.blocks[0] = ours(rng, "Q8_0")[0].blocks[0]
    with tiny.engaged(DEQUANT, on=model) as run:
        check_same(run)
    assert fast_calls == {"Q8_0": 6, "Q4_0": 12}


def test_a_dense_model_has_nothing_to_do():
    assert DEQUANT.check(tiny.context(toy())) == "nothing to do: no GGUF weights"
    empty = toy()
    swap_linears(empty, lambda old: QuantLinear(WIDTH, WIDTH))  # a host's, with no packed weight
    assert DEQUANT.check(tiny.context(empty)) == "nothing to do: no GGUF weights"


def test_weights_and_patches_are_followed_between_calls(rng, fast_calls):
    model, layers = foreign(rng)
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
    assert fast_calls == {"Q8_0": 5 * LAYERS}


def test_a_patch_beyond_low_rank_is_that_layers_own(rng, fast_calls):
    model, layers = foreign(rng)
    change = Lora(rng.tensor(WIDTH, 3), rng.tensor(3, WIDTH)).patch(model_strength=0.5)
    layers[7].hold(layers[7].weight, [change])
    with tiny.engaged(DEQUANT, on=model) as run:
        run.call(toy_input())
        assert [index for index, layer in enumerate(layers) if layer.own_calls] == [7]
        assert fast_calls == {"Q8_0": LAYERS - 1}
        check_same(run)


def hook(layer):
    layer.register_forward_hook(lambda module, args, output: output * 2)


def hook_before(layer):
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def replace(layer):
    layer.forward = lambda x: StoredLinear.forward(layer, x) * 2


@pytest.mark.parametrize("take", [hook, hook_before, replace])
def test_a_hooked_or_replaced_layer_is_left_alone(rng, fast_calls, take):
    model, layers = foreign(rng)
    take(layers[5])
    theirs = vars(layers[5]).get("forward")
    with tiny.engaged(DEQUANT, on=model) as run:
        check_same(run)
        assert fast_calls == {"Q8_0": LAYERS - 1}
    assert vars(layers[5]).get("forward") is theirs
    assert "17 Q8_0" in run.handles[0].note
    assert run.handles[0].note.endswith(
        "1 layers left alone: another pack has replaced or hooked them"
    )


def test_all_hooked_or_replaced_is_nothing_engaged(rng):
    model, layers = foreign(rng)
    for layer in layers:
        hook(layer)
    reason = "another pack has replaced or hooked every GGUF layer"
    assert DEQUANT.check(tiny.context(model)) == reason


def test_the_layers_own_method_in_its_instance_is_no_replacement(rng, fast_calls):
    """What a host leaves behind that has restored an object patch."""
    model, layers = foreign(rng)
    layers[0].forward = own = layers[0].forward
    with tiny.engaged(DEQUANT, on=model) as run:
        check_same(run)
    assert fast_calls == {"Q8_0": LAYERS}
    assert vars(layers[0])["forward"] == own


def test_a_layer_that_is_replaced_for_another_is_found_in_the_next_run(rng, fast_calls):
    model, _ = foreign(rng)
    with tiny.engaged(DEQUANT, on=model) as run:
        check_same(run)
    model.blocks[0].attention.out = rng.stored_layer("Q4_0", WIDTH, WIDTH)[0]
    model.blocks[0].attention.to_q.weight = rng.stored_layer("Q5_0", WIDTH, WIDTH)[0].weight
    fast_calls.clear()
    with tiny.engaged(DEQUANT, on=model) as run:
        check_same(run)
    assert fast_calls == {"Q8_0": LAYERS - 2, "Q4_0": 1, "Q5_0": 1}


def test_a_nested_run_leaves_the_outer_one_engaged(rng, fast_calls):
    for model, _ in (ours(rng), foreign(rng)):
        fast_calls.clear()
        with tiny.engaged(DEQUANT, on=model) as outer:
            check_same(outer)
            with tiny.engaged(DEQUANT, on=model) as inner:
                check_same(inner)
            check_same(outer)
        assert fast_calls == {"Q8_0": 3 * LAYERS}


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
    model, layers = foreign(rng)
    buffers = in_buffers(model)
    with tiny.engaged(DEQUANT, *[EAGER] * compiled, on=model) as run:
        run.call(toy_input())
        for layer in layers:
            layer.weight = None  # the host takes the model off the card
        gc.collect()
        assert all(buffer() is not None for buffer in buffers), "the run still has them"
    gc.collect()
    assert [buffer() for buffer in buffers] == [None] * LAYERS


@pytest.mark.parametrize("compiled", [False, True])
def test_release_drops_all(rng, compiled):
    model, _ = foreign(rng)
    with tiny.engaged(DEQUANT, *[EAGER] * compiled, on=model) as run:
        run.call(toy_input())
        stand_ins = [weakref.ref(layer) for layer in run.handles[0].foreign]
    assert model in gguf_dequant._foreign
    run.handles.clear()
    DEQUANT.release(model)
    DEQUANT.release(model)
    gc.collect()
    assert model not in gguf_dequant._foreign
    assert [reference() for reference in stand_ins] == [None] * LAYERS


@pytest.mark.parametrize("make", [ours, foreign])
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
    model, _ = ours(rng, "Q8_0", state)
    model.wide = rng.layer("IQ3_S", 8, 256, state=state)[0]
    model.blocks[0].attention.out = rng.stored_layer("Q4_0", WIDTH, WIDTH)[0]
    with tiny.engaged(DEQUANT, on=model) as run:
        note = run.handles[0].note
    why = chosen_path(Q.Q8_0, tiny.CPU)[1]  # other words under the interpreter
    assert note == (
        f"layers by type: 17 Q8_0 (reference: {why}), "
        "1 IQ3_S (reference: IQ3_S has no kernel; timed), "
        f"1 Q4_0 (reference: {why}); "
        "1 tensors of type IQ3_S have no fast kernel: slow; loaded by another GGUF pack"
    )


@pytest.mark.parametrize("another_packs", [False, True])
def test_engaged_by_name_in_a_run_of_the_default_tier(rng, fast_calls, another_packs):
    model = quantised("z_image", rng, another_packs)
    packed = sum(isinstance(module, (QuantLinear, StoredLinear)) for module in model.modules())
    tiered = TieredModel(TierRequest(resolve_tier(None, is_gguf=True)))
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


# ---- together with compiled blocks ----

MODELS = {  # of one kind of block each
    "z_image": (lambda: tiny.z_image(refiners=0), tiny.z_image_inputs),
    "qwen_image": (tiny.qwen_image, tiny.qwen_image_inputs),
}


def quantised(name, rng, another_packs=False):
    """A real tiny transformer with its blocks' Linear weights packed, in two types."""
    model, state = MODELS[name][0](), QuantState()

    def pack(old):
        if old.in_features % 32:
            return None
        name = "Q4_0" if old.out_features > old.in_features else "Q8_0"
        size = (name, old.out_features, old.in_features, old.bias is not None)
        new, _ = rng.stored_layer(*size) if another_packs else rng.layer(*size, state)
        return new

    for block in detect_family(model)[0].repeated_blocks(model):
        assert swap_linears(block.module, pack)
    return model.requires_grad_(False)


def packed_count(model):
    return sum(isinstance(module, QuantLinear) for module in model.modules())


ORDERS = {
    "dequant only": (DEQUANT,),
    "compile only": (EAGER,),
    "dequant, compile": (DEQUANT, EAGER),
    "compile, dequant": (EAGER, DEQUANT),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_order_gives_the_same_and_compiles_no_block_twice(rng, fast_calls, name):
    make_inputs, model = MODELS[name][1], quantised(name, rng)
    family, stack = detect_family(model)
    off = tiny.output(model, make_inputs())
    compiled = Counter()
    for order, optimizations in ORDERS.items():
        for number in ("first", "second"):
            before = graphs()
            fast_calls.clear()
            with tiny.engaged(*optimizations, on=model, family=family, stack=stack) as run:
                for _ in range(2):
                    sample = run.call(**make_inputs()).sample
                    got = torch.stack(list(sample)) if isinstance(sample, list) else sample
                    torch.testing.assert_close(got, off, rtol=1e-5, atol=1e-6)
            compiled[order, number] = graphs() - before
            # Compiled code always goes by the chosen path: the op knows no other.
            assert sum(fast_calls.values()) == 2 * packed_count(model)
        assert torch.equal(tiny.output(model, make_inputs()), off)
    # Once with the fast path off, once with it on, and never again.
    assert +compiled == {("compile only", "first"): 1, ("dequant, compile", "first"): 1}


@pytest.mark.parametrize("order", ["dequant, compile", "compile, dequant"])
def test_another_packs_layers_share_a_graph_and_lora_is_one_more(rng, fast_calls, order):
    model, layers = foreign(rng)
    lora = [Lora(rng.tensor(WIDTH, r), rng.tensor(r, WIDTH)) for r in (2, 5)]
    seen = []

    def call(run):
        before = graphs()
        got = run.call(toy_input())
        seen.append(graphs() - before)
        assert not any(layer.own_calls for layer in layers), "its own code ran"
        return got

    with tiny.engaged(*ORDERS[order], on=model) as run:
        plain = call(run)
        call(run)
        layers[3].hold(layers[3].weight, [lora[0].patch()])
        with_lora = call(run)
        for layer in layers[::2]:
            layer.hold(layer.weight, [lora[1].patch(0.3)])
        call(run)
        for layer in layers:
            layer.weight.patches = []
        torch.testing.assert_close(call(run), plain)
        for layer in layers:
            layer.weight = rng.stored_layer("Q8_0", WIDTH, WIDTH)[0].weight
        call(run)
    with tiny.engaged(*ORDERS[order], on=model) as run:
        last = call(run)
    assert seen == [1, 0, 1, 0, 0, 0, 0]
    assert not torch.allclose(with_lora, plain)
    torch.testing.assert_close(last, tiny.plain(model, toy_input()))


# ---- the kernels ----


@contextlib.contextmanager
def kernels():
    """The kernel path wherever the test runs; on the CPU through Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            # Read when a kernel's module is first imported.
            patch.setenv("TRITON_INTERPRET", "1")
        launch.kernel_refusal.cache_clear()
        launched = Counter()

        def choose(row, device):
            kernel = dispatch._launch_for(row, device, "kernel")

            def counted(*args):
                launched[row.name] += 1
                return kernel(*args)

            dispatch._chosen[row.id, dispatch._device_key(device)] = counted
            dispatch._chosen_path[row.id, dispatch._device_key(device)] = ("kernel", "forced")
            return counted

        patch.setattr(dispatch, "_choose", choose)
        dispatch.forget_choices()
        try:
            yield launched
        finally:
            launch.kernel_refusal.cache_clear()


@pytest.mark.parametrize("make", [ours, foreign])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernels_give_the_same(rng, make, compiled):
    model, _ = make(rng)
    model.blocks = model.blocks[:1]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = toy_input().to(device)
    model.to(device)
    expected = tiny.plain(model, x)
    with kernels() as launched:
        with tiny.engaged(DEQUANT, *[EAGER] * compiled, on=model, device=x.device) as run:
            got = run.call(x)
        assert run.handles[0].note.startswith("layers by type: 6 Q8_0 (kernel)")
    torch.testing.assert_close(got, expected)
    assert launched == {"Q8_0": 6}
