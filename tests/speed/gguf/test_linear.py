"""The packed Linear: right against float64, small, movable, and one graph for all of a kind."""

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from speed_tier.speed.errors import GGUFFileError, KernelConstraintError
from speed_tier.speed.gguf import QuantTensorSpec, load_gguf
from speed_tier.speed.gguf.adapters import Adapters, LowRankTerm
from speed_tier.speed.gguf.linear import QuantLinear, QuantState
from speed_tier.tests.speed.gguf import packer
from speed_tier.tests.speed.gguf.layers import (
    BY_NAME,
    Random,
    check_close,
    counted_fast_calls,
    fresh_seed,
)
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

TYPES = ("Q4_K", "Q6_K", "Q8_0", "IQ4_XS", "BF16", "IQ3_S")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def fast_calls():
    with counted_fast_calls() as calls:
        yield calls


@pytest.fixture
def rng():
    return Random(fresh_seed())


@pytest.fixture(autouse=True)
def no_gradients():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def adapters(rng, layer, *ranks, scale=1.0):
    """Low-rank terms of these ranks over all rows."""
    rows, cols = layer.out_features, layer.in_features
    return Adapters(
        [LowRankTerm(rng.tensor(rows, r), rng.tensor(r, cols), scale / cols) for r in ranks]
    )


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_the_output_is_the_products(rng, fast_calls, name, dtype, fast):
    """Odd numbers of rows, with a bias and without, any leading dimensions."""
    for rows, bias, lead in [
        (7, True, (2, 3)),
        (1, False, (5,)),
        (33, True, ()),
        (16, False, (1,)),
    ]:
        layer, dense = rng.layer(name, rows, 512, bias)
        layer.state.fast = fast
        x = rng.tensor(*lead, 512, dtype=dtype)
        got = layer(x)
        rounded = None if layer.bias is None else layer.bias.to(dtype)
        check_close(got, x, dense, rounded)
    stored_as_wanted = name == "BF16" and dtype is torch.bfloat16
    assert fast_calls[name] == (4 if fast and not stored_as_wanted else 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_the_fast_path_gives_the_same(rng, name, dtype):
    layer, _ = rng.layer(name)
    x = rng.tensor(3, 512, dtype=dtype)
    slow = layer(x)
    layer.state.fast = True
    assert torch.equal(layer(x), slow)


def test_a_float_type_of_the_asked_dtype_is_a_view(rng):
    layer, dense = rng.layer("BF16", 5, 64)
    read = layer._weight_to_read(torch.bfloat16, layer.weight)
    assert read.data_ptr() == layer.weight.data_ptr()
    assert torch.equal(read.double(), dense)


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("BF16", torch.bfloat16)])
def test_a_dense_weight_is_the_callers_to_change(rng, name, dtype):
    layer, dense = rng.layer(name, 5, 64)
    layer.dense_weight(dtype).zero_()
    layer.adapters = Adapters(rewrite=lambda weight: weight.mul_(3))
    layer.state.adapted = True
    for _ in range(2):
        x = rng.tensor(2, 64)
        check_close(layer(x), x, 3 * dense, layer.bias)
    assert torch.equal(layer.dense_weight(dtype).double(), dense)


def test_a_transposed_input(rng):
    layer, dense = rng.layer("Q8_0", 7, 64)
    x = rng.tensor(2, 64, 5).transpose(1, 2)
    check_close(layer(x), x, dense, layer.bias)


def test_another_shape_is_refused_in_words(rng):
    spec, _ = rng.packed("Q4_K", 8, 512)
    with pytest.raises(GGUFFileError, match=r"weight of 512 x 8; found 8 x 512\. The file is dam"):
        QuantLinear(8, 512).pack(spec, QuantState())


def test_bytes_that_do_not_fit_are_refused_and_nothing_is_taken(rng):
    spec, _ = rng.packed("Q4_K", 8, 512)
    layer = QuantLinear(512, 8)
    short = QuantTensorSpec(spec.packed[:7], spec.qtype, (8, 512))
    with pytest.raises(KernelConstraintError, match="needs 2304 bytes; found 2016"):
        layer.pack(short, QuantState())
    assert layer.weight is None and layer.qtype is None and layer.quant_signature is None


def test_it_counts_as_its_packed_bytes(rng):
    layer, _ = rng.layer("Q4_K", 24, 512)
    layer.state.fast = True
    expected = BY_NAME["Q4_K"].packed_bytes(24, 512) + layer.bias.nbytes
    for _ in range(2):
        assert sum(p.nbytes for p in layer.parameters()) == expected
        assert sum(t.nbytes for t in layer.state_dict().values()) == expected
        layer(rng.tensor(2, 512))
    assert not any(p.requires_grad for p in layer.parameters())


def test_a_weight_in_its_place_is_not_copied_and_another_stays_where_it_is(rng, monkeypatch):
    layer, _ = rng.layer("Q8_0")
    seen = []
    product = QuantLinear.product
    monkeypatch.setattr(
        QuantLinear, "product", lambda self, *args: seen.append(args) or product(self, *args)
    )
    layer(rng.tensor(2, 512))
    assert seen[0][1].data_ptr() == layer.weight.data_ptr()
    assert seen[0][2].data_ptr() == layer.bias.data_ptr()
    out = layer(torch.empty(2, 512, device="meta"))
    assert out.device.type == seen[1][1].device.type == seen[1][2].device.type == "meta"
    assert layer.weight.device.type == layer.bias.device.type == "cpu"


def test_a_cast_of_the_model_leaves_the_bytes(rng):
    layer, dense = rng.layer("Q6_K")
    before = layer.weight.clone()
    layer.to(torch.bfloat16).half().float().to(torch.bfloat16)
    assert torch.equal(layer.weight, before) and layer.weight.dtype is torch.uint8
    x = rng.tensor(2, 512, dtype=torch.bfloat16)
    check_close(layer(x), x, dense, layer.bias)


def test_moved_to_another_device(rng):
    layer, _ = rng.layer("Q6_K")
    layer.to("meta")
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    assert layer.weight.shape == (24, 2 * 210)


def test_a_state_dict_carries_the_bytes(rng):
    layer, _ = rng.layer("Q5_K")
    other, _ = rng.layer("Q5_K")
    x = rng.tensor(2, 512)
    assert not torch.equal(layer(x), other(x))
    assert list(layer.state_dict()) == ["weight", "bias"]
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), copy.copy])
def test_a_copy_has_adapters_of_its_own(rng, way):
    layer, _ = rng.layer("Q4_K")
    duplicate = way(layer)
    x = rng.tensor(2, 512)
    plain = layer(x)
    layer.adapters = adapters(rng, layer, 3)
    layer.state.adapted = duplicate.state.adapted = True
    assert not torch.allclose(layer(x), plain)
    assert torch.equal(duplicate(x), plain)
    op = torch.ops.speed_tier.adapted_linear
    for one in (layer, duplicate):
        assert torch.equal(op(x, one.weight, one.bias, one._slot, 24), one(x))


def test_copied_layers_of_a_model_still_share_a_state(rng):
    state = QuantState()
    pair = torch.nn.ModuleList([rng.layer("Q8_0", state=state)[0] for _ in range(2)])
    first, second = copy.deepcopy(pair)
    assert first.state is second.state is not state


def test_a_layer_built_on_the_meta_device_keeps_its_number(rng):
    spec, _ = rng.packed("Q8_0", 24, 512)
    with torch.device("meta"):
        layer = QuantLinear(512, 24)
    layer.pack(spec, QuantState())
    layer.adapters = adapters(rng, layer, 2)
    layer.state.adapted = True
    x = rng.tensor(2, 512)
    got = torch.ops.speed_tier.adapted_linear(x, layer.weight, None, layer._slot, 24)
    assert torch.equal(got, layer(x))


def test_nothing_keeps_a_layer_alive(rng):
    layer, _ = rng.layer("Q8_0")
    layer(rng.tensor(2, 512))
    reference = weakref.ref(layer)
    del layer
    gc.collect()
    assert reference() is None


def test_leaving_the_file(tmp_path):
    """A view of the mapped file until asked to leave it; then memory of its own, once."""
    packer.write(tmp_path / "m.gguf", packer.mixed(packer.z_image(1), "Q8_0", 1))
    loaded = load_gguf(tmp_path / "m.gguf")
    spec = loaded.tensors["layers.0.feed_forward.w1.weight"]
    layer = QuantLinear(packer.DIM, packer.FFN)
    layer.pack(spec, QuantState())
    assert layer.weight.data_ptr() == spec.packed.data_ptr(), "packing copies nothing"
    bytes_before = layer.weight.clone()
    layer.leave_file()
    own = layer.weight.data_ptr()
    assert own != spec.packed.data_ptr()
    assert torch.equal(layer.weight, bytes_before)
    layer.leave_file()
    assert layer.weight.data_ptr() == own


def test_a_layer_that_has_moved_has_left_the_file(rng):
    layer, _ = rng.layer("Q8_0")
    layer.to("meta").leave_file()
    assert layer.weight.is_meta and not layer._in_file


# ---- with adapters ----


def test_adapters_count_only_where_the_state_says_so(rng):
    layer, dense = rng.layer("Q8_0", 7, 64)
    x = rng.tensor(2, 64)
    layer.adapters = adapters(rng, layer, 3)
    check_close(layer(x), x, dense, layer.bias)
    layer.state.adapted = True
    term = layer.adapters.terms[0]
    dense = dense + term.scale * term.up.double() @ term.down.double()
    torch.testing.assert_close(layer(x), (x.double() @ dense.T + layer.bias).float())


def test_a_rewrite_gets_the_fp32_weight_and_may_change_it(rng):
    layer, dense = rng.layer("Q8_0", 7, 64)
    layer.state.adapted = True
    seen = []
    layer.adapters = Adapters(rewrite=lambda weight: seen.append(weight.dtype) or weight.mul_(2))
    x = rng.tensor(2, 64, dtype=torch.bfloat16)
    for _ in range(2):
        check_close(layer(x), x, 2 * dense, layer.bias.bfloat16())
    assert seen == [torch.float32] * 2


def test_a_rewrite_changes_no_cached_weight(rng):
    layer, dense = rng.layer("Q8_0", 7, 64)
    layer.state.fast = layer.state.adapted = True
    layer.dense = layer.dense_weight(torch.float32)
    layer.adapters = Adapters(rewrite=lambda weight: weight.mul_(2))
    x = rng.tensor(2, 64)
    for _ in range(2):
        check_close(layer(x), x, 2 * dense, layer.bias)
    layer.adapters = None
    check_close(layer(x), x, dense, layer.bias)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bias", [True, False])
def test_op_passes_opcheck(rng, bias):
    layer, _ = rng.layer("Q4_K", bias=bias)
    layer.adapters = adapters(rng, layer, 3)
    for x in (rng.tensor(2, 3, 512), rng.tensor(2, 512, 3).transpose(1, 2), rng.tensor(512)):
        args = (x, layer.weight, layer.bias, layer._slot, 24)
        torch.library.opcheck(torch.ops.speed_tier.adapted_linear.default, args)


# ---- compiled ----


def compiled(backend):
    @torch.compile(backend=backend, fullgraph=True, dynamic=False)
    def run(layer, x):
        return torch.nn.functional.silu(layer(x))

    return run


def check_compiled(run, layer, x, **tolerance):
    torch.testing.assert_close(run(layer, x), torch.nn.functional.silu(layer(x)), **tolerance)


def test_layers_of_equal_kind_share_one_graph(rng):
    counter, state = CompileCounter(), QuantState()
    run = compiled(counter)
    x = rng.tensor(2, 512)
    for _ in range(4):
        check_compiled(run, rng.layer("Q4_K", state=state)[0], x)
    assert counter.frame_count == 1
    check_compiled(run, rng.layer("Q6_K", state=state)[0], x)
    assert counter.frame_count == 2


def test_adapters_are_one_graph_more_whatever_they_are(rng):
    """Rank, strength, target, number of terms, a rewrite, and away again."""
    counter, state = CompileCounter(), QuantState()
    run = compiled(counter)
    layers = [rng.layer("Q4_K", state=state)[0] for _ in range(3)]
    x = rng.tensor(2, 512)

    def check():
        for layer in layers:
            check_compiled(run, layer, x)

    check()
    assert counter.frame_count == 1
    state.adapted = True
    for target, ranks in itertools.product(layers, [(1,), (4,), (16, 2), (3, 3, 3)]):
        for layer in layers:
            layer.adapters = None
        target.adapters = adapters(rng, target, *ranks, scale=float(len(ranks)))
        check()
    for layer in layers:
        layer.adapters = Adapters(rewrite=lambda dense: dense * 2)
    check()
    assert counter.frame_count == 2
    state.adapted = False
    check()
    state.adapted = True
    check()
    assert counter.frame_count == 2


def test_other_batches_are_one_symbolic_graph(rng):
    counter, state = CompileCounter(), QuantState()
    state.adapted = True

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def run(layer, x):
        return torch.nn.functional.silu(layer(x))

    layer, _ = rng.layer("Q4_K", state=state)
    layer.adapters = adapters(rng, layer, 3)
    for tokens in (5, 9, 17):
        check_compiled(run, layer, rng.tensor(2, tokens, 512))
    assert counter.frame_count == 1


def test_in_inference_mode(rng):
    """As the host runs: one graph, whichever mode the layer was made in."""
    counter, state = CompileCounter(), QuantState()
    run = compiled(counter)
    x = rng.tensor(2, 512)
    with torch.inference_mode():
        for _ in range(2):
            layer, _ = rng.layer("Q8_0", state=state)
            check_compiled(run, layer, x)
            state.adapted = True
            layer.adapters = adapters(rng, layer, 3)
            check_compiled(run, layer, x)
            state.adapted = False
    assert counter.frame_count == 2


@pytest.mark.slow
def test_inductor_gives_the_same(rng, fast_calls):
    counter, state = CompileCounterWithBackend("inductor"), QuantState()
    state.fast = True

    @torch.compile(backend=counter, fullgraph=True, dynamic=False)
    def run(layer, x):  # nothing to fuse: no C++ is built, which takes half a minute
        return layer(x)

    first, second = (rng.layer("Q4_K", state=state)[0] for _ in range(2))
    x = rng.tensor(2, 512)
    torch.testing.assert_close(run(first, x), first(x))
    fast_calls.clear()
    got = run(second, x)
    assert fast_calls == {"Q4_K": 1}
    torch.testing.assert_close(got, second(x))
    state.adapted = True
    second.adapters = adapters(rng, second, 2)
    for layer in (first, second):
        torch.testing.assert_close(run(layer, x), layer(x))
    assert counter.frame_count == 2
