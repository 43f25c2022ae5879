"""Packed layers of another pack: told by structure, computed from the same bytes, followed."""

import gc
import weakref

import numpy as np
import pytest
import torch
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from gguf import GGMLQuantizationType as Q
from speed_tier.speed.gguf.foreign import ForeignLinear, foreign_layers, refresh_all
from speed_tier.speed.gguf.linear import QuantLinear, QuantState
from speed_tier.tests.speed.gguf.layers import (
    Lora,
    Random,
    StoredLinear,
    StoredTensor,
    as_parameter,
    bytes_of,
    check_close,
    counted_fast_calls,
    fresh_seed,
    merged,
)
from speed_tier.tests.speed.tiny import relative_error
from torch import nn

TYPES = ("Q4_K", "Q6_K", "Q8_0", "IQ4_XS", "BF16", "IQ3_S")


@pytest.fixture(autouse=True)
def fast_calls():
    with counted_fast_calls() as calls, torch.no_grad():
        yield calls


@pytest.fixture
def rng():
    return Random(fresh_seed())


def stand_in(module):
    (layer,) = foreign_layers(nn.Sequential(module))
    return follow(layer)


def follow(layer):
    layer.state.adapted = refresh_all([layer])
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_the_same_from_the_same_bytes(rng, fast_calls, name, dtype):
    for bias in (True, False):
        module, dense = rng.stored_layer(name, 7, 512, bias)
        layer = stand_in(module)
        x = rng.tensor(2, 3, 512, dtype=dtype)
        rounded = layer.bias.to(dtype) if bias else None
        check_close(layer(x), x, dense, rounded)
        torch.testing.assert_close(layer(x), module(x))
        assert layer.weight.data_ptr() == module.weight.data_ptr(), "the bytes are not copied"
        assert type(layer(x)) is torch.Tensor
    stored_as_wanted = name == "BF16" and dtype is torch.bfloat16
    assert fast_calls[name] == (0 if stored_as_wanted else 6)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_diffusers_own_loader(rng, fast_calls, bias):
    spec, dense = rng.packed("Q4_K", 24, 512)
    module = GGUFLinear(512, 24, bias, compute_dtype=torch.bfloat16)
    module.weight = GGUFParameter(spec.packed, quant_type=Q.Q4_K)
    layer, x = stand_in(module), rng.tensor(2, 3, 512, dtype=torch.bfloat16)
    check_close(layer(x), x, dense, module.bias.bfloat16() if bias else None)
    assert relative_error(layer(x), module(x)) < 0.01
    assert type(layer(x)) is torch.Tensor
    assert layer.weight.data_ptr() == module.weight.data_ptr(), "the bytes are not copied"
    assert fast_calls["Q4_K"] == 3


def test_layers_are_found_in_order_and_share_a_state(rng):
    model = nn.ModuleDict(
        {
            "a": rng.stored_layer("Q4_K")[0],
            "norm": nn.LayerNorm(4),
            "b": nn.Sequential(rng.stored_layer("Q8_0", 8, 64)[0]),
        }
    )
    layers = foreign_layers(model)
    assert [layer.module for layer in layers] == [model["a"], model["b"][0]]
    assert [layer.qtype for layer in layers] == [Q.Q4_K, Q.Q8_0]
    assert layers[0].state is layers[1].state
    assert layers[0].state.fast and not layers[0].state.adapted
    names = [f"{path}.{name}" for path in ("a", "norm", "b.0") for name in ("weight", "bias")]
    assert list(model.state_dict()) == names


def test_a_stand_in_is_no_part_of_the_model(rng):
    layer = stand_in(rng.stored_layer("Q8_0")[0])
    assert list(layer.modules()) == [layer]
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("kind", [None, Q.F32, Q.F16], ids=str)
def test_a_bias_as_that_pack_keeps_it(rng, kind):
    """Plain, or of the same subclass in a float type: both are a bias like any other."""
    module, dense = rng.stored_layer("Q8_0", 7, 64, bias=False)
    values = rng.tensor(7, dtype=torch.float16 if kind is Q.F16 else torch.float32)
    stored = values if kind is None else StoredTensor.of(values, kind, (7,))
    module.bias = as_parameter(stored)
    x = rng.tensor(2, 64)
    check_close(stand_in(module)(x), x, dense, values)


def unknown_type(rng, module):
    module.weight.tensor_type = 99


def no_type(rng, module):
    module.weight.tensor_type = None


def one_dimension(rng, module):
    module.weight.tensor_shape = torch.Size((24 * 512,))


def other_size(rng, module):
    module.weight.tensor_shape = torch.Size((25, 512))


def not_bytes(rng, module):
    module.weight = as_parameter(StoredTensor.of(rng.tensor(24, 512), Q.F32, (24, 512)))


def plain_weight(rng, module):
    module.weight = nn.Parameter(rng.tensor(24, 512), requires_grad=False)


def no_weight(rng, module):
    module.weight = None


def with_gaps(rng, module):
    data = torch.zeros(24, 2 * 288, dtype=torch.uint8)[:, ::2]
    module.weight = as_parameter(StoredTensor.of(data, Q.Q4_K, (24, 512)))


def odd_address(rng, module):
    data = torch.zeros(24 * 288 + 1, dtype=torch.uint8)[1:].view(24, 288)
    module.weight = as_parameter(StoredTensor.of(data, Q.Q4_K, (24, 512)))


def packed_bias(rng, module):
    spec, _ = rng.packed("Q8_0", 1, 64)
    module.bias = as_parameter(StoredTensor.of(spec.packed, Q.Q8_0, (64,)))


def bias_of_another_shape(rng, module):
    module.bias = nn.Parameter(rng.tensor(24, 2), requires_grad=False)


def no_way_to_a_weight(rng, module):
    module.get_weight = None


def no_features(rng, module):
    del module.in_features


NOT_OURS = [
    *(unknown_type, no_type, one_dimension, other_size, not_bytes, plain_weight, no_weight),
    *(with_gaps, odd_address, packed_bias, bias_of_another_shape, no_way_to_a_weight, no_features),
]


@pytest.mark.parametrize("change", NOT_OURS, ids=lambda change: change.__name__)
def test_what_is_built_otherwise_is_left_alone(rng, change):
    module, _ = rng.stored_layer("Q4_K")
    assert len(foreign_layers(module)) == 1
    change(rng, module)
    assert foreign_layers(module) == []


def test_our_own_layers_are_not_foreign(rng):
    assert foreign_layers(nn.Sequential(rng.layer("Q4_K")[0], nn.Linear(2, 2))) == []


def test_a_swapped_weight_is_followed(rng):
    module, _ = rng.stored_layer("Q6_K", 7, 512)
    layer = stand_in(module)
    other, dense = rng.stored_layer("Q6_K", 7, 512)
    module.weight, module.bias = other.weight, other.bias
    x = rng.tensor(2, 512)
    check_close(follow(layer)(x), x, dense, layer.bias)
    assert layer.bias.data_ptr() == other.bias.data_ptr()


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_what_moved_to_other_memory_is_followed(rng, part):
    """`module.to` keeps the parameter and replaces what it holds."""
    module, dense = rng.stored_layer("Q6_K", 7, 512)
    layer = stand_in(module)
    bias = layer.bias
    spec, other = rng.packed("Q6_K", 7, 512)
    parameter = getattr(module, part)
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = spec.packed if part == "weight" else torch.zeros(7)
    assert getattr(module, part) is parameter
    dense, bias = (other, bias) if part == "weight" else (dense, torch.zeros(7))
    x = rng.tensor(2, 512)
    check_close(follow(layer)(x), x, dense, bias)


def test_a_bias_that_is_taken_away_is_gone(rng):
    module, dense = rng.stored_layer("Q6_K", 7, 512)
    layer = stand_in(module)
    module.bias = None
    x = rng.tensor(2, 512)
    check_close(follow(layer)(x), x, dense, None)


def to_a_dense_weight(rng, module):
    module.weight = nn.Parameter(rng.tensor(7, 512), requires_grad=False)
    module.weight.tensor_type, module.weight.patches = Q.F32, []


def to_another_type(rng, module):
    module.weight = rng.stored_layer("Q8_0", 7, 512)[0].weight


def to_another_type_of_the_same_bytes(rng, module):
    data = bytes_of(module.weight)
    module.weight = as_parameter(StoredTensor.of(data, Q.IQ4_NL, (7, 512)))


CHANGES = [to_a_dense_weight, to_another_type, to_another_type_of_the_same_bytes]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_another_kind_of_weight_is_left_to_the_layer_itself(rng, change):
    module, _ = rng.stored_layer("Q4_0", 7, 512)
    before = module.weight
    layer = stand_in(module)
    x = rng.tensor(2, 512)
    change(rng, module)
    calls = len(module.own_calls)
    assert torch.equal(follow(layer)(x), module(x))
    assert len(module.own_calls) == calls + 2
    module.weight = before
    torch.testing.assert_close(follow(layer)(x), module(x))
    assert len(module.own_calls) == calls + 3, "packed again, and fast again"


def test_patches_become_adapters_and_are_followed(rng):
    module, dense = rng.stored_layer("Q4_K", 7, 512)
    layer = stand_in(module)
    x = rng.tensor(2, 512)
    scale = 512**-0.5
    loras = [Lora(rng.tensor(7, 3) * scale, rng.tensor(3, 512) * scale) for _ in range(2)]
    states = [
        [[loras[0].patch(0.7)]],
        [[loras[0].patch(0.7), loras[1].patch()]],
        [[loras[0].patch(-1.0)], [loras[1].patch(2.0)]],
        [],
    ]
    for groups in states:
        # Its patcher puts a new tensor there for a LoRA; to take one away it empties the list.
        if groups:
            module.hold(StoredTensor.of(module.weight.clone(), Q.Q4_K, (7, 512)), *groups)
        else:
            module.weight.patches = []
        follow(layer)
        assert layer.state.adapted is bool(groups)
        patches = [patch for group in groups for patch in group]
        expected = torch.nn.functional.linear(
            x.double(), merged(dense, patches), layer.bias.double()
        )
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-4)
        assert module.own_calls == []


def test_following_an_unchanged_layer_assigns_nothing(rng, monkeypatch):
    """It is done for hundreds of layers at every call; an assignment takes microseconds."""
    module, _ = rng.stored_layer("Q4_K", 7, 512)
    module.hold(module.weight, [Lora(rng.tensor(7, 3), rng.tensor(3, 512)).patch()])
    layer = stand_in(module)
    monkeypatch.setattr(ForeignLinear, "__setattr__", lambda *_: pytest.fail("assigned"))
    assert refresh_all([layer]) is True


def test_all_layers_are_followed_not_only_the_first_with_adapters(rng):
    modules = [rng.stored_layer("Q8_0", 8, 64)[0] for _ in range(3)]
    modules[0].hold(modules[0].weight, [Lora(rng.tensor(8, 3), rng.tensor(3, 64)).patch()])
    layers = foreign_layers(nn.ModuleList(modules))
    assert refresh_all(layers) is True
    assert all(layer.weight is not None for layer in layers)
    modules[0].weight.patches = []
    assert refresh_all(layers) is False


def test_the_same_patches_keep_their_factors(rng):
    module, _ = rng.stored_layer("Q4_K", 7, 512)
    group = [Lora(rng.tensor(7, 3), rng.tensor(3, 512)).patch()]
    module.hold(module.weight, group)
    layer = stand_in(module)
    kept = layer.adapters
    module.hold(StoredTensor.of(module.weight.clone(), Q.Q4_K, (7, 512)), group)
    assert follow(layer).adapters is kept is not None


def test_more_than_low_rank_is_left_to_the_layer_itself(rng, fast_calls):
    module, dense = rng.stored_layer("Q4_K", 7, 512)
    layer = stand_in(module)
    x = rng.tensor(2, 512)
    layer(x)
    lora = Lora(rng.tensor(7, 3), rng.tensor(3, 512))
    module.hold(module.weight, [lora.patch(), lora.patch(function=lambda change: change * 2)])
    fast_calls.clear()
    expected = torch.nn.functional.linear(
        x.double(), merged(dense, module.weight.patches[0][0]), layer.bias.double()
    )
    torch.testing.assert_close(follow(layer)(x).double(), expected, rtol=1e-4, atol=1e-4)
    assert (len(module.own_calls), fast_calls) == (1, {})
    module.weight.patches = []
    follow(layer)(x)
    assert (len(module.own_calls), fast_calls) == (1, {"Q4_K": 1})


def test_nothing_is_kept_after_letting_go():
    """Neither the bytes nor their tensors; the stand-in itself stays, for compiled blocks."""
    buffer = np.zeros((7, 288), np.uint8)
    module = StoredLinear(512, 7)
    module.hold(StoredTensor.of(torch.from_numpy(buffer), Q.Q4_K, (7, 512)))
    module.bias = as_parameter(StoredTensor.of(torch.zeros(7), Q.F32, (7,)))
    layer = stand_in(module)
    layer(torch.zeros(1, 512))
    dying = [weakref.ref(one) for one in (buffer, module.weight, module.bias)]
    del buffer
    layer.let_go()
    module.weight = module.bias = None
    gc.collect()
    assert [one() for one in dying] == [None] * 3
    assert layer.weight is None and layer.bias is None


def test_after_letting_go_it_takes_the_weight_again(rng):
    module, dense = rng.stored_layer("Q4_K", 7, 512)
    layer = stand_in(module)
    layer.let_go()
    layer.let_go()
    x = rng.tensor(2, 512)
    check_close(follow(layer)(x), x, dense, layer.bias)


def test_a_stand_in_is_a_packed_layer_to_the_rest():
    assert issubclass(ForeignLinear, QuantLinear)
    assert QuantState().fast is False
