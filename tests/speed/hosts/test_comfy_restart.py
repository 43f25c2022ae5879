"""A sampler that begins again, and who must not be called twice; without a host."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from speed_tier.speed.errors import NotFiniteError
from speed_tier.speed.hosts.comfy import (
    KEY,
    _participant,
    _Session,
    after_out_of_memory,
    under_way,
)
from speed_tier.tests.speed import tiny
from torch import nn


class Run:
    """A run whose first pass ends as the test says."""

    def __init__(self, ends_broken=False):
        self.can_begin_again, self.ends_broken, self.restarts = False, ends_broken, 0

    def ended_broken(self):
        return self.ends_broken

    def start_again(self):
        self.restarts += 1


class Sampler:
    def __init__(self, run, raises=None):
        self.run, self.raises, self.seen = run, raises, []

    def __call__(self, guider, sigmas, extra_args, callback, noise, latent, **kwargs):
        self.seen.append((noise.clone(), self.run.can_begin_again, torch.rand(1)))
        noise.zero_()
        if len(self.seen) == 1 and self.raises is not None:
            raise self.raises
        return "samples"


def sample(run, sampler, conds=()):
    session = _Session(None, None, "")
    session._runs.append(run)
    guider = SimpleNamespace(conds={"positive": list(conds)})
    noise = torch.ones(3)
    return session.sampler_sample(sampler, guider, None, {}, None, noise, None, disable_pbar=True)


@pytest.mark.parametrize("ends_broken", [True, False])
def test_the_second_try_has_the_first_ones_noise_and_random_numbers(ends_broken):
    run = Run(ends_broken)
    sampler = Sampler(run, None if ends_broken else NotFiniteError("step 3"))
    assert sample(run, sampler) == "samples"
    assert run.restarts == 1
    (first, could, number), (second, could_again, same) = sampler.seen
    assert torch.equal(first, second) and torch.equal(number, same)
    assert (could, could_again, run.can_begin_again) == (True, False, False)


def test_a_good_run_is_sampled_once():
    run = Run()
    sampler = Sampler(run)
    assert sample(run, sampler) == "samples"
    assert (len(sampler.seen), run.restarts, run.can_begin_again) == (1, 0, False)


def test_an_interrupt_is_no_second_try():
    run = Run()
    with pytest.raises(KeyboardInterrupt):
        sample(run, Sampler(run, KeyboardInterrupt()))
    assert (run.restarts, run.can_begin_again) == (0, False)


def test_a_lora_on_a_schedule_is_not_rewound_so_the_run_goes_on():
    run = Run(ends_broken=True)
    sampler = Sampler(run)
    sample(run, sampler, conds=[{"hooks": object()}])
    assert [could for _, could, _ in sampler.seen] == [False]
    assert run.restarts == 0


class Closes:
    ends: tuple = ()

    def close(self, outcome, error):
        self.ends = (outcome, error)


InterruptProcessingException = type("InterruptProcessingException", (BaseException,), {})


@pytest.mark.parametrize(
    ("raised", "ends"),
    [
        (None, ("done", "")),
        (InterruptProcessingException(), ("interrupted", "")),
        (RuntimeError("broke"), ("failed", "RuntimeError: broke")),
    ],
)
def test_a_run_is_closed_with_the_way_it_ended(raised, ends):
    run, runs = Closes(), []
    with contextlib.suppress(type(raised) if raised else ()), under_way(run, runs):
        assert runs == [run]
        if raised is not None:
            raise raised
    assert (run.ends, runs) == (ends, [])


def method():
    """In place of another pack's code."""


@pytest.mark.parametrize(
    ("options", "attribute", "said"),
    [
        ({}, "", ""),
        ({"wrappers": {"apply_model": {KEY: [1]}, "diffusion_model": {"a": []}}}, "", ""),
        ({"wrappers": {"diffusion_model": {"cache": [1]}}}, "", "(cache)"),
        ({"wrappers": {"apply_model": {"other": [1]}}}, "", "(other)"),
        ({"patches_replace": {"dit": {}}}, "", "replaces parts"),
        ({"multigpu_thread_pool": 1}, "", "several devices"),
        ({}, "forward", "replaced the model's forward"),
        ({}, "_forward", "replaced the model's forward"),
    ],
)
def test_who_takes_part(options, attribute, said):
    model = tiny.toy()
    if attribute:
        setattr(model, attribute, method)
    found = _participant(model, options)
    assert said in found and bool(said) is bool(found)


def test_a_model_with_nothing_under_way_needs_no_help():
    after_out_of_memory(nn.Linear(1, 1))  # imports nothing of a host
    assert not hasattr(nn.Linear(1, 1), "_prefetch")
