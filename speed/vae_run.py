"""One call of a VAE (decode or encode, whole or tiled) in a tier.

The main path is apply.py's: the same plan, checks, flags, patches and report. What is added here is
what a VAE needs: figures per call of its module, and the way back to the plain call. A picture that
`off` would have made is never lost to a tier: where a call with features in place fails, runs out
of memory or gives something that is not finite, the same call is made again as `off` makes it, and
the rest of the run stays so.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from .apply import Publish, Run, TieredModel, TierRequest
from .engagement import Call
from .errors import is_out_of_memory
from .families import VAE_FAMILIES
from .flags import FLAGS
from .optimizations import VAE_OPTIMIZATIONS
from .optimizations.base import Optimization
from .patching import PatchSet
from .report import REPORTS, Report
from .tiers import VAE_FEATURES, ResolvedTier, Switch

log = logging.getLogger("speed_tier.vae_run")

DECODE: Final = "vae decode"
ENCODE: Final = "vae encode"


def vae_request(
    resolved: ResolvedTier,
    switches: Mapping[str, Switch] | None = None,
    optimizations: tuple[Optimization, ...] = VAE_OPTIMIZATIONS,
) -> TierRequest:
    """What a node asks for a VAE. A `VaeRun` checks its results itself."""
    return TierRequest(
        resolved,
        switches or {},
        optimizations,
        self_check=False,
        families=VAE_FAMILIES,
        features=VAE_FEATURES,
    )


class TieredVae(TieredModel):
    """One tier as applied to one copy of a VAE object."""

    def begin(self, report: Report, device: torch.device, publish: Publish | None = None) -> VaeRun:
        return VaeRun(self.request, self._tokens, report, device, publish or _nobody)


def _nobody(kind: str, data: Any) -> None:
    """Nobody listens."""


class VaeRun(Run):
    """One decode or encode of a tiered VAE; `call` is one call of its module."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._given_up = False
        self._calls = 0
        self._engaging_s = 0.0

    def call(self, call: Call, invoke: Callable[[Mapping[str, Any]], Any]) -> Any:
        """Make one call; as `off` makes it where it cannot be made otherwise."""
        if self._given_up:
            self.report.evaluations += 1
            return self._counted(invoke({}))
        started_s = time.perf_counter()
        engagement = self._engagement(call)
        self._engaging_s += time.perf_counter() - started_s
        if self._calls == 0:  # what was compiled until now was compiled to be measured
            self._compiles_seen = sum(k.compiles + k.failed for k in self._compiled().kinds)
        reason, ran_out = "", False
        try:
            output = super().call(call, invoke)
        except RuntimeError as error:  # out of memory is one
            if not engagement.in_use():
                raise
            # The exception holds every tensor of the call until this block is left.
            reason = f"failed in this call: {_short(error)}"
            ran_out = is_out_of_memory(error)
        if ran_out and call.host.after_out_of_memory is not None:
            call.host.after_out_of_memory(call.denoiser)
        if not reason:
            if not engagement.in_use() or _is_finite(output):
                return self._counted(output)
            reason = "the result was not finite"
            del output
        self._give_up(reason)
        return self._counted(invoke({}))

    def _counted(self, output: Any) -> Any:
        self._calls += 1
        self.mark_step(self._calls, self._calls)
        return output

    @contextlib.contextmanager
    def as_engaged(self, denoiser: nn.Module) -> Iterator[None]:
        """As a call goes that is made now; also while engaging is not finished."""
        engagement = self._engagements.get(id(denoiser))
        handles = list(engagement.handles.values()) if engagement is not None else []
        with contextlib.ExitStack() as stack:
            for handle in handles:
                stack.enter_context(handle.scope())
            stack.enter_context(PatchSet([p for handle in handles for p in handle.patches]))
            yield

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        log.warning("%s goes on as off: %s", self.report.operation, reason)
        for engagement in self._engagements.values():
            for handle in reversed(engagement.handles.values()):
                handle.remove()
                if not handle.not_used:
                    handle.fell_back = handle.fell_back or reason
            engagement.patches = PatchSet(())  # and what they keep
        # Ours, and those of another tiered run around this one: off means without them.
        self._hold(FLAGS.suspend())
        self.report.notes.append(f"{reason}; made again as off makes it")
        if self.clock.device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _fill_report(self, outcome: str, error: str) -> None:
        report = self.report
        super()._fill_report(outcome, error)
        timing = report.timing
        timing.step_marks = [mark if mark == "compile" else "" for mark in timing.step_marks]
        if report.operation == DECODE and timing.steps_s:
            timing.vae_decode_s = sum(timing.steps_s)
        timing.first_step_tax_s = None
        report.speedup_against_off = _speedup_against_off(report)
        report.payback_images = None
        if report.features and self._engaging_s > 0.1:
            report.notes.append(
                f"measuring and compiling took {self._engaging_s:.2f} s before the first call"
            )


def _speedup_against_off(run: Report) -> float | None:
    """Speed of a call over the fastest off call of the same work.

    The first call of a process warms up: one off call alone is no baseline, nor is a run that
    compiled comparable.
    """
    if not run.engaged() or "compile" in run.timing.step_marks or not run.timing.steps_s:
        return None
    off_s = [
        sum(report.timing.steps_s)
        for report in REPORTS.runs()
        if report.tier == "off"
        and report.outcome == "done"
        and not report.engaged()
        and report.work() == run.work()
    ]
    return min(off_s) / sum(run.timing.steps_s) if len(off_s) > 1 else None


def _is_finite(output: Any) -> bool:
    """Whether every value of a result is finite. Waits for the device."""
    if not isinstance(output, torch.Tensor) or not output.is_floating_point() or not output.numel():
        return True
    # No copy of the result, unlike isfinite; both ends are NaN where one value is.
    low, high = torch.aminmax(output)
    return bool(low.isfinite()) and bool(high.isfinite())


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
