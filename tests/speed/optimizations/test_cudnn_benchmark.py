"""cudnn.benchmark: nothing to do without convolutions, held for the run with them."""

import time
from dataclasses import replace

import pytest
import torch
from speed_tier.speed import env, probe
from speed_tier.speed.optimizations.cudnn_benchmark import CudnnBenchmark
from speed_tier.tests.speed import tiny, tiny_vae
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


def on_a_card(vae, z, **more):
    return tiny_vae.context("kl", vae, z, device=torch.device("cuda"), **more)


@pytest.fixture
def vae(monkeypatch):
    probe.forget()
    # Timed by the host's clock, and named, as if the card were there.
    monkeypatch.setattr(probe, "capabilities", lambda device: env.capabilities(tiny.CPU))
    yield tiny_vae.kl()
    probe.forget()


def test_it_is_kept_only_where_it_measures_faster(vae, monkeypatch):
    z, flags = tiny_vae.latent("kl"), []

    def decode(height, width):
        flags.append(torch.backends.cudnn.benchmark)
        time.sleep(0.002 if flags[-1] is faster else 0.006)

    for faster in (True, False):
        probe.forget()
        given = on_a_card(vae, z, trial=replace(tiny_vae.trial_of(vae, z), run=decode))
        assert CudnnBenchmark().check(given) is None
        before = full_state()
        handle = CudnnBenchmark().install(given)
        assert full_state() == before
        assert handle.flags == ({"cudnn.benchmark": True} if faster else {})
        assert {True, False} <= set(flags)
        assert (handle.not_used == "") is faster
        reason = CudnnBenchmark().check(given)
        assert (reason is None) is faster


def test_a_tenth_of_the_search_counts(vae):
    """4 ms faster a call, and a search of 100 ms that comes back with every new size."""
    z, searched = tiny_vae.latent("kl"), []

    def decode(height, width):
        tuned = torch.backends.cudnn.benchmark
        if tuned and not searched:
            searched.append(True)
            time.sleep(0.1)
        time.sleep(0.002 if tuned else 0.006)

    given = on_a_card(vae, z, trial=replace(tiny_vae.trial_of(vae, z), run=decode))
    handle = CudnnBenchmark().install(given)
    assert searched and handle.flags == {}
    assert handle.not_used.startswith("does not pay here: 1")  # 2 + 10 ms


def test_tiles_and_a_host_that_tunes_already(vae, monkeypatch):
    z = tiny_vae.latent("kl")
    tiles = on_a_card(vae, z, trial=tiny_vae.trial_of(vae, z, varies=True))
    assert "tiles come in many sizes" in CudnnBenchmark().check(tiles)
    assert "no call to try" in CudnnBenchmark().check(on_a_card(vae, None))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert "the host has switched" in CudnnBenchmark().check(on_a_card(vae, z))
