"""The main path: a tier becomes an ordered list of optimizations, engaged for one run.

A `TieredModel` is one tier as applied to one model clone. Each sampling run opens a `Run`. At the
first denoiser call, when the weights are loaded, the run

    1. recognises the family,
    2. takes the plan from the tier,
    3. checks and installs each optimization in order, acquiring its process-wide flags,
    4. and from then on wraps every call: patches in, call, patches out.

When the run ends everything is undone in reverse and what was measured becomes the report.

Flags are not set before that first call on purpose: the host merges LoRA weights while it loads,
and a merge under TF32 would stay in the weights after the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from .env import capabilities, disabled_features, versions
from .families import detect_family, not_ours
from .families.base import Family
from .flags import FLAGS, describe, snapshot
from .optimizations import OPTIMIZATIONS
from .optimizations.base import Context, Handle, HostFacts, Optimization
from .patching import PatchSet
from .report import REPORTS, CompileFacts, FeatureOutcome, ModelFacts, Report, State, Timing
from .tiers import ResolvedTier, Switch, Tier, planned_features
from .timing import StepClock, first_step_tax_s, steady_step_s

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
    """

    resolved: ResolvedTier
    switches: Mapping[str, Switch] = field(default_factory=dict)
    optimizations: tuple[Optimization, ...] = OPTIMIZATIONS

    @property
    def is_off(self) -> bool:
        return self.resolved.tier is Tier.OFF and Switch.ON not in self.switches.values()


@dataclass(frozen=True)
class Call:
    """One denoiser call, as the host hands it over.

    Attributes:
        denoiser: The transformer about to be called.
        device: Where it computes.
        dtype: Dtype of its activations.
        latent_shape: (B, C, [T,] H, W).
        text_tokens: Length of the text condition.
        host: What only the host knows.
    """

    denoiser: nn.Module
    device: torch.device
    dtype: torch.dtype
    latent_shape: tuple[int, ...]
    text_tokens: int = 0
    host: HostFacts = field(default_factory=HostFacts)


@dataclass
class Engagement:
    """What is installed for one denoiser in one run."""

    handles: dict[str, Handle]
    outcomes: list[FeatureOutcome]
    model: ModelFacts
    patches: PatchSet
    options: dict[str, Any]

    @contextlib.contextmanager
    def around_call(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for handle in self.handles.values():
                stack.enter_context(handle.scope())
            stack.enter_context(self.patches)
            yield


class TieredModel:
    """One tier as applied to one model clone. Lives in the clone's wrappers, holds no model."""

    def __init__(self, request: TierRequest) -> None:
        self.request = request
        self._tokens: list[int] = []
        # The clone may be dropped without a word from the host; its flags must not outlive it.
        weakref.finalize(self, _release_tokens, self._tokens)

    def begin(self, report: Report, device: torch.device, publish: Publish | None = None) -> Run:
        """Open a sampling run. The caller closes it in `finally`."""
        return Run(self.request, self._tokens, report, device, publish or _nobody)

    def new_report(self) -> Report:
        resolved, switches = self.request.resolved, self.request.switches
        reason = resolved.reason
        if on := [name for name, switch in switches.items() if switch is Switch.ON]:
            reason += f", with {', '.join(on)} switched on"
        report = Report(resolved.asked, resolved.tier.value, reason, versions=versions())
        known = {optimization.name for optimization in self.request.optimizations}
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
        engagement = self._engagement(call)
        with engagement.around_call():
            return invoke(engagement.options)

    def _engagement(self, call: Call) -> Engagement:
        with self._lock:
            found = self._engagements.get(id(call.denoiser))
            if found is None:
                # What is measured or compared draws random inputs; the sampler's numbers are not
                # to depend on that.
                devices = [call.device] if call.device.type == "cuda" else []
                with torch.random.fork_rng(devices=devices):
                    found = self._engagements[id(call.denoiser)] = self._engage(call)
                self.report.flags["during"] = describe(snapshot())
                self.report.model = found.model
                self.publish("engaged", self._engaged_facts)
            return found

    def _engage(self, call: Call) -> Engagement:
        detected = detect_family(call.denoiser)
        model = _model_facts(call, detected)
        wanted = planned_features(self.request.resolved.tier, dict(self.request.switches))
        engagement = Engagement({}, [], model, PatchSet(()), {})
        # Known to `close` from here on: an interrupt may come while the next one installs.
        self._engagements[id(call.denoiser)] = engagement
        for optimization in self.request.optimizations:
            name = optimization.name
            if name not in wanted:
                if self.request.switches.get(name) is Switch.OFF:
                    _skip(engagement, optimization, "switched off in Speed Tier (Advanced)")
                continue
            if detected is None:
                _skip(engagement, optimization, model.note)
            elif name in disabled_features():
                _skip(engagement, optimization, "switched off by SPEED_TIER_DISABLE")
            else:
                ctx = self._context(call, detected, name, tuple(engagement.handles))
                self._install(engagement, optimization, ctx)
        handles = engagement.handles.values()
        engagement.patches = PatchSet([patch for handle in handles for patch in handle.patches])
        engagement.options = {k: v for handle in handles for k, v in handle.options.items()}
        return engagement

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
                _skip(engagement, optimization, reason)
                return
            handle = optimization.install(ctx)
            if handle.flags:
                self._hold(FLAGS.acquire(handle.flags))
        except Exception as error:
            if _is_interrupt(error):
                raise
            if handle is not None:
                handle.remove()
            log.warning("%s could not engage: %s", optimization.name, error)
            log.debug("%s failed", optimization.name, exc_info=True)
            said = " ".join(str(error).split())[:200]  # a compiler's goes over twenty lines
            _skip(engagement, optimization, f"could not engage: {type(error).__name__}: {said}")
            return
        engagement.handles[optimization.name] = handle
        engagement.outcomes.append(
            FeatureOutcome(optimization.name, State.ENGAGED, fidelity=optimization.fidelity.value)
        )

    def _hold(self, token: int) -> None:
        self._tokens.append(token)
        self._run_tokens.append(token)

    def _compiling(self, kind: str, index: int, count: int) -> None:
        self.publish("phase", {"phase": "compiling", "block": kind, "index": index, "count": count})

    def mark_loaded(self) -> None:
        self.clock.mark_loaded()

    def mark_step(self, step: int, total: int) -> None:
        """One sampling step is queued; `step` counts from 1."""
        self.clock.mark_step()
        compiles = sum(kind.compiles + kind.failed for kind in self._compiled().kinds)
        first = "" if self._step_marks else "warm-up"
        self._step_marks.append("compile" if compiles > self._compiles_seen else first)
        self._compiles_seen = compiles
        self.publish("step", lambda: self._step_facts(step, total))

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
        facts = CompileFacts()
        for engagement in self._engagements.values():
            for handle in engagement.handles.values():
                if (more := handle.compile_facts()) is not None:
                    facts = _joined(facts, more)
        return facts

    def close(self, outcome: str, error: str = "") -> Report:
        """End the run: undo everything in reverse, measure, file the report. Idempotent."""
        if self._closed:
            return self.report
        self._closed = True
        for engagement in self._engagements.values():
            for name, handle in reversed(engagement.handles.items()):
                try:
                    handle.remove()
                except Exception:  # the flags and the other handles still have to go back
                    log.exception("%s could not be taken out", name)
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
            token = self._run_tokens.pop()
            FLAGS.release(token)
            if token in self._tokens:
                self._tokens.remove(token)

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
            report.features = _settled(engagement)
            for handle in engagement.handles.values():
                report.graphs = handle.graph_facts() or report.graphs
        report.compile = self._compiled()
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


_numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count(1)


def _model_number(denoiser: nn.Module) -> int:
    if denoiser not in _numbers:
        _numbers[denoiser] = next(_next_number)
    return _numbers[denoiser]


def _model_facts(call: Call, detected: tuple[Family, str] | None) -> ModelFacts:
    facts = ModelFacts(
        class_name=type(call.denoiser).__name__,
        dtype=str(call.dtype).removeprefix("torch."),
        device=str(call.device),
        compiled_by=call.host.compiled_by,
        number=_model_number(call.denoiser),
    )
    if detected is None:
        facts.note = not_ours(call.denoiser)
    else:
        facts.family, facts.stack = detected[0].name, detected[1]
    return facts


def _skip(engagement: Engagement, optimization: Optimization, reason: str) -> None:
    engagement.outcomes.append(
        FeatureOutcome(
            optimization.name, State.SKIPPED, reason=reason, fidelity=optimization.fidelity.value
        )
    )


def _settled(engagement: Engagement) -> list[FeatureOutcome]:
    """Outcomes with what became known while the run went on."""
    for outcome in engagement.outcomes:
        handle = engagement.handles.get(outcome.name)
        if handle is None:
            continue
        outcome.note = handle.note
        if handle.fell_back:
            outcome.state, outcome.reason = State.FELL_BACK, handle.fell_back
        elif handle.not_used:
            outcome.state, outcome.reason = State.SKIPPED, handle.not_used
    return engagement.outcomes


def _joined(first: CompileFacts, second: CompileFacts) -> CompileFacts:
    breaks = dict(first.graph_breaks)
    for reason, count in second.graph_breaks.items():
        breaks[reason] = breaks.get(reason, 0) + count
    return CompileFacts(
        kinds=first.kinds + second.kinds,
        graphs=first.graphs + second.graphs,
        recompiles=first.recompiles + second.recompiles,
        graph_breaks=breaks,
        seconds=first.seconds + second.seconds,
    )


def _is_interrupt(error: Exception) -> bool:
    # By name: one host's interrupt is an Exception, and this module imports no host.
    return type(error).__name__ == "InterruptProcessingException"
