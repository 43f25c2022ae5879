"""cudnn's own choice of convolution algorithm, measured at first use, where that pays.

Changes: which cudnn algorithm runs in a VAE (the transformers have no convolutions).
Faster because: the heuristic choice is often not the fastest one for a size.
Fidelity: rounding (algorithms sum in different orders).
Process-wide: cudnn.benchmark, held for the run.
Declines: without CUDA, without convolutions, for tiles, where it does not measure faster.

cudnn tries its algorithms anew for every size in every process. A tenth of that is therefore
counted as the cost of each call; on one H200 the choice changed nothing (92.1 and 92.2 ms).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..flags import FLAGS
from . import measured
from .base import Context, Fidelity, Handle

_FLAGS: Final = {"cudnn.benchmark": True}
_CALLS_PER_SEARCH: Final = 10


@contextlib.contextmanager
def _tuned() -> Iterator[None]:
    token = FLAGS.acquire(_FLAGS)
    try:
        yield
    finally:
        FLAGS.release(token)


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
        trial = context.host.trial
        if trial is not None and trial.varies:
            return "tiles come in many sizes, and cudnn would try its algorithms for each"
        return measured.why_not(context, self.name)

    def install(self, context: Context) -> Handle:
        handle = Handle(flags=_FLAGS, note="algorithms are measured at first use")
        share = 1 / _CALLS_PER_SEARCH
        return measured.settle(handle, context, self.name, _tuned, share_of_set_up=share)

    def release(self, denoiser: nn.Module) -> None:
        """Nothing is kept between runs."""
