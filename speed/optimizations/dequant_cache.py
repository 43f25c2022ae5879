"""Spare device memory spent on GGUF weights that stay dequantised.

Changes: the largest packed layers also keep their dense weight, as many as the budget holds.
Faster because: a cached layer is a dense layer: nothing to dequantise at every call.
Fidelity: bit-identical to gguf_dequant, which dequantises the same way at every call.
Process-wide: device memory, bounded by the Advanced node and by what one forward leaves free.
Declines: without GGUF weights of our loader, without memory to spare, on offloaded weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from torch import nn

from ..gguf.cache import cached_bytes, drop_cache, fill_cache, plan_cache
from ..gguf.linear import QuantLinear
from .base import Context, Fidelity, Handle

_GIB: Final = 2**30


@dataclass(frozen=True)
class CacheConfig:
    """How much may be spent.

    Attributes:
        budget_gib: GiB of dense weights.
    """

    budget_gib: float = 4.0

    def __post_init__(self) -> None:
        if not self.budget_gib >= 0:
            raise ValueError(f"dequant_cache_gib needs 0 or more; found {self.budget_gib}")


@dataclass(frozen=True)
class DequantCache:
    name: ClassVar[str] = "dequant_cache"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    config: CacheConfig = field(default_factory=CacheConfig)

    def check(self, context: Context) -> str | None:
        layers = _layers(context.denoiser)
        if not layers:
            return "nothing to do: no GGUF weights from Load Diffusion Model (Speed Tier)"
        if any(
            layer.weight is None or layer.weight.device != context.device
            for layer in layers.values()
        ):
            drop_cache(layers.values())
            return "part of the weights is offloaded: there is no memory to spare"
        return None

    def install(self, context: Context) -> Handle:
        layers = _layers(context.denoiser)
        budget = int(self.config.budget_gib * _GIB)
        if context.host.spare_bytes is not None:
            # What is cached already counts as spare: it can be given back.
            budget = min(budget, context.host.spare_bytes() + cached_bytes(layers.values()))
        chosen = plan_cache(layers, context.dtype, budget)
        total = fill_cache(layers.values(), chosen, context.dtype)
        return Handle(
            note=f"{len(chosen)} of {len(layers)} layers keep their dense weight: "
            f"{total / _GIB:.2f} of {self.config.budget_gib:g} GiB"
        )

    def release(self, denoiser: nn.Module) -> None:
        drop_cache(_layers(denoiser).values())


def _layers(denoiser: nn.Module) -> dict[str, QuantLinear]:
    return {
        name: module
        for name, module in denoiser.named_modules()
        # Not another pack's: its memory is not ours to plan.
        if isinstance(module, QuantLinear) and module.qtype is not None
    }
