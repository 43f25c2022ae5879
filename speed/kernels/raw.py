"""Any Triton kernel, launched by raw pointer after its first call.

As for dequantisation (`launch.py`): Triton's own call inspects every argument and looks pointers
up in the driver, which costs time and cannot be captured in a CUDA graph under `cudaMallocAsync`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import KernelConstraintError
from .launch import raw_launch_refusal

logger = logging.getLogger("speed_tier.kernels")

_INT32_MAX = 2**31 - 1  # a larger number is another type to Triton


class RawKernel:
    """One `triton.jit` function whose parameters are pointers, then numbers, then constexprs.

    The jit function has to be told not to specialise its integer parameters
    (`do_not_specialize`): a compiled kernel is kept for every value of them.

    Args:
        jit: the function.
        num_warps: warps a program runs on.
    """

    def __init__(self, jit: Any, num_warps: int) -> None:
        self.jit = jit
        self.num_warps = num_warps
        self.raw_refusal: str | None = None
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: Sequence[Tensor],
        numbers: Sequence[int | float],
        constants: Mapping[str, Any],
    ) -> None:
        """Launch on the current stream of the tensors' device.

        Args:
            grid: programs along two axes.
            tensors: one a pointer parameter, all on one device.
            numbers: the parameters after them.
            constants: the constexprs, in the function's order.

        Raises:
            KernelConstraintError: a first launch during graph capture.
        """
        device = tensors[0].get_device()
        pointers = [tensor.data_ptr() for tensor in tensors]
        key = (
            device,
            tuple(constants.values()),
            tuple(n > _INT32_MAX for n in numbers) if max(numbers) > _INT32_MAX else None,
            *[(t.dtype, p & 15 == 0) for t, p in zip(tensors, pointers, strict=True)],
        )
        compiled = self._compiled.get(key)
        if compiled is None:
            self._first(key, grid, tensors, numbers, constants)
        elif torch._C._cuda_getDevice() == device:
            self._run(compiled, device, grid, pointers, numbers, constants)
        else:
            with torch.cuda.device(device):
                self._run(compiled, device, grid, pointers, numbers, constants)

    def _run(
        self,
        compiled: Any,
        device: int,
        grid: tuple[int, int],
        pointers: Sequence[int],
        numbers: Sequence[int | float],
        constants: Mapping[str, Any],
    ) -> None:
        compiled.run(
            grid[0],
            grid[1],
            1,
            torch._C._cuda_getCurrentRawStream(device),
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *pointers,
            *numbers,
            *constants.values(),
        )

    def _first(
        self,
        key: Any,
        grid: tuple[int, int],
        tensors: Sequence[Tensor],
        numbers: Sequence[int | float],
        constants: Mapping[str, Any],
    ) -> None:
        if not tensors[0].is_cuda:  # the interpreter
            self.jit[grid](*tensors, *numbers, **constants, num_warps=self.num_warps)
            return
        if torch.cuda.is_current_stream_capturing():
            raise KernelConstraintError(
                f"{self.jit.__name__} needs one run before it can be captured in a CUDA graph; "
                "found none for these types. Run the model once without capture."
            )
        with torch.cuda.device(tensors[0].device):
            compiled = self.jit[grid](*tensors, *numbers, **constants, num_warps=self.num_warps)
        if self.raw_refusal is None:
            self.raw_refusal = raw_launch_refusal(compiled)
            if self.raw_refusal is not None:
                logger.info("%s stays on Triton's launch: %s", self.jit.__name__, self.raw_refusal)
        if self.raw_refusal is None:
            self._compiled[key] = compiled
