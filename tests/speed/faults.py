"""Optimizations with a fault in them, for the self-check to find."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from speed_tier.speed.optimizations.base import Fidelity, Handle
from speed_tier.speed.patching import Patch, beneath

KINDS = ("none", "scaled", "noise", "NaN", "NaN at one size", "NaN later", "NaN once", "once")
LATER = 6  # calls of a block


@dataclass(frozen=True, eq=False)
class Fault:
    """Stands in for one block of the denoiser, or for all, and spoils what it gives.

    Attributes:
        kind: One of KINDS.
        block: Index of the block; None = all.
        width: Last but one dimension of the size that gets NaN.
    """

    name: str
    kind: str = "none"
    block: int | None = None
    width: int = 0
    calls: Counter = field(default_factory=Counter)
    fidelity = Fidelity.ROUNDING

    def __post_init__(self):
        assert self.kind in KINDS

    def check(self, context):
        return None

    def install(self, context):
        blocks = [block.module for block in context.family.repeated_blocks(context.denoiser)]
        chosen = blocks if self.block is None else [blocks[self.block]]
        return Handle(
            patches=[Patch(block, "forward", self._in_place_of(block)) for block in chosen]
        )

    def release(self, denoiser):
        pass

    def _in_place_of(self, block):
        def forward(*args, **kwargs):
            below = beneath(block, "forward", forward)
            output = (below or type(block).forward.__get__(block))(*args, **kwargs)
            self.calls[self.kind] += 1
            if isinstance(output, tuple):
                return tuple(map(self._spoiled, output))
            return self._spoiled(output)

        return forward

    def _spoiled(self, output):
        number = self.calls[self.kind]
        if self.kind == "scaled":
            return output * 1.01
        if self.kind == "noise":
            return output + 0.1 * output.std() * torch.randn_like(output)
        nan = (
            self.kind == "NaN"
            or (self.kind == "NaN at one size" and output.shape[-2] == self.width)
            or (self.kind == "NaN later" and number > LATER)
            or (self.kind == "NaN once" and number == LATER)
        )
        if nan or (self.kind == "once" and number == 1):
            return output * (float("nan") if nan else 2.0)
        return output
