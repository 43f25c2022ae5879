"""The dequant cache: what fits, in which order, and that it is given back."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from speed_tier.speed.gguf import QuantTensorSpec
from speed_tier.speed.gguf.cache import (
    cached_bytes,
    dense_bytes,
    drop_cache,
    fill_cache,
    plan_cache,
)
from speed_tier.speed.gguf.linear import QuantLinear, QuantState
from speed_tier.speed.kernels import dispatch
from speed_tier.tests.speed.gguf import packer

STATE = QuantState()


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """No type's reference is compiled here: timing them takes seconds each."""
    monkeypatch.setattr(dispatch, "_faster_reference", lambda row, device: ("reference", "forced"))
    dispatch.forget_choices()
    yield
    dispatch.forget_choices()


def layer(rows, cols, seed=0):
    rng = np.random.default_rng(seed)
    packed = packer.encode(rng.standard_normal((rows, cols), dtype=np.float32), Q.Q4_0, rng)
    made = QuantLinear(cols, rows)
    made.pack(QuantTensorSpec(torch.from_numpy(packed), int(Q.Q4_0), (rows, cols)), STATE)
    return made


@pytest.fixture
def layers():
    """Two blocks of a large and a small layer, and one outside."""
    return {
        "blocks.0.big": layer(64, 64, 1),
        "blocks.0.small": layer(32, 32, 2),
        "blocks.1.big": layer(64, 64, 3),
        "blocks.1.small": layer(32, 32, 4),
        "out": layer(64, 32, 5),
    }


def names(layers, chosen):
    return [name for name, one in layers.items() if any(one is other for other in chosen)]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (0, []),
        (2 * 64 * 64 - 1, []),
        (2 * 64 * 64, ["blocks.0.big"]),
        (4 * 64 * 64 + 1, ["blocks.0.big", "blocks.1.big"]),
        (4 * 64 * 64 + 2 * 64 * 32, ["blocks.0.big", "blocks.1.big", "out"]),
        (10**9, ["blocks.0.big", "blocks.0.small", "blocks.1.big", "blocks.1.small", "out"]),
    ],
)
def test_the_largest_first_and_never_over_the_budget(layers, budget, expected):
    chosen = plan_cache(layers, torch.bfloat16, budget)
    assert names(layers, chosen) == expected
    assert sum(dense_bytes(one, torch.bfloat16) for one in chosen) <= budget


def test_a_cached_layer_gives_the_same_bits_and_dequantises_no_more(layers, monkeypatch):
    from speed_tier.speed.gguf import linear

    big = layers["blocks.0.big"]
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    STATE.fast = True
    try:
        expected = big(x)
        total = fill_cache(layers.values(), [big], torch.bfloat16)
        assert total == cached_bytes(layers.values()) == 2 * 64 * 64
        monkeypatch.setattr(linear, "dequantize", lambda *_: pytest.fail("dequantised again"))
        assert torch.equal(big(x), expected)
    finally:
        STATE.fast = False


def test_off_does_not_use_the_cache(layers, monkeypatch):
    big = layers["blocks.0.big"]
    fill_cache(layers.values(), [big], torch.bfloat16)
    big.dense.zero_()
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert big(x).abs().max() > 0


def test_another_weight_is_not_answered_from_the_cache(layers):
    big, other = layers["blocks.0.big"], layers["blocks.1.big"]
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    STATE.fast = True
    try:
        expected = other(x)
        fill_cache(layers.values(), [big], torch.bfloat16)
        big.weight = other.weight
        assert torch.equal(big(x), expected)
        assert fill_cache(layers.values(), [big], torch.bfloat16) == cached_bytes([big])
        assert torch.equal(big(x), expected)
    finally:
        STATE.fast = False


def test_another_dtype_is_dequantised_as_before(layers):
    big = layers["blocks.0.big"]
    fill_cache(layers.values(), [big], torch.bfloat16)
    STATE.fast = True
    try:
        assert big.dense_weight(torch.float32).dtype == torch.float32
    finally:
        STATE.fast = False


def test_a_new_plan_drops_what_is_not_in_it(layers):
    fill_cache(layers.values(), layers.values(), torch.bfloat16)
    kept = layers["out"].dense
    assert fill_cache(layers.values(), [layers["out"]], torch.bfloat16) == 2 * 64 * 32
    assert layers["out"].dense is kept  # not dequantised again
    assert [name for name, one in layers.items() if one.dense is not None] == ["out"]
    assert drop_cache(layers.values()) == 2 * 64 * 32
    assert cached_bytes(layers.values()) == 0
