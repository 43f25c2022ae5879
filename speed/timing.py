"""Timing without a device synchronisation per step.

On CUDA a mark is an event recorded in the stream; its time is read when the device has passed it.
On every other device a mark is the host's clock.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch


class Mark:
    """A moment in the work queued on a device."""

    __slots__ = ("_event", "_host_s")

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda" and torch.cuda.is_available():
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self._host_s = time.perf_counter()

    @property
    def host_s(self) -> float:
        """When the mark was made, on the host's clock, in seconds."""
        return self._host_s

    def passed(self) -> bool:
        """Whether the device has reached the mark. Never waits."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_until(self, later: Mark) -> float:
        """Seconds of device time between two marks; waits for the later one."""
        if self._event is None or later._event is None:
            return later._host_s - self._host_s
        later.wait()
        return float(self._event.elapsed_time(later._event)) / 1000.0


class StepClock:
    """Marks of one sampling run: the start, the end of loading, every step, the end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._started_s = time.perf_counter()
        self._loaded_s: float | None = None
        self._first: Mark | None = None
        self._steps: list[Mark] = []
        self._total_s: float | None = None

    def mark_loaded(self) -> None:
        self._loaded_s = time.perf_counter()

    def mark_first_call(self) -> None:
        if self._first is None:
            self._first = Mark(self.device)

    def mark_step(self) -> None:
        self._steps.append(Mark(self.device))

    def start_again(self) -> None:
        """The steps begin anew; the run as a whole began when it did."""
        self._first = None
        self._steps.clear()

    def finish(self) -> None:
        """Waits for the device once; the host does the same when it reads the result."""
        if self._steps:
            self._steps[-1].wait()
        self._total_s = time.perf_counter() - self._started_s

    @property
    def load_s(self) -> float | None:
        return None if self._loaded_s is None else self._loaded_s - self._started_s

    @property
    def total_s(self) -> float:
        return self._total_s if self._total_s is not None else time.perf_counter() - self._started_s

    @property
    def step_count(self) -> int:
        return len(self._steps)

    def steps_s(self, only_passed: bool = False) -> list[float]:
        """Seconds of each step, in order.

        Args:
            only_passed: Leave out the steps that the device has not finished, so as not to wait.
        """
        if self._first is None:
            return []
        marks = [self._first, *self._steps]
        if only_passed:
            marks = [mark for mark in marks if mark.passed()]
        return [a.seconds_until(b) for a, b in itertools.pairwise(marks)]


def steady_step_s(steps_s: list[float]) -> float | None:
    """Median of the steps after the first; None while there is no second step."""
    return statistics.median(steps_s[1:]) if len(steps_s) > 1 else None


def first_step_tax_s(steps_s: list[float]) -> float | None:
    """What the first step cost beyond a steady one; never below zero."""
    steady = steady_step_s(steps_s)
    return None if steady is None else max(0.0, steps_s[0] - steady)


def compare_ms(
    first: Callable[[], object],
    second: Callable[[], object],
    device: torch.device,
    repeats: int = 5,
) -> tuple[float, float]:
    """Median milliseconds of two functions, measured in turns so that drift hits both alike."""
    first(), second()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, into in zip((first, second), times, strict=True):
            start = Mark(device)
            function()
            into.append(start.seconds_until(Mark(device)) * 1000.0)
    return statistics.median(times[0]), statistics.median(times[1])
