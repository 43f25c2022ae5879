"""One CUDA graph a signature in place of thousands of launches.

Changes: a denoiser call that looks like an earlier one is replayed from a graph.
Faster because: the host's Python and the launches of every kernel are paid once.
Fidelity: bit-identical, compared with the call it was captured from and, on other inputs, with
the call that its first replay takes the place of.
Process-wide: nothing; graphs hold device memory until the model unloads or its weights change.
Declines: per call, on anything a graph cannot follow (control, patches, hooks, weights off the
card, wrappers of others); per signature, where it does not measure faster.

A signature is captured at its second call: the first one compiles kernels and picks algorithms,
the second is measured. Where the card is busy all the time a graph gains a few percent only, so
that such a signature waits until a second run has asked for it.

Compiled blocks and `cudaMallocAsync` do not go together in a capture. There the blocks are captured
as they are without the compiler, and the faster of the two is used.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..crash_canary import CrashCanary
from ..cuda_graph import (
    Captured,
    NotCapturableError,
    Rehearsal,
    Timed,
    flatten,
    with_tensors,
)
from ..env import capabilities
from ..flags import describe, snapshot
from ..patching import Patch, foreign
from ..probe import Measurements
from ..report import GraphFacts
from . import call_mode, dynamo
from .base import Context, Fidelity, Handle
from .graph_rules import Weights, options_signature, sizeless
from .graph_store import Entry, GraphConfig, GraphStore
from .regional_compile import comparison_key

log = logging.getLogger("speed_tier.graph_capture")

_OPTIONS: Final = "transformer_options"
# The first calls of compiled code are slower than the later ones, and here two different things are
# compared.
_COMPILED_CALLS: Final = 4
# Free memory that has to be left beside the graphs.
_RESERVE_BYTES: Final = 1 << 30
_NO_ROOM: Final = "not enough free memory for a graph"  # asked again in every run


class GraphedForward:
    """Stands in for a denoiser's forward during one run."""

    def __init__(self, context: Context, store: GraphStore) -> None:
        self.counts: Counter[str] = Counter()
        self.replayed = 0
        self.captured: list[Entry] = []
        self.wrong = ""
        self.peak_bytes = 0
        self.settling = False  # the next call of the same kind sets something up
        self._own: Entry | None = None  # of the run's first call
        self._denoiser = context.denoiser
        self._device = context.device
        self._host = context.host
        self._store = store
        store.runs += 1
        self._run = store.runs
        self._config = store.config
        self._weights: Weights | None = None
        self._away: str | None = None
        self._compiled = "regional_compile" in context.engaged
        attention = context.host.attention_in_use
        self._state = (context.engaged, repr(describe(snapshot())), context.dtype, attention)
        self._is_cancelled = context.host.check_interrupt or (lambda: None)
        self._canary = CrashCanary(context.host.state_folder)
        self._measurements = Measurements(context.host.state_folder)
        # Compiled blocks and fused ones are compared by the way; the figures outlive the process.
        both = self._without_compiler() and "eager_patches" in context.engaged
        self._comparison = comparison_key(context) if both else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._store.lock.acquire(blocking=False):
            return self._uncaptured("another thread runs this model", args, kwargs)
        try:
            try:
                return self._call(args, kwargs)
            except torch.OutOfMemoryError:
                if not self._store.graphs():
                    raise
            log.warning("out of memory: the graphs go, the call is repeated")
            self._store.drop()
            return self._plain(*args, **kwargs)
        finally:
            self._store.lock.release()

    def _call(self, args: Any, kwargs: Any) -> Any:
        self.settling = False
        if self._weights is None:  # at the first call: the stand-ins of other packs' layers are in
            self._weights = Weights(self._denoiser)
        tensors: list[Tensor] = []
        try:
            signature = self._signature(self._weights, args, kwargs, tensors)
        except NotCapturableError as reason:
            return self._uncaptured(str(reason), args, kwargs)
        if not self._store.follow(self._weights.addresses()) or self._away is None:
            self._away = self._weights.away(self._device)
        if problem := self._away or self._store.wrong:
            return self._uncaptured(problem, args, kwargs)
        entry = self._store.entry(signature)
        if self._own is None:
            self._own = entry
        if entry.captured is not None:
            return self._replayed(entry, entry.captured, tensors, args, kwargs)
        if entry.reason == _NO_ROOM and entry.last_run != self._run:
            entry.reason = ""
        if entry.reason:
            return self._uncaptured(entry.reason, args, kwargs)
        if entry.last_run != self._run:
            entry.last_run, entry.runs = self._run, entry.runs + 1
        entry.calls += 1
        # Measured once; where the card turned out to be busy, again in a second run.
        if entry.calls == 1 or (entry.busy and entry.runs < 2):
            self.settling = entry.calls == 1
            return self._uncaptured("first calls of a size", args, kwargs)
        return self._measured(signature, entry, tensors, args, kwargs)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        if (theirs := foreign(self._denoiser, "forward")) is not None:  # since the run began
            return theirs(*args, **kwargs)
        return type(self._denoiser).forward(self._denoiser, *args, **kwargs)

    def _uncaptured(self, reason: str, args: Any, kwargs: Any) -> Any:
        self.counts[reason] += 1
        return self._plain(*args, **kwargs)

    def _signature(
        self, weights: Weights, args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> Hashable:
        if torch.is_grad_enabled():
            raise NotCapturableError("gradients are on")
        if torch.is_autocast_enabled(self._device.type):
            raise NotCapturableError("autocast is on")
        if problem := weights.problem_now():
            raise NotCapturableError(problem)
        parts: list[Hashable] = [self._state, torch.is_inference_mode_enabled()]
        for index, value in enumerate(args):
            parts.append(flatten(value, f"argument {index}", tensors))
        for name, value in sorted(kwargs.items()):
            if name == _OPTIONS:
                parts.append(options_signature(value))
            elif name == "control" and value is not None:
                raise NotCapturableError("a ControlNet is applied")
            else:
                parts.append((name, flatten(value, name, tensors)))
        if away := {str(t.device) for t in tensors if t.device != self._device}:
            raise NotCapturableError(f"an argument is on {', '.join(sorted(away))}")
        return tuple(parts)

    def _replayed(
        self, entry: Entry, captured: Captured, tensors: list[Tensor], args: Any, kwargs: Any
    ) -> Any:
        self._is_cancelled()  # raises; a replay passes none of the places where the host asks
        self.replayed += 1
        if entry.graph_ms:
            return captured.replay(tensors)
        timed = self._timed(lambda: captured.replay(tensors))
        # The inputs have changed since the capture: what was not copied into the graph shows now.
        with call_mode.eager_blocks(self._without_compiler()):
            expected = self._plain(*args, **kwargs)
        if not _same(timed.output, expected):
            log.warning("a replayed CUDA graph gave another output than its call; none is used")
            self.wrong = self._store.wrong = "a replay did not give what the call itself gives"
            self._store.drop()
            return expected
        entry.graph_ms = timed.ms
        if self._comparison and entry is self._own:  # the key is that of the run's first size
            self._measurements.put(self._comparison, entry.before_ms, timed.ms)
        if entry.before_ms < self._config.min_gain * timed.ms:
            entry.captured = None
            entry.reason = f"does not pay: {timed.ms:.1f} ms with, {entry.before_ms:.1f} without"
            captured.release()
            self._config.recorder.trim(self._device)
        return timed.output

    def _timed(self, call: Callable[[], Any]) -> Timed:
        recorder = self._config.recorder
        self.peak_bytes = max(self.peak_bytes, recorder.peak_bytes(self._device))
        return recorder.timed(call, self._device)

    def _measured(
        self, signature: Hashable, entry: Entry, tensors: list[Tensor], args: Any, kwargs: Any
    ) -> Any:
        timed = self._timed(lambda: self._plain(*args, **kwargs))
        entry.measured += 1
        entry.before_ms = min(entry.before_ms or timed.ms, timed.ms)
        if timed.issue_ms < self._config.busy * timed.ms:
            entry.busy = True
            if entry.runs < 2:
                self.counts["the card is busy without one; a second run of this size decides"] += 1
                return timed.output
        if self._without_compiler() and entry.measured < _COMPILED_CALLS:
            self.counts["first calls of a size"] += 1
            self.settling = True
            return timed.output
        captured, entry.reason = self._capture(sizeless(signature), timed, tensors, args, kwargs)
        self.counts[entry.reason or "captured"] += 1
        if captured is not None:
            entry.captured = captured
            self.captured.append(entry)
            self.settling = True  # the first replay is timed and compared
        return timed.output

    def _without_compiler(self) -> bool:
        """Whether compiled blocks have to be captured as they are without the compiler."""
        return self._compiled and self._config.recorder.is_strict()

    def _capture(
        self, structure: Hashable, timed: Timed, tensors: list[Tensor], args: Any, kwargs: Any
    ) -> tuple[Captured | None, str]:
        """A graph of the call that `timed` measured, or None and why there is none."""
        assert self._weights is not None
        recorder, store = self._config.recorder, self._store
        strict = recorder.is_strict()
        crash_key = self._crash_key(tensors)
        if strict and self._canary.crashed(crash_key):
            return None, "an earlier process ended while it captured this"
        spare = self._host.spare_bytes() if self._host.spare_bytes is not None else None
        if spare is not None and spare < timed.peak_bytes + _RESERVE_BYTES:
            return None, _NO_ROOM
        without_compiler = self._without_compiler()

        def call(static: Sequence[Tensor]) -> Any:
            feed = iter(static)
            new_args = [with_tensors(value, feed) for value in args]
            new_kwargs = dict(kwargs)
            for name, value in sorted(kwargs.items()):
                if name != _OPTIONS:
                    new_kwargs[name] = with_tensors(value, feed)
            return self._plain(*new_args, **new_kwargs)

        expected = timed.output
        inputs = recorder.static_copies(tensors)
        with call_mode.eager_blocks(without_compiler):
            external = store.rehearsed.get(structure)
            if external is None or self._compiled:
                rehearsal = self._rehearse(call, inputs, self._compiled and not without_compiler)
                if rehearsal.problem:
                    return None, rehearsal.problem
                external = store.rehearsed[structure] = rehearsal.external
                if without_compiler:
                    expected = rehearsal.output
            store.make_room()
            keep = [*external, *self._weights.adapters()]
            watching = self._canary.watching(crash_key) if strict else contextlib.nullcontext()
            try:
                with call_mode.uninterrupted(self._host.hold_interrupts), watching:
                    captured, output = recorder.capture(call, inputs, self._device, keep, expected)
            except RuntimeError as error:
                recorder.trim(self._device)
                return None, f"could not be captured: {_first_line(error)}"
        if not _same(output, expected):
            log.warning("a CUDA graph gave another output than its call; it is not used")
            captured.release()
            recorder.trim(self._device)
            return None, "its output is not that of the call it was captured from"
        return captured, ""

    def _rehearse(
        self, call: Callable[[Sequence[Tensor]], Any], inputs: list[Tensor], compiled: bool
    ) -> Rehearsal:
        assert self._weights is not None
        known = [*inputs, *self._weights.tensors()]
        recorder = self._config.recorder
        try:
            if self._compiled:  # what is new, to a compiler or a kernel, is built before
                call(inputs)
            before = dynamo.graph_count() if compiled else 0
            rehearsal = recorder.rehearse(lambda: call(inputs), self._device, known, compiled)
            if compiled and not rehearsal.problem and dynamo.graph_count() != before:
                rehearsal.problem = "the compiler is not done with this size"
        except RuntimeError as error:  # the call itself has just gone well
            return Rehearsal(None, f"could not be rehearsed: {_first_line(error)}")
        return rehearsal

    def _crash_key(self, tensors: list[Tensor]) -> str:
        card = capabilities(self._device)
        shapes = [(tuple(t.shape), str(t.dtype)) for t in tensors]
        name = type(self._denoiser).__name__
        return f"{card.device_name} {card.torch_version} {name} {self._state[0]} {shapes}"

    def finish(self) -> None:
        """The run has ended: graphs stay only where memory is to spare."""
        spare = self._host.spare_bytes
        if self._store.graphs() and spare is not None and spare() < _RESERVE_BYTES:
            self._store.drop()


def _first_line(error: RuntimeError) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _same(first: Any, second: Any) -> bool:
    leaves = [pytree.tree_leaves(value) for value in (first, second)]
    if len(leaves[0]) != len(leaves[1]):
        return False
    pairs = zip(*leaves, strict=True)
    return all(_same_bits(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # A NaN is not equal to itself, but a graph that gives the call's own is no other.
    if torch.equal(a, b):
        return True
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@dataclass
class _GraphHandle(Handle):
    forward: GraphedForward | None = None
    store: GraphStore | None = None

    @property
    def settling(self) -> bool:
        return self.forward is not None and self.forward.settling

    def graph_facts(self) -> GraphFacts:
        assert self.forward is not None and self.store is not None
        return GraphFacts(
            captured=len(self.forward.captured),
            replayed=self.forward.replayed,
            kept=self.store.graphs(),
            pool_bytes=self.store.pool_bytes(),
            not_replayed=dict(self.forward.counts),
        )

    def remove(self) -> None:
        if self.forward is None or self.store is None:
            return
        self._explain(self.forward)
        self.fell_back = self.forward.wrong
        self.peak_bytes = self.forward.peak_bytes
        # Under cudaMallocAsync a graph's memory is the driver's, and its own.
        if self.store.graphs() and self.store.config.recorder.is_strict():
            self.uncounted_bytes = self.store.pool_bytes()
        self.forward.finish()

    def _explain(self, forward: GraphedForward) -> None:
        parts = [f"{forward.replayed} calls replayed"]
        parts += [
            f"captured one: {entry.graph_ms:.1f} ms a call, {entry.before_ms:.1f} without"
            for entry in forward.captured
            if entry.captured is not None and entry.graph_ms
        ]
        counts = {reason: n for reason, n in forward.counts.items() if reason != "captured"}
        parts += [f"{n} not: {reason}" for reason, n in counts.items()]
        self.note = "; ".join(parts)
        if not forward.replayed and not forward.captured:
            self.not_used = "; ".join(counts)


_kept: Final[weakref.WeakKeyDictionary[nn.Module, GraphStore]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class GraphCapture:
    name: ClassVar[str] = "graph_capture"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    config: GraphConfig = field(default_factory=GraphConfig)

    def check(self, context: Context) -> str | None:
        if problem := self.config.recorder.refusal(context.device):
            return problem
        if context.host.dynamic_vram:
            return "dynamic VRAM moves weights between calls"
        if context.host.compiled_by:
            return f"{context.host.compiled_by} compiles this model"
        kept = _kept.get(context.denoiser)
        if kept is not None and kept.wrong:
            return f"dropped for this model: {kept.wrong}"
        return Weights(context.denoiser).problem_of_run(context.device) or None

    def install(self, context: Context) -> Handle:
        store = _kept.get(context.denoiser)
        if store is None or store.config != self.config or store.device != context.device:
            if store is not None:
                store.drop()
            store = _kept[context.denoiser] = GraphStore(self.config, context.device)
        forward = GraphedForward(context, store)
        patches = [Patch(context.denoiser, "forward", forward)]
        return _GraphHandle(patches=patches, forward=forward, store=store)

    def release(self, denoiser: nn.Module) -> None:
        store = _kept.pop(denoiser, None)
        if store is not None:
            store.drop()
