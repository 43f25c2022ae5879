"""The pointwise parts of every block in a few fused kernels.

Changes: norms with modulation, gated residuals, q and k norm with rotary embedding, and SwiGLU are
one kernel each; attention reads q, k and v where they are written. Compiled blocks stay as is.
Faster because: a tensor goes through memory once where a chain of operations takes it each time.
Fidelity: rounding (fp32 inside a kernel, rounded once, where the host rounds between operations).
Process-wide: nothing; the host's blocks are stood in for during a call.
Declines: without CUDA and Triton, other than bf16, where the host's blocks are other code than
known or give another result; per call, on patches, hooks and foreign parts.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
from torch import nn

from ..fused_blocks import FUSED_BLOCKS, FusedBlock
from ..kernels.launch import kernel_refusal
from ..patching import Patch
from .base import Context, Fidelity, Handle

# What comparing a kind of block with the host's own code gave, by denoiser and kind.
_compared: Final[weakref.WeakKeyDictionary[nn.Module, dict[Any, str | None]]] = (
    weakref.WeakKeyDictionary()
)


@dataclass
class _FusedHandle(Handle):
    blocks: list[FusedBlock] = field(default_factory=list)

    def remove(self) -> None:
        if plain := sum(block.plain_calls for block in self.blocks):
            self.note += f"; {plain} block calls as they are: patched or hooked, or unusual inputs"
        self.blocks = []


@dataclass(frozen=True)
class EagerPatches:
    name: ClassVar[str] = "eager_patches"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING

    def check(self, context: Context) -> str | None:
        if context.stack != "comfyui" or context.family.name not in FUSED_BLOCKS:
            return f"written for the host's own blocks; found {context.stack}'s"
        if problem := kernel_refusal(context.device):
            return problem
        if context.dtype is not torch.bfloat16:
            return f"the fused kernels are used in bfloat16; found {context.dtype}"
        if context.host.compiled_by:
            return f"{context.host.compiled_by} compiles this model; its blocks stay"
        blocks, problems = self._blocks(context)
        return None if blocks else problems.most_common(1)[0][0]

    def install(self, context: Context) -> Handle:
        blocks, problems = self._blocks(context)
        note = f"{len(blocks)} blocks"
        if problems:
            note += "; " + "; ".join(f"{n} as they are: {why}" for why, n in problems.items())
        patches = [Patch(b.block, "forward", b) for b in blocks]
        return _FusedHandle(patches=patches, note=note, blocks=blocks)

    def release(self, denoiser: nn.Module) -> None:
        _compared.pop(denoiser, None)

    def _blocks(self, context: Context) -> tuple[list[FusedBlock], Counter[str]]:
        kind = FUSED_BLOCKS[context.family.name]
        fused: list[FusedBlock] = []
        problems: Counter[str] = Counter()
        for repeated in context.family.repeated_blocks(context.denoiser):
            if drift := kind.drift(repeated.module):
                problems[drift] += 1
                continue
            block = kind(repeated.module, context.host.norm_weight)  # type: ignore[call-arg, arg-type]
            problem = block.problem(context.device) or self._compare(context, block)
            if problem:
                problems[problem] += 1
            else:
                fused.append(block)
        return fused, problems

    def _compare(self, context: Context, block: FusedBlock) -> str | None:
        """One comparison a kind of block: a host may change what no text search finds."""
        found = _compared.setdefault(context.denoiser, {})
        shapes = tuple((name, tuple(p.shape)) for name, p in block.block.named_parameters())
        key = (type(block.block), context.dtype, shapes)
        if key not in found:
            found[key] = block.disagreement(context.device, context.dtype)
        return found[key]
