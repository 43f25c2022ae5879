"""The first call of a signature beside the untiered path; every later one watched for NaN.

The untiered forward runs once with every block computed twice on the same input: as it is, and
with everything engaged. Errors then do not add up over the depth, and each block is judged by
itself: by its distance, by the distance relative to what the block adds to its input, and by its
scale, which rounding does not change. Then the whole forward is compared.

What is further off than speed/bounds.py allows has a cause among the engaged features. It is
found by bisection, with the same input, and dropped for this model; the caller gets the untiered
output of that call.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .bounds import CheckBounds, check_bounds
from .engagement import Call, Engagement, compile_facts
from .errors import is_out_of_memory
from .families.base import Family, RepeatedBlock
from .flags import FLAGS
from .patching import Patch, PatchSet, foreign
from .report import CheckFacts

T = TypeVar("T")
Invoke = Callable[[Mapping[str, Any]], Any]

NAME: Final = "self_check"
_OPTIONS: Final = "transformer_options"
_TEXT_APART: Final = 256  # prompts nearer than that in length are one signature
_TRANSIENT: Final = 2  # bad comparisons that do not repeat, before everything is dropped
_MASSIVE: Final = 10  # times the mean of the absolute values
# What the weights of a LoRA reach as new code, not only as other numbers.
_LORA_CODE: Final = frozenset({"gguf_dequant", "dequant_cache", "fused_qkv", "regional_compile"})
_OUTPUT: Final = "the whole forward"


@dataclass
class Known:
    """What the checks of one denoiser have shown, in this process.

    Attributes:
        passed: Signatures that were compared and found right.
        dropped: Features that were not, with the reason.
        off_not_finite: Untiered calls give non-finite values as well: nothing to start again for.
        transient: Bad comparisons that did not repeat.
    """

    passed: set[Hashable] = field(default_factory=set)
    dropped: dict[str, str] = field(default_factory=dict)
    off_not_finite: bool = False
    transient: int = 0


_known: Final[weakref.WeakKeyDictionary[nn.Module, Known]] = weakref.WeakKeyDictionary()


def known_of(denoiser: nn.Module) -> Known:
    """Kept over unloads, as the code that was checked is; goes with the model."""
    found = _known.get(denoiser)
    if found is None:
        found = _known[denoiser] = Known()
    return found


@dataclass(frozen=True)
class Deviation:
    """One tensor of the tiered path beside the untiered one's.

    Attributes:
        place: Path of the block, or the whole forward.
        error: |tiered - off|, Frobenius.
        size: |off|.
        update: |off - input| for a block, |off| for the whole forward.
        gain: How much larger in scale, less one; over the elements of ordinary size, as a massive
            one's rounding would be all there is to see.
        broken: Elements that are finite in off and not in tiered.
        off_broken: Elements that are not finite in off.
    """

    place: str
    error: float
    size: float
    update: float
    gain: float
    broken: float
    off_broken: float

    @property
    def relative(self) -> float:
        return self.error / self.size if self.size else 0.0

    def problem(self, bounds: CheckBounds) -> str:
        """Why the tiered tensor is not what rounding makes of off's, or ""."""
        if self.broken:
            return f"{self.place} has {self.broken:.0f} values that are not finite, off has none"
        if self.off_broken:
            return ""  # off itself is lost here, and distances with it
        if not self.size:
            return f"{self.place} is not zero as off's is" if self.error else ""
        if self.place == _OUTPUT:
            if self.relative > bounds.output:
                return f"{self.place} is {self.relative:.2%} from off's"
            return ""
        if self.error > bounds.stream * self.size + bounds.update * self.update:
            return f"{self.place} is {self.relative:.2%} from off's"
        if abs(self.gain) > bounds.gain:
            return f"{self.place} is {1 + self.gain:.4f} times off's"
        return ""


class Comparison:
    """Distances, measured on the device and read once."""

    def __init__(self) -> None:
        self._places: list[str] = []
        self._figures: list[Tensor] = []

    def add(self, place: str, got: Any, expected: Any, given: Any = ()) -> None:
        """Compare two outputs of one call; `given` are the call's arguments."""
        inputs = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        pairs = itertools.zip_longest(pytree.tree_leaves(got), pytree.tree_leaves(expected))
        for tiered, off in pairs:
            if isinstance(off, Tensor) and off.is_floating_point():
                where = place
                if not isinstance(tiered, Tensor) or tiered.shape != off.shape:
                    where, tiered = f"{place}, of another shape,", torch.full_like(off, torch.nan)
                alike = [i for i in inputs if i.shape == off.shape]
                self._places.append(where)
                self._figures.append(_figures(tiered, off, alike))

    def deviations(self) -> list[Deviation]:
        """What was added since the last time. Waits for the device."""
        rows = torch.stack(self._figures).cpu().tolist() if self._figures else []
        found = [Deviation(place, *row) for place, row in zip(self._places, rows, strict=True)]
        self._places, self._figures = [], []
        return found


def _figures(tiered: Tensor, off: Tensor, inputs: list[Tensor]) -> Tensor:
    r = off.float()
    r_finite = torch.isfinite(r)
    d = tiered.float() - r
    broken = (r_finite & ~torch.isfinite(d)).sum()
    # Two streams may be of one length: a block's output is nearest to its own.
    update = [(r - given.float()).norm() for given in inputs]
    u = torch.stack(update).min() if update else r.norm()
    ordinary = torch.where(r.abs() <= _MASSIVE * r.abs().mean(), r, 0)
    gain = (d * ordinary).sum() / (ordinary * ordinary).sum().clamp_min(1e-30)
    numbers = [d.norm(), r.norm(), u, gain, broken, (~r_finite).sum()]
    return torch.stack([number.double() for number in numbers])


class _Pair:
    """Stands in for one block in the untiered forward: computes it both ways, gives off's."""

    def __init__(
        self, block: RepeatedBlock, engagement: Engagement, comparison: Comparison, flags: _AsFound
    ) -> None:
        self._place = block.path
        self._block = block.module
        self._engagement = engagement
        self._comparison = comparison
        self._flags = flags
        self.patches = PatchSet([Patch(block.module, "forward", self)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        theirs = foreign(self._block, "forward")
        if theirs is not None:
            expected = theirs(*args, **kwargs)
        else:
            expected = type(self._block).forward(self._block, *args, **kwargs)
        tiered = dict(kwargs)
        if self._engagement.options and _OPTIONS in kwargs:
            tiered[_OPTIONS] = {**(kwargs[_OPTIONS] or {}), **self._engagement.options}
        with self._aside(), self._flags.tiered(), self._engagement.around_call():
            got = self._block.forward(*args, **tiered)
        self._comparison.add(self._place, got, expected, (args, kwargs))
        return expected

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        self.patches.__exit__()  # what stands in for the block now builds on what is beneath it
        try:
            yield
        finally:
            self.patches.__enter__()


class _AsFound:
    """The process-wide flags as they were found, and in between as the tier has them."""

    def __init__(self) -> None:
        self._token = 0

    def __enter__(self) -> _AsFound:
        self._token = FLAGS.suspend()
        return self

    def __exit__(self, *_: object) -> None:
        FLAGS.release(self._token)

    @contextlib.contextmanager
    def tiered(self) -> Iterator[None]:
        FLAGS.release(self._token)
        try:
            yield
        finally:
            self._token = FLAGS.suspend()


class SelfCheck:
    """The checks of one run.

    Args:
        engage: Installs the named features only, for one call's denoiser.
        disengage: Takes such an engagement out again.
    """

    def __init__(
        self,
        engage: Callable[[Call, Sequence[str] | None], Engagement],
        disengage: Callable[[Engagement], None],
    ) -> None:
        self.facts = CheckFacts()
        self.every_call = False
        self._engage = engage
        self._disengage = disengage

    def is_due(self, call: Call, engagement: Engagement) -> bool:
        """Whether this call has to be compared with the untiered path."""
        if not engagement.in_use():
            return False
        reason = call.host.participant
        if call.host.compiled_by:  # its compiler would trace what stands in for the blocks
            reason = f"{call.host.compiled_by} compiles this model"
        if reason:
            self.facts.unchecked = reason
            return False
        passed = known_of(call.denoiser).passed
        return self.every_call or _signature(call, engagement) not in passed

    def compare(
        self, call: Call, family: Family, engagement: Engagement, invoke: Invoke
    ) -> tuple[Any, Engagement]:
        """One call both ways.

        Returns:
            Its output, which is right, and what is engaged from here on.
        """
        started, known = time.perf_counter(), known_of(call.denoiser)
        compiled_s = compile_facts([engagement]).seconds
        try:
            if call.host.dynamic_vram:
                invoke({})  # a weight's first use there may round otherwise than all later ones
            both = self._with_memory(call, lambda: self._both(call, family, engagement, invoke))
            if both is not None and not both[2]:
                known.passed.add(_signature(call, engagement))
                known.transient = 0
                return both[1], engagement
            if both is not None:
                return both[0], self._blamed(call, family, engagement, invoke, both[2])
        finally:
            spent_s = time.perf_counter() - started
            # What was compiled on the way would have been in any case.
            compiled_s = compile_facts([engagement]).seconds - compiled_s
            self.facts.seconds += max(0.0, spent_s - compiled_s)
        # Room for the tier alone is all that was asked for.
        self.facts.unchecked = "not enough memory to run both ways"
        known.passed.add(_signature(call, engagement))
        with engagement.around_call():
            return invoke(engagement.options), engagement

    def _with_memory(self, call: Call, work: Callable[[], T]) -> T | None:
        """What `work` gives, or None where memory ran out and the model is fit for a next call."""
        try:
            return work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if call.host.after_out_of_memory is not None:
            call.host.after_out_of_memory(call.denoiser)
        return None

    def _both(
        self, call: Call, family: Family, engagement: Engagement, invoke: Invoke
    ) -> tuple[Any, Any, str]:
        """Off's output, the tier's, and what is wrong with the latter.

        A tier with a block at fault is not run as a whole: its output is None.
        """
        comparison = Comparison()
        tf32, quantised = "tf32" in engagement.handles, _quantises(call.denoiser)
        bounds = check_bounds(call.dtype, tf32, quantised)
        with contextlib.ExitStack() as stack:
            flags = stack.enter_context(_AsFound())
            for block in family.repeated_blocks(call.denoiser):
                pair = _Pair(block, engagement, comparison, flags)
                stack.enter_context(pair.patches)
            off = invoke({})
        self.facts.calls += 1
        if problem := self._judged(call, comparison.deviations(), bounds):
            return off, None, problem
        with engagement.around_call():
            output = invoke(engagement.options)
        comparison.add(_OUTPUT, output, off)
        return off, output, self._judged(call, comparison.deviations(), bounds)

    def _judged(self, call: Call, deviations: list[Deviation], bounds: CheckBounds) -> str:
        """The first problem among them, or ""; all of them go into the facts."""
        facts = self.facts
        for one in deviations:
            if one.place == _OUTPUT:
                facts.output_error = max(facts.output_error, one.relative)
                if one.off_broken:
                    known_of(call.denoiser).off_not_finite = True
            else:
                facts.blocks += 1
                facts.block_error = max(facts.block_error, one.relative)
        return next(filter(None, (one.problem(bounds) for one in deviations)), "")

    def _blamed(
        self, call: Call, family: Family, engagement: Engagement, invoke: Invoke, problem: str
    ) -> Engagement:
        """Find what is at fault, drop it, and engage the rest."""
        known = known_of(call.denoiser)
        names = list(engagement.in_use())
        self._disengage(engagement)
        blamed = self._with_memory(call, lambda: self._search(call, family, names, invoke, problem))
        if blamed is None:
            reason = f"{problem}; not enough memory to find out by which feature"
            blamed = dict.fromkeys(names, reason)
        known.dropped.update(blamed)
        rest = self._engage(call, None)
        tested = [name for name in names if name not in blamed]
        # What only engages now that another is gone has not been compared.
        if blamed and tested and list(rest.in_use()) == tested:
            known.passed.add(_signature(call, rest))
        return rest

    def _search(
        self, call: Call, family: Family, names: Sequence[str], invoke: Invoke, problem: str
    ) -> dict[str, str]:
        """Features at fault, with the reason; empty for a fault that does not repeat."""
        known, names = known_of(call.denoiser), list(names)
        blamed: dict[str, str] = {}
        found = self._trial(call, family, names, invoke)
        if not found:
            known.transient += 1
            self.facts.notes.append(f"{problem}; not when it was computed again")
            if known.transient >= _TRANSIENT:
                blamed = dict.fromkeys(names, f"{problem}, again and again")
        while found:
            good, bad = 0, len(names)
            while bad - good > 1:
                middle = (good + bad) // 2
                if reason := self._trial(call, family, names[:middle], invoke):
                    bad, found = middle, reason
                else:
                    good = middle
            blamed[names.pop(bad - 1)] = found
            found = self._trial(call, family, names, invoke)
        return blamed

    def _trial(self, call: Call, family: Family, names: Sequence[str], invoke: Invoke) -> str:
        """What is wrong with exactly these features engaged, or ""."""
        if not names:
            return ""
        engagement = self._engage(call, names)
        try:
            return self._both(call, family, engagement, invoke)[2]
        finally:
            self._disengage(engagement)


def _signature(call: Call, engagement: Engagement) -> Hashable:
    text = call.text_tokens // _TEXT_APART
    shape = (call.latent_shape, text, call.other_inputs, call.dtype, call.device)
    weights = call.weights if _LORA_CODE & engagement.handles.keys() else None
    return engagement.in_use(), shape, weights


def _quantises(denoiser: nn.Module) -> bool:
    """Whether layers may quantise their input: their weights are fp8 or of a class for that."""
    return any(
        type(weight).__name__ == "QuantizedTensor" or "float8" in str(weight.dtype)
        for weight in denoiser.parameters()
    )


class FiniteWatch:
    """Whether every output so far was finite: kept on the device, read without waiting."""

    def __init__(self) -> None:
        self._flags: dict[torch.device, Tensor] = {}
        self._reads: dict[torch.device, tuple[Tensor, torch.cuda.Event]] = {}

    def add(self, output: Any) -> None:
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                # Nothing times a sum is zero, or NaN where one of its terms is not finite.
                mark = leaf.sum(dtype=torch.float32) * 0
                flag = self._flags.get(leaf.device)
                self._flags[leaf.device] = mark if flag is None else flag + mark

    def is_broken(self) -> bool:
        """What the devices had found by the step before this one; a CPU, by now."""
        found = [self._is_broken_on(device) for device in self._flags]  # each begins its next read
        return any(found)

    def _is_broken_on(self, device: torch.device) -> bool:
        flag = self._flags[device]
        if device.type != "cuda":
            return not bool(torch.isfinite(flag))
        broken = False
        if (read := self._reads.get(device)) is not None:
            value, event = read
            if not event.query():
                return False
            broken = not bool(torch.isfinite(value))
        copy = torch.empty((), pin_memory=True).copy_(flag, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        self._reads[device] = (copy, event)
        return broken

    def ended_broken(self) -> bool:
        """The same of everything so far; waits for the devices."""
        return any(not bool(torch.isfinite(flag).cpu()) for flag in self._flags.values())

    def forget(self) -> None:
        self._flags.clear()
        self._reads.clear()
