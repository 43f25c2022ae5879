"""One sampler setting at off and in a tier: what differs, and what each run cost.

Figures come from the runs' own reports, so that nothing is timed twice. The first tiered run pays
for compile, capture and warm-up; the later ones show what stays.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from .metrics import Difference
from .report import FeatureOutcome, Report, State

SCHEMA: Final = 1
_WORTH_A_WORD_S: Final = 0.05  # of first-run tax
_NO_STEADY: Final = "a steady time needs two steps or more"


@dataclass
class Comparison:
    """Everything that was measured.

    Attributes:
        tier: The tier beside off.
        setting: The sampler setting in words.
        off: Report of the off run, None where no step was sampled.
        runs: Reports of the tiered runs, in order.
        latents: The last tiered run's latents against off's.
        repeats: Latents of each later tiered run against the first one's.
        images: The same as `latents` of the decoded pictures, None without a VAE.
        picture: What the difference picture shows.
    """

    tier: str
    setting: str
    off: Report | None
    runs: list[Report]
    latents: Difference
    repeats: list[Difference] = field(default_factory=list)
    images: Difference | None = None
    picture: str = ""

    @property
    def speedup(self) -> float | None:
        """Steady step of off over that of the last tiered run; None where nothing engaged."""
        if self.off is None or not self.runs or not self.runs[-1].engaged():
            return None
        off_s, tier_s = self.off.timing.steady_step_s, self.runs[-1].timing.steady_step_s
        return off_s / tier_s if off_s and tier_s else None

    @property
    def first_run_tax_s(self) -> float | None:
        """What the first tiered run took longer than the last one, loading left out.

        With one run only, what its first step took longer than a steady one.
        """
        if not self.runs:
            return None
        first, last = self.runs[0], self.runs[-1]
        if first is last:
            return first.timing.first_step_tax_s
        first_s, last_s = _sampling_s(first), _sampling_s(last)
        return None if first_s is None or last_s is None else max(0.0, first_s - last_s)

    @property
    def payback_images(self) -> int | None:
        """How many pictures like this save the first-run tax; None where none would, or no tax."""
        tax_s, speedup = self.first_run_tax_s, self.speedup
        if self.off is None or tax_s is None or tax_s < _WORTH_A_WORD_S or not speedup:
            return None
        off_s, tier_s = self.off.timing.steady_step_s, self.runs[-1].timing.steady_step_s
        if not off_s or not tier_s or off_s <= tier_s:
            return None
        return math.ceil(tax_s / ((off_s - tier_s) * self.off.steps))

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-able data."""
        return {
            "schema": SCHEMA,
            "tier": self.tier,
            "setting": self.setting,
            "latents": asdict(self.latents),
            "repeats": [asdict(found) for found in self.repeats],
            "images": None if self.images is None else asdict(self.images),
            "picture": self.picture,
            "speedup": self.speedup,
            "first_run_tax_s": self.first_run_tax_s,
            "payback_images": self.payback_images,
            "off": None if self.off is None else self.off.to_dict(),
            "runs": [run.to_dict() for run in self.runs],
        }

    def to_text(self) -> str:
        """The comparison as a person reads it."""
        lines = [
            f"{self.tier} against off: {self.setting}",
            f"latents: {self.latents.words(self.tier)}",
        ]
        if self.images is not None:
            lines.append(f"images: {self.images.words(self.tier)}{self._levels()}")
        lines += [self._speed_line(), *self._run_lines(), self._tax_line()]
        lines += self._engaged_lines()
        if self.picture:
            lines.append(f"picture: {self.picture}")
        if self.off is not None:
            lines.append(f"measured {self.off.to_dict()['measured_at']}")
        return "\n".join(lines)

    def _levels(self) -> str:
        if self.images is None or not self.images.max_error:
            return ""
        levels = self.images.max_error * 255
        return f"; the largest is {levels:.2g} of the 255 levels of a file"

    def _speed_line(self) -> str:
        if self.off is None or not self.runs:
            return "speed: not measured, no step was sampled (denoise 0)"
        off_s, tier_s = self.off.timing.steady_step_s, self.runs[-1].timing.steady_step_s
        if not off_s or not tier_s:
            return f"speed: not measured, {_NO_STEADY}"
        if self.speedup is None:
            return (
                f"speed: nothing engaged, so both are the same path; {off_s:.4f} and {tier_s:.4f} "
                "s/it, steady"
            )
        return f"speed: {self.speedup:.2f}x off's, {off_s:.4f} -> {tier_s:.4f} s/it, steady"

    def _run_lines(self) -> list[str]:
        lines = [] if self.off is None else [f"off: {_cost(self.off)}"]
        for number, run in enumerate(self.runs, 1):
            name = self.tier if len(self.runs) == 1 else f"{self.tier}, run {number}"
            same = ""
            if number > 1:
                same = f"; latents against run 1: {self.repeats[number - 2].words('this run')}"
            lines.append(f"{name}: {_cost(run)}{same}")
        return lines

    def _tax_line(self) -> str:
        tax_s = self.first_run_tax_s
        if tax_s is None:
            return "first-run tax: not measured"
        how = "first step less a steady one"
        if len(self.runs) > 1:
            how = f"run 1 less run {len(self.runs)}, loading left out"
        line = f"first-run tax of {self.tier}: {tax_s:.2f} s ({how})"
        if count := self.payback_images:
            line += f", paid back by {count} image{'s' * (count != 1)} like this"
        return line

    def _engaged_lines(self) -> list[str]:
        if not self.runs:
            return []
        run = self.runs[-1]
        if not (engaged := run.engaged()):
            engaged = ["nothing; Speed Tier Report says why"] if self.tier != "off" else ["nothing"]
        lines = [f"engaged: {', '.join(engaged)}"]
        lines += [f"  {f.name} fell back: {f.reason}" for f in run.features if _fell_back(f)]
        if run.model.note:
            lines.append(f"note: {run.model.note}")
        return lines + [f"note: {note}" for note in run.notes]


def _fell_back(feature: FeatureOutcome) -> bool:
    return feature.state is State.FELL_BACK


def _sampling_s(run: Report) -> float | None:
    """Seconds of the whole run without the loading of weights."""
    total_s, load_s = run.timing.total_s, run.timing.load_s
    return None if total_s is None else total_s - (load_s or 0.0)


def _cost(run: Report) -> str:
    timing = run.timing
    loading = "" if timing.load_s is None else f" and {timing.load_s:.2f} s of loading"
    parts = [f"{_seconds(_sampling_s(run))}{loading}"]
    parts.append(f"first step {_seconds(timing.first_step_s)}")
    if timing.steady_step_s is not None:
        parts.append(f"steady {timing.steady_step_s:.4f} s/it")
    if run.peak_bytes is not None:
        parts.append(f"peak {run.peak_bytes / 2**30:.2f} GiB")
    return ", ".join(parts)


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} s"
