"""cudnn's own choice of convolution algorithm, measured at first use.

Changes: which cudnn algorithm runs in a VAE (the transformers have no convolutions).
Faster because: the heuristic choice is often not the fastest one for a size.
Fidelity: rounding (algorithms sum in different orders).
Process-wide: cudnn.benchmark, held for the run; torch keeps the plans that were found.
Declines: without CUDA, without convolutions, and unless it is switched on.

torch looks a convolution's plan up before it reads the flag, and keeps plans for the process. So a
plan from a run with the flag would stay in later runs at `off`, which are to be as they were; and
the two cannot be timed beside each other in one thread: the first one's plan serves both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from .base import Context, Fidelity, Handle

_FLAGS: Final = {"cudnn.benchmark": True}


@dataclass(frozen=True)
class CudnnBenchmark:
    name: ClassVar[str] = "cudnn_benchmark"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING

    def check(self, context: Context) -> str | None:
        if not any(isinstance(module, _ConvNd) for module in context.denoiser.modules()):
            effective = torch.backends.cudnn.benchmark
            return f"nothing to do: no convolutions (the host's cudnn.benchmark is {effective})"
        if torch.backends.cudnn.benchmark:
            return "nothing to do: the host has switched cudnn.benchmark on"
        if context.forced:
            return None
        if context.device.type != "cuda":
            return f"cudnn needs a CUDA device; found {context.device.type}"
        return "torch would keep cudnn's choice for later runs at off as well"

    def install(self, context: Context) -> Handle:
        return Handle(flags=_FLAGS, note="algorithms are measured at first use")

    def release(self, denoiser: nn.Module) -> None:
        """Nothing is kept between runs."""
