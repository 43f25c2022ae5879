"""What an optimization is: checked, installed for one run, removed when the run ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from ..env import Capabilities
from ..families.base import Family
from ..patching import Patch
from ..probe import Trial
from ..report import CompileFacts, GraphFacts


class Fidelity(str, Enum):
    """What engaging an optimization does to the numbers."""

    EXACT = "bit-identical"
    ROUNDING = "rounding"
    LOSSY = "lossy"


NormParameters = Callable[
    [Any, torch.Tensor],
    contextlib.AbstractContextManager[tuple[torch.Tensor | None, torch.Tensor | None]],
]


@dataclass(frozen=True)
class HostFacts:
    """What only the host knows of one denoiser call.

    Attributes:
        compiled_by: Who else compiles this model, "" if nobody.
        dynamic_vram: Weights are faulted in per call; their addresses may not be kept.
        attention_in_use: Why the attention function is not ours to choose, "" if it is.
        attention: The attention the host would run: (q, k, v) of (B, H, N, D); None = plain SDPA.
        version: The host's name and version, for figures of its own code; "" without a host.
        check_interrupt: Raises if the user cancelled; called between blocks.
        spare_bytes: Device memory that neither the weights nor one forward of this size need.
        hold_interrupts: While entered, a cancel waits.
        norm_weight: (norm, input) to a context in which the norm's weight is where the input is.
        norm_parameters: The same for a norm's weight and bias, None for what it has not.
        state_folder: Where the pack may keep files between processes, None = nowhere.
        after_out_of_memory: Puts right what the host leaves behind in a model whose forward ran
            out of memory, where the run goes on.
        participant: Who else acts inside the forward and may not be called twice, "" if nobody.
        trial: The call itself, to be measured; None where it cannot be tried.
    """

    compiled_by: str = ""
    dynamic_vram: bool = False
    attention_in_use: str = ""
    attention: Callable[..., torch.Tensor] | None = None
    version: str = ""
    check_interrupt: Callable[[], None] | None = None
    spare_bytes: Callable[[], int] | None = None
    hold_interrupts: Callable[[], contextlib.AbstractContextManager[object]] | None = None
    norm_weight: Callable[..., contextlib.AbstractContextManager[torch.Tensor]] | None = None
    norm_parameters: NormParameters | None = None
    state_folder: Path | None = None
    after_out_of_memory: Callable[[nn.Module], None] | None = None
    participant: str = ""
    trial: Trial | None = None


@dataclass(frozen=True)
class Context:
    """One denoiser at the first call of one run: the weights are loaded.

    Attributes:
        denoiser: The transformer that will be called.
        family: Its family.
        stack: "comfyui" or "diffusers".
        device: Where it computes.
        dtype: Dtype of its activations.
        capabilities: What that device can do.
        batch: Batch of the call, cond and uncond joined.
        image_tokens, text_tokens: Sequence lengths of the call.
        host: What the host says.
        forced: The Advanced node says "on" for this optimization.
        compiling: Told (kind, index, count) when a compile starts.
        engaged: Optimizations installed before this one in this run.
    """

    denoiser: nn.Module
    family: Family
    stack: str
    device: torch.device
    dtype: torch.dtype
    capabilities: Capabilities
    batch: int = 1
    image_tokens: int = 1024
    text_tokens: int = 0
    host: HostFacts = field(default_factory=HostFacts)
    forced: bool = False
    compiling: Callable[[str, int, int], None] | None = None
    engaged: tuple[str, ...] = ()


@dataclass
class Handle:
    """What one optimization put in for one run.

    Attributes:
        flags: Process-wide flags, held until the run ends.
        patches: Attributes replaced around every denoiser call.
        options: Entries added to the host's transformer_options for every call.
        note: Figures for the report.
        fell_back: Set when the optimization gave up in mid-run: the reason.
        not_used: Set when it turned out that there was nothing to gain: the reason.
        peak_bytes: Highest device memory before the optimization reset torch's own mark.
        uncounted_bytes: Device memory that it holds and torch does not count.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    patches: Sequence[Patch] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    fell_back: str = ""
    not_used: str = ""
    peak_bytes: int = 0
    uncounted_bytes: int = 0

    @property
    def settling(self) -> bool:
        """Whether another call like the last one would still set something up."""
        return False

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Context around every denoiser call."""
        return contextlib.nullcontext()

    def compile_facts(self) -> CompileFacts | None:
        """What was compiled in this run, for an optimization that compiles."""
        return None

    def graph_facts(self) -> GraphFacts | None:
        """What was captured and replayed, for an optimization that uses CUDA graphs."""
        return None

    def remove(self) -> None:
        """The run has ended. Idempotent."""


class Optimization(Protocol):
    """One lever. `check` and `install` are called once per run and denoiser, in table order."""

    name: ClassVar[str]
    fidelity: ClassVar[Fidelity]

    def check(self, context: Context) -> str | None:
        """Why it cannot or need not engage here, or None."""

    def install(self, context: Context) -> Handle:
        """Put it in. Whatever it leaves behind is undone by the handle's `remove`."""

    def release(self, denoiser: nn.Module) -> None:
        """The model was unloaded: drop what was kept between runs for `denoiser`."""
