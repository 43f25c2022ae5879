"""cudnn's own choice of convolution algorithm, measured at first use.

Changes: which cudnn algorithm runs.
Faster because: the heuristic choice is often not the fastest one for a size.
Fidelity: rounding (algorithms sum in different orders).
Process-wide: cudnn.benchmark, held for the run.
Declines: on a model without convolutions, and without CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from .base import Context, Fidelity, Handle


@dataclass(frozen=True)
class CudnnBenchmark:
    name: ClassVar[str] = "cudnn_benchmark"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING

    def check(self, context: Context) -> str | None:
        if not any(isinstance(module, _ConvNd) for module in context.denoiser.modules()):
            effective = torch.backends.cudnn.benchmark
            return f"nothing to do: no convolutions (the host's cudnn.benchmark is {effective})"
        if context.device.type != "cuda" and not context.forced:
            return f"cudnn needs a CUDA device; found {context.device.type}"
        return None

    def install(self, context: Context) -> Handle:
        return Handle(flags={"cudnn.benchmark": True}, note="algorithms are measured at first use")

    def release(self, denoiser: nn.Module) -> None:
        """Nothing is kept between runs."""
