"""Choices by measurement: how two ways are timed, and what is kept between processes.

Some choices can only be made by measuring (a memory format), some cost seconds to set up besides
(compiled blocks beside fused ones). The figures are kept in the host's user folder, under a key
that names everything they hold for: card, versions of torch, Triton and this pack, model and size.
Another version measures again. A file that is damaged or cannot be written changes nothing but the
cost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from .env import capabilities, pack_version, versions
from .timing import Mark, compare_ms

log = logging.getLogger("speed_tier.probe")

_FILE: Final = "measured.json"
_KEPT: Final = 500
_lock = threading.Lock()

# What one measurement may cost. It is looked at before every further call, so that the last call
# may end later than that.
BUDGET_S: Final = 1.0
# Below this the two ways are the same within the noise of a short measurement.
MIN_GAIN: Final = 1.03
_ROUNDS: Final = 5
_CALLS: Final = 7  # the crop is chosen so that one to set up and three rounds fit


def key(device: torch.device, *what: object) -> str:
    """A key for what was measured on `device` with the running versions."""
    card, found = capabilities(device), versions()
    parts = (card.device_name, found["torch"], found["triton"], pack_version(), *what)
    return " | ".join(map(str, parts))


class Measurements:
    """Pairs of milliseconds by key, in one file.

    Args:
        folder: where the file is; None = nowhere, then nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / _FILE

    def get(self, key: str) -> tuple[float, float] | None:
        """The two figures under `key`, or None."""
        pair = self._read().get(key)
        return None if pair is None else (pair[0], pair[1])

    def put(self, key: str, first_ms: float, second_ms: float) -> None:
        """Keep two figures; the oldest of very many are forgotten."""
        if self._path is None:
            return
        with _lock:
            rows = self._read()
            rows.pop(key, None)
            rows[key] = [round(first_ms, 4), round(second_ms, 4)]
            kept = dict(list(rows.items())[-_KEPT:])
            # Written aside and moved: another process may read or write at the same moment.
            aside = self._path.with_name(f"{_FILE}.{os.getpid()}")
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                aside.write_text(json.dumps(kept), encoding="utf-8")
                aside.replace(self._path)
            except OSError as error:
                log.info("%s could not be written: %s", _FILE, error)
                with contextlib.suppress(OSError):
                    aside.unlink(missing_ok=True)

    def _read(self) -> dict[str, list[float]]:
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {name: pair for name, pair in found.items() if _is_pair(pair)}


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(ms) in (int, float) and 0 < ms < 1e9 for ms in value)
    )


@dataclass(frozen=True)
class Trial:
    """The call that is about to be made, to be tried on its own input or a crop of it.

    Attributes:
        what: What it does, "vae decode".
        size: Height and width of the input, in its own units.
        step: Crops are multiples of it.
        pixels: Pixels to a unit.
        run: Makes the call on (height, width) of the input, as it would be made now.
        varies: More calls of other sizes follow in the same run.
    """

    what: str
    size: tuple[int, int]
    step: int
    pixels: int
    run: Callable[[int, int], object]
    varies: bool = False


@dataclass(frozen=True)
class Figures:
    """What was found out about two ways, the plain one and another.

    Attributes:
        plain_ms, other_ms: Medians; 0 where they could not be measured.
        problem: Why they could not be measured.
        spent_s: What the measurement cost, 0 for figures of an earlier one.
        place: On how much of the input.
    """

    plain_ms: float = 0.0
    other_ms: float = 0.0
    problem: str = ""
    spent_s: float = 0.0
    place: str = ""

    @property
    def wins(self) -> bool:
        """Whether the other way pays."""
        return not self.problem and self.other_ms * MIN_GAIN < self.plain_ms

    def text(self) -> str:
        """Both figures, and their source."""
        if self.problem:
            return self.problem
        return f"{self.other_ms:.2f} ms with it, {self.plain_ms:.2f} without ({self.source()})"

    def source(self) -> str:
        """Where the figures come from and what they cost."""
        if not self.spent_s:
            return "measured earlier on this card"
        return f"measured now{self.place} in {self.spent_s:.2f} s"


def measure(
    trial: Trial,
    other: Callable[[], AbstractContextManager[object]],
    device: torch.device,
    budget_s: float = BUDGET_S,
    set_up_is_counted: bool = True,
    share_of_set_up: float = 0.0,
) -> Figures:
    """Time a call both ways on its own input, in turns, within `budget_s`.

    A call that is too long is tried on a crop: the largest that fits, going up by factors of two.

    Args:
        other: In this context the call goes the other way.
        set_up_is_counted: False where the first call of the other way compiles what would have to
            be compiled anyhow.
        share_of_set_up: How much of what the first call of the other way takes longer is added to
            each of its calls.
    """
    started_s = time.perf_counter()
    first = crop = _at_most(trial, (trial.step, trial.step))
    _call_ms(trial, crop, device)
    # What the first call of a process loads would be loaded by the call itself just as well.
    free_s = time.perf_counter() - started_s

    def left_ms() -> float:
        return 1000 * (budget_s - (time.perf_counter() - started_s - free_s))

    # Small calls cost their launches: how the time grows is seen on the way up.
    plain_ms = _call_ms(trial, crop, device)
    while crop != trial.size:
        larger = _at_most(trial, (2 * crop[0], 2 * crop[1]))
        growth = larger[0] * larger[1] / (crop[0] * crop[1])
        if growth * plain_ms * (1 + _CALLS) > left_ms():
            break
        crop, plain_ms = larger, _call_ms(trial, larger, device)
    if plain_ms * _CALLS > left_ms() and crop == first:
        return Figures(
            problem=f"not measured: a call of {_pixels(trial, crop)} takes {plain_ms:.0f} ms, and "
            f"a measurement may take {budget_s:g} s",
            spent_s=time.perf_counter() - started_s,
        )

    def other_ms() -> float:
        with other():
            return _call_ms(trial, crop, device)

    before_s = time.perf_counter()
    set_up_ms = max(0.0, other_ms() - plain_ms)
    compile_s = 0.0 if set_up_is_counted else time.perf_counter() - before_s
    free_s += compile_s
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        round_ms = sum(series[-1] for series in times if series) or 2 * plain_ms
        if round_ms > left_ms():
            break
        times[0].append(_call_ms(trial, crop, device))
        times[1].append(other_ms())
    spent_s = time.perf_counter() - started_s - compile_s
    if not times[0]:
        return Figures(
            problem=f"not measured: setting it up at {_pixels(trial, crop)} took "
            f"{set_up_ms / 1000:.2f} s, and a measurement may take {budget_s:g} s",
            spent_s=spent_s,
        )
    found_ms = statistics.median(times[1]) + share_of_set_up * set_up_ms
    place = "" if crop == trial.size else f" on {_pixels(trial, crop)}"
    return Figures(statistics.median(times[0]), found_ms, spent_s=spent_s, place=place)


def choose(
    key: str,
    folder: Path | None,
    plain: Callable[[], object],
    other: Callable[[], object],
    device: torch.device,
) -> Figures:
    """What is known under `key`, or two functions measured in turns and kept.

    For functions of a few milliseconds: a measurement is twelve calls, and has no other bound.
    """
    if (found := known(key, folder)) is not None:
        return found
    started_s = time.perf_counter()
    pair = compare_ms(plain, other, device)
    figures = Figures(*pair, spent_s=time.perf_counter() - started_s)
    remember(key, folder, figures)
    return figures


def _call_ms(trial: Trial, crop: tuple[int, int], device: torch.device) -> float:
    start = Mark(device)
    trial.run(*crop)
    return start.seconds_until(Mark(device)) * 1000.0


def _at_most(trial: Trial, size: tuple[int, int]) -> tuple[int, int]:
    return min(trial.size[0], size[0]), min(trial.size[1], size[1])


def _pixels(trial: Trial, crop: tuple[int, int]) -> str:
    return f"{crop[1] * trial.pixels}x{crop[0] * trial.pixels} px"


# Of this process: a store that cannot be written costs one measurement then, not one a run.
_found: Final[dict[str, Figures]] = {}


def known(key: str, folder: Path | None) -> Figures | None:
    """What is known under `key`, from this process or an earlier one."""
    if (found := _found.get(key)) is not None:
        return replace(found, spent_s=0.0)
    if (pair := Measurements(folder).get(key)) is not None:
        return Figures(*pair)
    return None


def remember(key: str, folder: Path | None, figures: Figures) -> None:
    """Keep figures for this process, and for the next ones where they were measured."""
    _found[key] = figures
    while len(_found) > _KEPT:
        del _found[next(iter(_found))]
    if not figures.problem:
        Measurements(folder).put(key, figures.plain_ms, figures.other_ms)


def forget() -> None:
    """What this process knows beside the store."""
    _found.clear()
