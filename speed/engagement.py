"""What is installed for one denoiser in one run, and what became of each part."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .families import FAMILIES, not_ours
from .families.base import Family
from .optimizations.base import Handle, HostFacts, Optimization
from .patching import PatchSet
from .report import CompileFacts, FeatureOutcome, ModelFacts, State


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
        other_inputs: Names and shapes of what else the denoiser gets.
        weights: Changes when the weights' values do (LoRA), None where nobody says.
    """

    denoiser: nn.Module
    device: torch.device
    dtype: torch.dtype
    latent_shape: tuple[int, ...]
    text_tokens: int = 0
    host: HostFacts = field(default_factory=HostFacts)
    other_inputs: Hashable = ()
    weights: Hashable = None


@dataclass
class Engagement:
    """What is installed for one denoiser in one run.

    Attributes:
        handles: Of what engaged, by name, in the order of installing.
        outcomes: Of everything that was planned.
        model: The model, for the report.
        patches, options: Of all handles.
        flag_tokens: Leases of the handles' flags.
    """

    model: ModelFacts
    handles: dict[str, Handle] = field(default_factory=dict)
    outcomes: list[FeatureOutcome] = field(default_factory=list)
    patches: PatchSet = field(default_factory=lambda: PatchSet(()))
    options: dict[str, Any] = field(default_factory=dict)
    flag_tokens: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def around_call(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for handle in self.handles.values():
                stack.enter_context(handle.scope())
            stack.enter_context(self.patches)
            yield

    def in_use(self) -> tuple[str, ...]:
        """Names of what is engaged and has not turned out to gain nothing."""
        return tuple(name for name, handle in self.handles.items() if not handle.not_used)

    def seal(self) -> None:
        """Everything is installed: gather what the handles bring to every call."""
        handles = self.handles.values()
        self.patches = PatchSet([patch for handle in handles for patch in handle.patches])
        self.options = {k: v for handle in handles for k, v in handle.options.items()}

    def engaged(self, optimization: Optimization, handle: Handle) -> None:
        self.handles[optimization.name] = handle
        self._note(optimization, State.ENGAGED, "")

    def skip(self, optimization: Optimization, reason: str) -> None:
        self._note(optimization, State.SKIPPED, reason)

    def fell_back(self, optimization: Optimization, reason: str) -> None:
        self._note(optimization, State.FELL_BACK, reason)

    def _note(self, optimization: Optimization, state: State, reason: str) -> None:
        fidelity = optimization.fidelity.value
        self.outcomes.append(FeatureOutcome(optimization.name, state, reason, fidelity))

    def settled(self) -> list[FeatureOutcome]:
        """Outcomes with what became known while the run went on."""
        for outcome in self.outcomes:
            handle = self.handles.get(outcome.name)
            if handle is None:
                continue
            outcome.note = handle.note
            if handle.fell_back:
                outcome.state, outcome.reason = State.FELL_BACK, handle.fell_back
            elif handle.not_used:
                outcome.state, outcome.reason = State.SKIPPED, handle.not_used
        return self.outcomes


def compile_facts(engagements: Iterable[Engagement]) -> CompileFacts:
    """What was compiled for all of them."""
    facts = CompileFacts()
    for engagement in engagements:
        for handle in engagement.handles.values():
            if (more := handle.compile_facts()) is not None:
                facts = _joined(facts, more)
    return facts


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
        cache=first.cache or second.cache,
    )


_numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count(1)


def _model_number(denoiser: nn.Module) -> int:
    if denoiser not in _numbers:
        _numbers[denoiser] = next(_next_number)
    return _numbers[denoiser]


def model_facts(
    call: Call, detected: tuple[Family, str] | None, families: tuple[Family, ...] = FAMILIES
) -> ModelFacts:
    """The called model, for the report; `detected` is its family, one of `families`, and stack."""
    facts = ModelFacts(
        class_name=type(call.denoiser).__name__,
        dtype=str(call.dtype).removeprefix("torch."),
        device=str(call.device),
        compiled_by=call.host.compiled_by,
        number=_model_number(call.denoiser),
    )
    if detected is None:
        facts.note = not_ours(call.denoiser, families)
    else:
        facts.family, facts.stack = detected[0].name, detected[1]
    return facts
