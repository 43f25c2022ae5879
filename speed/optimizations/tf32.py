"""TF32 for fp32 matrix products and convolutions.

Changes: fp32 matmul and cudnn operate on 10-bit mantissas. bf16 and fp16 work is untouched.
Faster because: tensor cores take TF32; they do not take fp32.
Fidelity: rounding, of the fp32 parts only.
Process-wide: matmul.tf32 and cudnn.tf32, held for the run.
Declines: without an NVIDIA card of compute capability 8.0 or newer; for a VAE that is not fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import nn

from ..families.vae import VaeFamily
from ..flags import TF32 as TF32_VALUE
from .base import Context, Fidelity, Handle

_NEEDED: Final = (8, 0)


@dataclass(frozen=True)
class Tf32:
    name: ClassVar[str] = "tf32"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING

    def check(self, context: Context) -> str | None:
        if context.forced:
            return None
        if isinstance(context.family, VaeFamily) and context.dtype != torch.float32:
            return f"nothing to do: this VAE computes in {context.dtype}"
        found = context.capabilities
        if not found.is_nvidia or found.compute_capability is None:
            return f"TF32 needs an NVIDIA card; found {found.device_type} ({found.device_name})"
        if found.compute_capability < _NEEDED:
            major, minor = found.compute_capability
            return f"TF32 needs compute capability 8.0 or newer; found {major}.{minor}"
        return None

    def install(self, context: Context) -> Handle:
        note = "fp32 matmul and cudnn in TF32"
        if not context.capabilities.is_nvidia:
            note += f"; forced on: the flags are set, a {context.device.type} device ignores them"
        if context.dtype != torch.float32:
            note += f"; the model computes in {context.dtype}, so only its fp32 parts change"
        return Handle(flags={"matmul.tf32": TF32_VALUE, "cudnn.tf32": TF32_VALUE}, note=note)

    def release(self, denoiser: nn.Module) -> None:
        """Nothing is kept between runs."""
