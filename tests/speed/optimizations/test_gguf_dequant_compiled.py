"""The fast dequantisation inside compiled blocks, and by the kernels."""

import contextlib
from collections import Counter

import pytest
import torch
from speed_tier.speed.families import detect_family
from speed_tier.speed.gguf.linear import QuantLinear
from speed_tier.speed.kernels import dispatch, launch
from speed_tier.speed.optimizations.gguf_dequant import GgufDequant
from speed_tier.speed.optimizations.regional_compile import kind_signature
from speed_tier.speed.patching import active_patches
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.gguf.layers import (
    MODELS,
    Lora,
    Random,
    counted_fast_calls,
    fresh_seed,
    packed_toy,
    quantised,
    stored_toy,
)
from speed_tier.tests.speed.optimizations.compiling import EAGER, graphs
from speed_tier.tests.speed.process import full_state
from speed_tier.tests.speed.tiny import WIDTH, toy_input

pytestmark = pytest.mark.slow  # blocks are compiled

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


def packed_count(model):
    return sum(isinstance(module, QuantLinear) for module in model.modules())


@pytest.mark.parametrize("make", [packed_toy, stored_toy])
def test_types_of_equal_size_are_kinds_of_their_own(rng, make):
    first, second, other = (
        kind_signature(make(rng, name)[0].blocks[0]) for name in ("Q4_0", "Q4_0", "IQ4_NL")
    )
    assert first == second != other


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
    model, layers = stored_toy(rng)
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


@pytest.mark.parametrize("make", [packed_toy, stored_toy])
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
