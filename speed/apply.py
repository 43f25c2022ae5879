"""The main path: a tier becomes an ordered list of optimizations, engaged for one run.

A `TieredModel` is one tier as applied to one model clone. Each sampling run opens a `Run`. At the
first denoiser call, when the weights are loaded, the run

    1. recognises the family,
    2. takes the plan from the tier,
    3. checks and installs each optimization in order, acquiring its process-wide flags,
    4. compares the first call of every size with the untiered path,
    5. and from then on wraps every call: patches in, call, patches out.

When the run ends everything is undone in reverse and what was measured becomes the report.

Flags are not set before that first call on purpose: the host merges LoRA weights while it loads,
and a merge under TF32 would stay in the weights after the run.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from . import self_check
from .engagement import Call, Engagement, compile_facts, model_facts
from .env import capabilities, disabled_features, versions
from .errors import NotFiniteError
from .families import FAMILIES, detect_family
from .families.base import Family
from .flags import FLAGS, describe, snapshot
from .optimizations import OPTIMIZATIONS, dynamo
from .optimizations.base import Context, Optimization
from .report import REPORTS, CompileFacts, Report, Timing
from .tiers import TIER_FEATURES, FeatureTable, ResolvedTier, Switch, Tier, planned_features
from .timing import StepClock, first_step_tax_s, steady_step_s
from .warm_up import Size

log = logging.getLogger("speed_tier.apply")

T = TypeVar("T")
# An event's data, or what makes it: events that are not sent then cost nothing.
EventData = dict[str, Any] | Callable[[], dict[str, Any]]
Publish = Callable[[str, EventData], None]


def configured(settings: Mapping[str, Mapping[str, Any]]) -> tuple[Optimization, ...]:
    """The table of optimizations with some settings changed.

    Args:
        settings: Fields of an optimization's config, by the optimization's name.

    Raises:
        ValueError: A value that the config refuses.
    """
    table: list[Any] = []
    for row in OPTIMIZATIONS:
        if values := settings.get(row.name):
            changed: Any = row
            row = dataclasses.replace(changed, config=dataclasses.replace(changed.config, **values))
        table.append(row)
    return tuple(table)


@dataclass(frozen=True)
class TierRequest:
    """What a node asked for.

    Attributes:
        resolved: The tier.
        switches: Per-feature choices of the Advanced node, by feature name.
        optimizations: The table to take features from; tests pass their own.
        self_check: Compare first calls with the untiered path, watch later ones.
        families: The models it is for.
        features: What each tier plans for them.
        warm_up: Picture sizes to prepare in the first step.
    """

    resolved: ResolvedTier
    switches: Mapping[str, Switch] = field(default_factory=dict)
    optimizations: tuple[Optimization, ...] = OPTIMIZATIONS
    self_check: bool = True
    families: tuple[Family, ...] = FAMILIES
    features: FeatureTable = field(default_factory=lambda: TIER_FEATURES)
    warm_up: tuple[Size, ...] = ()

    @property
    def is_off(self) -> bool:
        return self.resolved.tier is Tier.OFF and Switch.ON not in self.switches.values()


class TieredModel:
    """One tier as applied to one model clone. Lives in the clone's wrappers, holds no model."""

    def __init__(self, request: TierRequest) -> None:
        self.request = request
        self._tokens: list[int] = []
        # The clone may be dropped without a word from the host; its flags must not outlive it.
        weakref.finalize(self, _release_tokens, self._tokens)

    def begin(self, report: Report, device: torch.device, publish: Publish | None = None) -> Run:
        """Open a sampling run. The caller closes it in `finally`."""
        request = self.request
        planned = planned_features(request.resolved.tier, dict(request.switches), request.features)
        if device.type != "cpu" and "regional_compile" in planned - disabled_features():
            dynamo.load_beside()
        return Run(self.request, self._tokens, report, device, publish or _nobody)

    def new_report(self) -> Report:
        resolved, switches = self.request.resolved, self.request.switches
        reason = resolved.reason
        if on := [name for name, switch in switches.items() if switch is Switch.ON]:
            reason += f", with {', '.join(on)} switched on"
        report = Report(resolved.asked, resolved.tier.value, reason, versions=versions())
        known = {optimization.name for optimization in self.request.optimizations}
        known.add(self_check.NAME)
        if unknown := sorted(disabled_features() - known):
            report.notes.append(f"SPEED_TIER_DISABLE names no feature: {', '.join(unknown)}")
        return report

    def release(self, denoiser: nn.Module | None) -> None:
        """The model was unloaded: drop what was kept for it, and any flag still held."""
        _release_tokens(self._tokens)
        if denoiser is not None:
            for optimization in reversed(self.request.optimizations):
                optimization.release(denoiser)


def _release_tokens(tokens: list[int]) -> None:
    while tokens:
        FLAGS.release(tokens.pop())


def _nobody(kind: str, data: EventData) -> None:
    """Nobody listens."""


class Run:
    """One sampling run of a tiered model."""

    def __init__(
        self,
        request: TierRequest,
        tokens: list[int],
        report: Report,
        device: torch.device,
        publish: Publish,
    ) -> None:
        self.request = request
        self.report = report
        self.clock = StepClock(device)
        self.publish = publish
        self._tokens = tokens
        self._run_tokens: list[int] = []
        self._engagements: dict[int, Engagement] = {}
        self._retired: list[Engagement] = []
        self._check = self._new_check()
        self._watch = self_check.FiniteWatch()
        self.prepared = False  # other sizes, or there is nothing to prepare
        self.can_begin_again = False  # the host catches NotFiniteError and begins again
        self._known: dict[int, self_check.Known] = {}
        self._dropped_before: dict[int, frozenset[str]] = {}
        self._lock = threading.RLock()
        self._closed = False
        self._step_marks: list[str] = []
        self._compiles_seen = 0
        report.flags["before"] = describe(snapshot())
        if device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats(device)
        if request.is_off:
            # Inside another model's tiered run, off still means the process as it was found.
            self._hold(FLAGS.suspend())

    def call(self, call: Call, invoke: Callable[[Mapping[str, Any]], T]) -> T:
        """Run `invoke` with everything engaged that this run's tier engages for `call.denoiser`.

        Args:
            invoke: Calls the denoiser; given the entries to add to the host's options.
        """
        self.clock.mark_first_call()
        self.report.evaluations += 1
        self.report.text_tokens = max(self.report.text_tokens, call.text_tokens)
        if not self.report.latent_shape:
            self.report.latent_shape = list(call.latent_shape)
        output = self.through(call, invoke)
        if self._check is not None and self.engagement(call).handles:
            self._watch.add(output)
        return output

    def through(self, call: Call, invoke: Callable[[Mapping[str, Any]], T]) -> T:
        """The same for a call that is no part of the sampling: it is not counted."""
        engagement = self._engagement(call)
        if self._check is not None and self._check.is_due(call, engagement):
            return self._compared(self._check, call, engagement, invoke)
        with engagement.around_call():
            return invoke(engagement.options)

    def engagement(self, call: Call) -> Engagement:
        """What is engaged, after a call of this denoiser."""
        return self._engagements[id(call.denoiser)]

    def _new_check(self) -> self_check.SelfCheck | None:
        wanted = self.request.self_check and not self.request.is_off
        if not wanted or self_check.NAME in disabled_features():
            return None
        return self_check.SelfCheck(self._engage, self._disengage)

    def _compared(
        self,
        check: self_check.SelfCheck,
        call: Call,
        engagement: Engagement,
        invoke: Callable[[Mapping[str, Any]], T],
    ) -> T:
        detected = detect_family(call.denoiser, self.request.families)
        assert detected is not None, "something engaged on a model of no known family"
        output: T
        output, now = check.compare(call, detected[0], engagement, invoke)
        if now is not engagement:
            self.publish("engaged", self._engaged_facts)
        return output

    def _engagement(self, call: Call) -> Engagement:
        with self._lock:
            found = self._engagements.get(id(call.denoiser))
            if found is None:
                found = self._engage(call)
                self.report.flags["during"] = describe(snapshot())
                self.report.model = found.model
                self.publish("engaged", self._engaged_facts)
            return found

    def _engage(self, call: Call, only: Sequence[str] | None = None) -> Engagement:
        """Install what the tier plans for `call.denoiser`, or of that the features in `only`."""
        # What is measured or compared draws random inputs; the sampler's numbers are not to
        # depend on that.
        devices = [call.device] if call.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            return self._engage_each(call, only)

    def _engage_each(self, call: Call, only: Sequence[str] | None) -> Engagement:
        request = self.request
        detected = detect_family(call.denoiser, request.families)
        engagement = Engagement(model_facts(call, detected, request.families))
        wanted = planned_features(request.resolved.tier, dict(request.switches), request.features)
        # Known to `close` from here on: an interrupt may come while the next one installs.
        self._engagements[id(call.denoiser)] = engagement
        dropped = self._dropped(call)
        for optimization in self.request.optimizations:
            name = optimization.name
            if name not in wanted:
                if self.request.switches.get(name) is Switch.OFF:
                    engagement.skip(optimization, "switched off in Speed Tier (Advanced)")
                continue
            if detected is None:
                engagement.skip(optimization, engagement.model.note)
            elif name in disabled_features():
                engagement.skip(optimization, "switched off by SPEED_TIER_DISABLE")
            elif name in dropped:
                reason = f"dropped by the self-check: {dropped[name]}"
                earlier = name in self._dropped_before[id(call.denoiser)]
                (engagement.skip if earlier else engagement.fell_back)(optimization, reason)
            elif only is None or name in only:
                ctx = self._context(call, detected, name, engagement.in_use())
                self._install(engagement, optimization, ctx)
        engagement.seal()
        return engagement

    def _dropped(self, call: Call) -> Mapping[str, str]:
        """What the self-check found at fault in this model, with the reasons."""
        if self._check is None:
            return {}
        known = self._known.setdefault(id(call.denoiser), self_check.known_of(call.denoiser))
        self._dropped_before.setdefault(id(call.denoiser), frozenset(known.dropped))
        return known.dropped

    def _disengage(self, engagement: Engagement) -> None:
        """Take everything out again in mid-run, the flags as well."""
        _take_out(engagement)
        for token in reversed(engagement.flag_tokens):
            self._let_go(token)
        engagement.flag_tokens.clear()
        self._retired.append(engagement)

    def _context(
        self, call: Call, detected: tuple[Family, str], name: str, engaged: tuple[str, ...]
    ) -> Context:
        family, stack = detected
        return Context(
            denoiser=call.denoiser,
            family=family,
            stack=stack,
            device=call.device,
            dtype=call.dtype,
            capabilities=capabilities(call.device),
            batch=call.latent_shape[0],
            image_tokens=family.tokens(call.latent_shape, 0),
            text_tokens=call.text_tokens,
            host=call.host,
            forced=self.request.switches.get(name) is Switch.ON,
            compiling=self._compiling,
            engaged=engaged,
        )

    def _install(self, engagement: Engagement, optimization: Optimization, ctx: Context) -> None:
        handle = None
        try:
            if reason := optimization.check(ctx):
                engagement.skip(optimization, reason)
                return
            handle = optimization.install(ctx)
            if handle.flags:
                engagement.flag_tokens.append(self._hold(FLAGS.acquire(handle.flags)))
        except Exception as error:
            if _is_interrupt(error):
                raise
            if handle is not None:
                handle.remove()
            log.warning("%s could not engage: %s", optimization.name, error)
            log.debug("%s failed", optimization.name, exc_info=True)
            said = " ".join(str(error).split())[:200]  # a compiler's goes over twenty lines
            engagement.skip(optimization, f"could not engage: {type(error).__name__}: {said}")
            return
        engagement.engaged(optimization, handle)

    def _hold(self, token: int) -> int:
        self._tokens.append(token)
        self._run_tokens.append(token)
        return token

    def _let_go(self, token: int) -> None:
        FLAGS.release(token)
        for tokens in (self._tokens, self._run_tokens):
            if token in tokens:
                tokens.remove(token)

    def _compiling(self, kind: str, index: int, count: int) -> None:
        self.publish("phase", {"phase": "compiling", "block": kind, "index": index, "count": count})

    def mark_loaded(self) -> None:
        self.clock.mark_loaded()

    def mark_step(self, step: int, total: int) -> None:
        """One sampling step is queued; `step` counts from 1.

        Raises:
            NotFiniteError: An earlier step gave values that are not finite, and the run can begin
                again.
        """
        self.clock.mark_step()
        compiles = sum(kind.compiles + kind.failed for kind in self._compiled().kinds)
        first = "" if self._step_marks else "warm-up"
        self._step_marks.append("compile" if compiles > self._compiles_seen else first)
        self._compiles_seen = compiles
        self.publish("step", lambda: self._step_facts(step, total))
        if self.can_begin_again and self._may_start_again() and self._watch.is_broken():
            raise NotFiniteError("a step gave values that are not finite")

    def _may_start_again(self) -> bool:
        """Whether values that are not finite would be worth a second try."""
        known = self._known.values()
        first = self._check is not None and not self._check.every_call
        return first and not any(one.off_not_finite for one in known)

    def ended_broken(self) -> bool:
        """Whether the last step is in and a step gave values that are not finite."""
        return self._may_start_again() and self._watch.ended_broken()

    def start_again(self) -> None:
        """The sampler begins again at its first step; now every call is compared with off."""
        assert self._check is not None
        facts = self._check.facts
        facts.restarts += 1
        facts.notes.append(
            "a step gave values that are not finite; the run began again from its first step, "
            "every call beside off"
        )
        self._check.every_call, self.can_begin_again = True, False
        if facts.unchecked:
            self._drop_everything(facts.unchecked)
        self._watch.forget()
        self._step_marks.clear()
        self.clock.start_again()

    def _drop_everything(self, unchecked: str) -> None:
        """Calls cannot be compared here, so nobody knows which feature it was."""
        reason = f"values that are not finite, where calls cannot be compared: {unchecked}"
        for number, engagement in self._engagements.items():
            self._known[number].dropped.update(dict.fromkeys(engagement.handles, reason))
            self._disengage(engagement)
        self._engagements.clear()

    def _engaged_facts(self) -> dict[str, Any]:
        return {
            "phase": "sampling",
            "features": self._outcomes(),
            "model": dataclasses.asdict(self.report.model),
            "shape": self.report.shape(),
        }

    def _step_facts(self, step: int, total: int) -> dict[str, Any]:
        return {
            "phase": "sampling",
            "step": step,
            "total": total,
            "timing": vars(self._timing(self.clock.steps_s(only_passed=True))),
            "compile": {"recompiles": self._compiled().recompiles},
        }

    def _timing(self, steps_s: list[float]) -> Timing:
        return Timing(
            load_s=self.clock.load_s,
            first_step_s=steps_s[0] if steps_s else None,
            first_step_tax_s=first_step_tax_s(steps_s),
            steps_s=steps_s,
            step_marks=self._step_marks[: len(steps_s)],
            steady_step_s=steady_step_s(steps_s),
            total_s=self.clock.total_s,
        )

    def _compiled(self) -> CompileFacts:
        return compile_facts([*self._retired, *self._engagements.values()])

    def close(self, outcome: str, error: str = "") -> Report:
        """End the run: undo everything in reverse, measure, file the report. Idempotent."""
        if self._closed:
            return self.report
        self._closed = True
        for engagement in self._engagements.values():
            _take_out(engagement)
        self.restore_flags()
        self.clock.finish()
        self._fill_report(outcome, error)
        self._engagements.clear()
        REPORTS.add(self.report)
        log.info("%s", self.report.log_line())
        self.publish("report", lambda: {**self.report.to_dict(), "text": self.report.to_text()})
        return self.report

    def restore_flags(self) -> None:
        """Give back every flag this run holds, newest first."""
        while self._run_tokens:
            self._let_go(self._run_tokens[-1])

    def _outcomes(self) -> list[dict[str, str]]:
        return [
            {"name": o.name, "state": o.state.value, "reason": o.reason, "fidelity": o.fidelity}
            for engagement in self._engagements.values()
            for o in engagement.outcomes
        ]

    def _fill_report(self, outcome: str, error: str) -> None:
        report, clock = self.report, self.clock
        report.outcome, report.error = outcome, error
        report.steps = clock.step_count
        report.timing = self._timing(clock.steps_s())
        for engagement in self._engagements.values():
            report.model = engagement.model
            report.features = engagement.settled()
            for handle in engagement.handles.values():
                report.graphs = handle.graph_facts() or report.graphs
        report.compile = self._compiled()
        if self._check is not None:
            report.check = self._check.facts
        report.flags["after"] = describe(snapshot())
        if clock.device.type == "cuda" and torch.cuda.is_available():
            report.peak_bytes = self._peak_bytes(clock.device)
        report.speedup_against_off = REPORTS.speedup_against_off(report)
        report.payback_images = REPORTS.payback_images(report)
        report.notices = report.find_notices()

    def _peak_bytes(self, device: torch.device) -> int:
        handles = [h for e in self._engagements.values() for h in e.handles.values()]
        counted = max([torch.cuda.max_memory_allocated(device), *(h.peak_bytes for h in handles)])
        return counted + sum(handle.uncounted_bytes for handle in handles)


def _take_out(engagement: Engagement) -> None:
    for name, handle in reversed(engagement.handles.items()):
        try:
            handle.remove()
        except Exception:  # the flags and the other handles still have to go back
            log.exception("%s could not be taken out", name)


def _is_interrupt(error: Exception) -> bool:
    # By name: one host's interrupt is an Exception, and this module imports no host.
    return type(error).__name__ == "InterruptProcessingException"
