"""Marks, the step clock and the two figures made of it."""

import time

import pytest
import torch
from speed_tier.speed import timing
from speed_tier.speed.timing import (
    Mark,
    StepClock,
    compare_ms,
    first_step_tax_s,
    steady_step_s,
)

CPU = torch.device("cpu")


class FakeTime:
    """Stands in for the time module: the clock moves only when told."""

    def __init__(self):
        self.now_s = 100.0

    def perf_counter(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(timing, "time", fake)
    return fake


def test_a_run_on_the_host_clock(clock):
    steps = StepClock(CPU)
    assert steps.load_s is None
    assert steps.steps_s() == []
    clock.now_s += 2.0
    steps.mark_loaded()
    clock.now_s += 0.5  # text of the negative prompt, hooks: neither load nor step
    steps.mark_first_call()
    for seconds in (3.0, 1.0, 1.5):
        clock.now_s += seconds
        steps.mark_first_call()  # only the first call of the run counts
        steps.mark_step()
    clock.now_s += 0.25
    steps.finish()
    clock.now_s += 50.0
    assert steps.load_s == 2.0
    assert steps.steps_s() == [3.0, 1.0, 1.5]
    assert steps.steps_s(only_passed=True) == [3.0, 1.0, 1.5]
    assert steps.step_count == 3
    assert steps.total_s == 8.25


def test_a_run_that_never_called_the_denoiser(clock):
    steps = StepClock(CPU)
    steps.mark_step()
    clock.now_s += 1.0
    steps.finish()
    assert steps.steps_s() == []
    assert steps.total_s == 1.0


def test_total_grows_while_the_run_is_open(clock):
    steps = StepClock(CPU)
    clock.now_s += 1.0
    assert steps.total_s == 1.0
    clock.now_s += 1.0
    assert steps.total_s == 2.0


def test_the_first_step_is_told_apart_from_the_steady_ones():
    assert steady_step_s([9.0, 1.0, 3.0, 2.0]) == 2.0
    assert first_step_tax_s([9.0, 1.0, 3.0, 2.0]) == 7.0
    assert first_step_tax_s([1.0, 2.0]) == 0.0, "a tax is never negative"


@pytest.mark.parametrize("steps_s", [[], [5.0]])
def test_one_step_alone_has_no_steady_figure(steps_s):
    assert steady_step_s(steps_s) is None
    assert first_step_tax_s(steps_s) is None


def test_a_mark_on_the_cpu_has_always_passed():
    first = Mark(CPU)
    time.sleep(0.01)
    second = Mark(CPU)
    second.wait()
    assert first.passed()
    assert 0.009 < first.seconds_until(second) < 1.0
    assert second.host_s > first.host_s


def test_compare_ms_takes_turns(clock):
    calls = []

    def work(name, milliseconds):
        calls.append(name)
        clock.now_s += milliseconds / 1000.0

    first, second = compare_ms(lambda: work("a", 3.0), lambda: work("b", 2.0), CPU, repeats=2)
    assert (first, second) == (pytest.approx(3.0), pytest.approx(2.0))
    assert calls == ["a", "b"] * 3


@pytest.mark.gpu
def test_marks_on_the_device_measure_device_time():
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    steps = StepClock(device)
    steps.mark_first_call()
    for _ in range(10):
        x @ x
    steps.mark_step()
    steps.finish()
    (seconds,) = steps.steps_s()
    assert seconds > 0
    assert steps.steps_s(only_passed=True) == [seconds]
