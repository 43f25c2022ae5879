"""Fast dequantisation of GGUF weights.

Changes: packed weights are dequantised by one kernel a type in place of a chain of torch calls.
Faster because: each stored byte is read once, and a layer costs one launch before its product.
Fidelity: rounding, no worse than the reference (the fp32 value, rounded once).
Process-wide: nothing.
Declines: on a model without GGUF weights.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from ..gguf.foreign import ForeignLinear, foreign_layers
from ..gguf.linear import QuantLinear
from ..kernels import BY_ID, chosen_path
from ..patching import Patch
from .base import Context, Fidelity, Handle


@dataclass
class _DequantHandle(Handle):
    foreign: list[ForeignLinear] = field(default_factory=list)

    def scope(self) -> contextlib.AbstractContextManager[object]:
        # The host swaps the parameters of another pack's layers when it loads or moves them.
        if self.foreign:
            adapted = [layer.refresh() for layer in self.foreign]
            self.foreign[0].state.adapted = any(adapted)
        return contextlib.nullcontext()

    def remove(self) -> None:
        for layer in self.foreign:
            layer.let_go()


# Kept between runs, so that compiled blocks meet the same objects again.
_foreign: weakref.WeakKeyDictionary[nn.Module, list[ForeignLinear]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class GgufDequant:
    name: ClassVar[str] = "gguf_dequant"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING

    def check(self, context: Context) -> str | None:
        if not _packed(context.denoiser) and not _foreign_of(context.denoiser):
            return "nothing to do: no GGUF weights"
        return None

    def install(self, context: Context) -> Handle:
        own = _packed(context.denoiser)
        foreign = [layer for layer in _foreign_of(context.denoiser) if layer.is_free()]
        states = {id(layer.state): layer.state for layer in own}
        patches = [Patch(state, "fast", True) for state in states.values()]
        patches += [Patch(layer.module, "forward", layer.forward) for layer in foreign]
        notes = [_described([*own, *foreign], context.device)]
        notes += [note for state in states.values() for note in state.notes]
        if foreign:
            notes.append("loaded by another GGUF pack")
        return _DequantHandle(patches=patches, note="; ".join(notes), foreign=foreign)

    def release(self, denoiser: nn.Module) -> None:
        """The layers' bytes go with the model."""
        _foreign.pop(denoiser, None)


def _packed(denoiser: nn.Module) -> list[QuantLinear]:
    return [m for m in denoiser.modules() if isinstance(m, QuantLinear) and m.qtype is not None]


def _foreign_of(denoiser: nn.Module) -> list[ForeignLinear]:
    if denoiser not in _foreign:
        _foreign[denoiser] = foreign_layers(denoiser)
    return _foreign[denoiser]


def _described(layers: Iterable[QuantLinear], device: torch.device) -> str:
    """How many layers of each type, and what dequantises them."""
    counts = Counter(layer.qtype for layer in layers if layer.qtype is not None)
    parts = []
    for qtype, count in counts.most_common():
        path, reason = chosen_path(qtype, device)
        how = path if path == "kernel" else f"{path}: {reason}"
        parts.append(f"{count} {BY_ID[qtype].name} ({how})")
    return "layers by type: " + ", ".join(parts)
