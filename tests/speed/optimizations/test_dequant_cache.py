"""dequant_cache in a run: bounded by its budget and by what is to spare, dropped at release."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from speed_tier.speed.gguf import QuantTensorSpec
from speed_tier.speed.gguf.linear import QuantLinear, QuantState
from speed_tier.speed.kernels import dispatch
from speed_tier.speed.optimizations.base import HostFacts
from speed_tier.speed.optimizations.dequant_cache import CacheConfig, DequantCache
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.gguf import packer
from torch import nn

DENSE = 4 * 64 * 64  # bytes of one layer in fp32


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """No type's reference is compiled here: timing them takes seconds each."""
    monkeypatch.setattr(dispatch, "_faster_reference", lambda row, device: ("reference", "forced"))
    dispatch.forget_choices()
    yield
    dispatch.forget_choices()


@pytest.fixture
def model():
    model, state = nn.Sequential(), QuantState()
    rng = np.random.default_rng(0)
    for _ in range(3):
        packed = packer.encode(rng.standard_normal((64, 64), dtype=np.float32), Q.Q8_0, rng)
        layer = QuantLinear(64, 64)
        layer.pack(QuantTensorSpec(torch.from_numpy(packed), int(Q.Q8_0), (64, 64)), state)
        model.append(layer)
    return model


def install(model, budget_bytes, spare=None):
    cache = DequantCache(CacheConfig(budget_bytes / 2**30))
    host = HostFacts(spare_bytes=None if spare is None else lambda: spare)
    context = tiny.context(model, host=host, dtype=torch.float32)
    assert cache.check(context) is None
    return cache, cache.install(context)


def cached(model):
    return sum(layer.dense is not None for layer in model)


def test_bounded_by_the_budget(model):
    _, handle = install(model, 2 * DENSE + 5)
    assert cached(model) == 2
    assert handle.note.startswith("2 of 3 layers keep their dense weight")


def test_bounded_by_what_is_to_spare_and_its_own_part_counts_as_spare(model):
    install(model, 10 * DENSE, spare=DENSE)
    assert cached(model) == 1
    install(model, 10 * DENSE, spare=0)  # the next run of the same size
    assert cached(model) == 1
    install(model, 10 * DENSE, spare=-1)  # a larger picture needs more
    assert cached(model) == 0


def test_release_gives_everything_back(model):
    cache, _ = install(model, 10 * DENSE)
    assert cached(model) == 3
    cache.release(model)
    assert cached(model) == 0


def test_nothing_to_do_without_packed_layers():
    assert "no GGUF weights" in DequantCache().check(tiny.context(nn.Linear(2, 2)))


def test_offloaded_weights_decline_and_drop(model):
    cache, _ = install(model, 10 * DENSE)
    reason = cache.check(tiny.context(model, device=torch.device("meta")))
    assert "offloaded" in reason
    assert cached(model) == 0


def test_a_negative_budget_is_refused():
    with pytest.raises(ValueError, match="dequant_cache_gib needs 0 or more; found -1"):
        CacheConfig(-1)
