"""Fast dequantisation of GGUF weights.

Changes: packed weights are dequantised by one kernel a type in place of a chain of torch calls.
Faster because: each stored byte is read once, and a layer costs one launch before its product.
Fidelity: rounding, no worse than the reference (the fp32 value, rounded once).
Process-wide: nothing.
Declines: on a model without GGUF weights, or where another pack has replaced all their layers.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from ..gguf.foreign import ForeignLinear, foreign_layers, refresh_all, typed_weights
from ..gguf.linear import QuantLinear
from ..kernels import BY_ID, chosen_path
from ..patching import Patch, is_replaced
from .base import Context, Fidelity, Handle


@dataclass
class _DequantHandle(Handle):
    foreign: list[ForeignLinear] = field(default_factory=list)

    def scope(self) -> contextlib.AbstractContextManager[object]:
        # The host swaps the parameters of another pack's layers when it loads or moves them.
        if self.foreign:
            self.foreign[0].state.adapted = refresh_all(self.foreign)
        return contextlib.nullcontext()

    def remove(self) -> None:
        for layer in self.foreign:
            layer.let_go()


# Kept between runs with the factors of their LoRA, beside what they were found by: a layer that
# has been replaced, or given another type, is found anew.
_foreign: weakref.WeakKeyDictionary[
    nn.Module, tuple[list[tuple[Any, ...]], list[ForeignLinear]]
] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class GgufDequant:
    name: ClassVar[str] = "gguf_dequant"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING

    def check(self, context: Context) -> str | None:
        foreign = _foreign_of(context.denoiser)
        if _packed(context.denoiser) or any(map(_is_free, foreign)):
            return None
        if foreign:
            return "another pack has replaced or hooked every GGUF layer"
        return "nothing to do: no GGUF weights"

    def install(self, context: Context) -> Handle:
        own, foreign = _packed(context.denoiser), _foreign_of(context.denoiser)
        free = [layer for layer in foreign if _is_free(layer)]
        states = {id(layer.state): layer.state for layer in own}
        patches = [Patch(state, "fast", True) for state in states.values()]
        patches += [Patch(layer.module, "forward", layer.forward) for layer in free]
        notes = [_described([*own, *free], context.device)]
        notes += [note for state in states.values() for note in state.notes]
        if free:
            notes.append("loaded by another GGUF loader")
        if left := len(foreign) - len(free):
            notes.append(f"{left} layers left alone: another pack has replaced or hooked them")
        return _DequantHandle(patches=patches, note="; ".join(notes), foreign=free)

    def release(self, denoiser: nn.Module) -> None:
        """The layers' bytes go with the model."""
        _foreign.pop(denoiser, None)


def _packed(denoiser: nn.Module) -> list[QuantLinear]:
    return [m for m in denoiser.modules() if isinstance(m, QuantLinear) and m.qtype is not None]


def _foreign_of(denoiser: nn.Module) -> list[ForeignLinear]:
    found = typed_weights(denoiser)
    kept = _foreign.get(denoiser)
    if kept is None or kept[0] != found:
        kept = _foreign[denoiser] = (found, foreign_layers(denoiser))
    return kept[1]


def _is_free(layer: ForeignLinear) -> bool:
    """Whether nobody else has replaced the layer's forward or hooked it."""
    module: Any = layer.module
    hooked = module._forward_hooks or module._forward_pre_hooks
    return not hooked and not is_replaced(module, "forward")


def _described(layers: Iterable[QuantLinear], device: torch.device) -> str:
    """How many layers of each type, and what dequantises them."""
    counts = Counter(layer.qtype for layer in layers if layer.qtype is not None)
    parts = []
    for qtype, count in counts.most_common():
        path, reason = chosen_path(qtype, device)
        how = path if path == "kernel" else f"{path}: {reason}"
        parts.append(f"{count} {BY_ID[qtype].name} ({how})")
    return "layers by type: " + ", ".join(parts)
