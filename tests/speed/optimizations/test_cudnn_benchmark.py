"""cudnn.benchmark: nothing to do without convolutions, held for the run with them."""

from dataclasses import replace

import pytest
import torch
from speed_tier.speed.optimizations.cudnn_benchmark import CudnnBenchmark
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.process import full_state
from torch import nn


@pytest.mark.parametrize("value", [False, True])
def test_without_convolutions_it_says_the_effective_value(monkeypatch, value):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", value)
    for forced in (False, True):
        assert CudnnBenchmark().check(tiny.context(tiny.toy(), forced=forced)) == (
            f"nothing to do: no convolutions (the host's cudnn.benchmark is {value})"
        )


@pytest.mark.parametrize("make", [tiny.z_image, tiny.qwen_image])
def test_neither_transformer_has_a_convolution(make):
    assert "no convolutions" in CudnnBenchmark().check(tiny.context(make()))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(1, 1, 1),
        nn.Conv2d(1, 1, 1),
        nn.Conv3d(1, 1, 1),
        nn.ConvTranspose2d(1, 1, 1),
        type("HostConv", (nn.Conv2d,), {})(1, 1, 1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_model_with_a_convolution(layer):
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(layer))
    assert CudnnBenchmark().check(tiny.context(model)) == "cudnn needs a CUDA device; found cpu"
    before = full_state()
    with tiny.engaged(CudnnBenchmark(), on=model, forced=True) as run:
        assert run.handles[0].note == "algorithms are measured at first use"
        assert full_state()["cudnn.benchmark"] is True is not before["cudnn.benchmark"]
    assert full_state() == before


def test_a_choice_that_would_outlive_the_run_is_not_made_unasked(monkeypatch):
    model = nn.Conv2d(1, 1, 1)
    on_a_card = tiny.context(model, device=torch.device("cuda"))
    assert "for later runs at off" in CudnnBenchmark().check(on_a_card)
    assert CudnnBenchmark().check(replace(on_a_card, forced=True)) is None
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert "the host has switched" in CudnnBenchmark().check(replace(on_a_card, forced=True))
