"""Launching the dequantisation kernels: by Triton's own call, or by raw pointer.

Triton's call inspects every argument on every launch and looks each pointer up in the driver. Under
`cudaMallocAsync` that look-up fails during CUDA graph capture. The compiled kernel's own `run`
takes integers for pointers and looks nothing up: it captures, and costs less Python. Each kernel is
therefore compiled by one ordinary call and launched by raw pointer from then on.

This module imports no Triton; the kernel modules do, and are imported when first needed.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from .. import env
from ..errors import KernelConstraintError

logger = logging.getLogger("speed_tier.kernels")

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# `CompiledKernel.run(grid_x, grid_y, grid_z, stream, function, packed_metadata, launch_metadata,
# enter_hook, exit_hook, *every_parameter)`: read in these versions' sources.
RUN_SIGNATURE_FROM, RUN_SIGNATURE_BELOW = Version("3.3"), Version("3.9")
# Triton supports compute capability 8.0 and newer.
MIN_CAPABILITY = (8, 0)


@dataclass
class DequantKernel:
    """One type's Triton kernel with its tuned launch constants.

    The jit function's parameters are `(packed_ptr, out_ptr, n_quant_blocks, TILE, MANTISSA)`.

    Attributes:
        jit: the `triton.jit` function.
        block_size, type_size: weights and bytes of a quant_block.
        tile: quant_blocks a program handles.
        num_warps: warps a program runs on.
        mantissa: convert codes to floats through the mantissa (`codes.to_float`).
        sweep: `(tile, num_warps)` pairs the benchmark tries, each with both conversions.
    """

    jit: Any
    block_size: int
    type_size: int
    tile: int
    num_warps: int
    mantissa: bool
    sweep: tuple[tuple[int, int], ...]
    raw_refusal: str | None = None
    _compiled: dict[tuple[int, torch.dtype, bool], _RawLaunch] = field(default_factory=dict)

    def launch(self, packed: Tensor, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        """Dequantise on the current stream.

        Args:
            packed: contiguous uint8 at an even address, `rows * cols` weights. CUDA, or CPU under
                Triton's interpreter.
            rows, cols: logical shape.
            dtype: one of `OUT_DTYPES`.

        Returns:
            `(rows, cols)` of `dtype`: the fp32 value, rounded once.

        Raises:
            KernelConstraintError: an odd address, or a first call during graph capture.
        """
        out = torch.empty((rows, cols), dtype=dtype, device=packed.device)
        pointer = packed.data_ptr()
        raw = self._compiled.get((packed.get_device(), dtype, pointer & 15 == 0))
        if raw is None:
            self.first_launch(packed, out)
        else:
            raw.run(pointer, out.data_ptr(), out.numel() // self.block_size)
        return out

    def jit_launch(self, packed: Tensor, out: Tensor) -> Any:
        """Launch by Triton's own call; returns what Triton compiled."""
        n_quant_blocks = out.numel() // self.block_size
        grid = ((n_quant_blocks + self.tile - 1) // self.tile,)
        return self.jit[grid](
            packed,
            out,
            n_quant_blocks,
            TILE=self.tile,
            MANTISSA=self.mantissa,
            num_warps=self.num_warps,
        )

    def first_launch(self, packed: Tensor, out: Tensor) -> None:
        """Compile, launch, and keep a raw launcher if it gives the same result."""
        check_constraints(packed, out.dtype)
        if not packed.is_cuda:
            self.jit_launch(packed, out)
            return
        if torch.cuda.is_current_stream_capturing():
            raise KernelConstraintError(
                f"{self.jit.__name__} needs one run before it can be captured in a CUDA graph; "
                "found none for this dtype. Run the model once without capture."
            )
        with torch.cuda.device(packed.device):
            compiled = self.jit_launch(packed, out)
            if self.raw_refusal is None:
                self._keep_raw(compiled, packed, out)

    def _keep_raw(self, compiled: Any, packed: Tensor, out: Tensor) -> None:
        self.raw_refusal = raw_launch_refusal(compiled)
        if self.raw_refusal is not None:
            logger.info("%s stays on Triton's launch: %s", self.jit.__name__, self.raw_refusal)
            return
        raw = _RawLaunch(compiled, packed.get_device(), self.tile, self.mantissa)
        again = torch.empty_like(out)
        try:
            raw.run(packed.data_ptr(), again.data_ptr(), out.numel() // self.block_size)
        except (TypeError, ValueError, SystemError) as error:
            self.raw_refusal = f"Triton's launcher refused integer pointers ({error})"
            logger.warning("%s stays on Triton's launch: %s", self.jit.__name__, self.raw_refusal)
            return
        if not torch.equal(again.view(torch.uint8), out.view(torch.uint8)):
            self.raw_refusal = "the raw launch gave another result than Triton's own"
            logger.warning("%s stays on Triton's launch: %s", self.jit.__name__, self.raw_refusal)
            return
        key = (packed.get_device(), out.dtype, packed.data_ptr() & 15 == 0)
        self._compiled[key] = raw


class _RawLaunch:
    """A compiled kernel with everything bound that does not change from launch to launch."""

    __slots__ = (
        "_current_device",
        "_device",
        "_function",
        "_kernel_run",
        "_mantissa",
        "_metadata",
        "_stream",
        "_tile",
    )

    def __init__(self, compiled: Any, device: int, tile: int, mantissa: bool) -> None:
        self._kernel_run = compiled.run
        self._function = compiled.function
        self._metadata = compiled.packed_metadata
        self._device = device
        self._tile = tile
        self._mantissa = mantissa
        # What `torch.cuda.current_stream` and `current_device` end in, without the objects.
        self._stream = torch._C._cuda_getCurrentRawStream
        self._current_device = torch._C._cuda_getDevice

    def run(self, packed_pointer: int, out_pointer: int, n_quant_blocks: int) -> None:
        """Launch on the device's current stream."""
        if self._current_device() == self._device:
            self._run_here(packed_pointer, out_pointer, n_quant_blocks)
        else:
            with torch.cuda.device(self._device):
                self._run_here(packed_pointer, out_pointer, n_quant_blocks)

    def _run_here(self, packed_pointer: int, out_pointer: int, n_quant_blocks: int) -> None:
        tile = self._tile
        self._kernel_run(
            (n_quant_blocks + tile - 1) // tile,
            1,
            1,
            self._stream(self._device),
            self._function,
            self._metadata,
            None,
            None,
            None,
            packed_pointer,
            out_pointer,
            n_quant_blocks,
            tile,
            self._mantissa,
        )


def check_constraints(packed: Tensor, dtype: torch.dtype) -> None:
    """Refuse what no kernel can take.

    Raises:
        KernelConstraintError: names what was found and what is needed.
    """
    if dtype not in OUT_DTYPES:
        raise KernelConstraintError(
            f"the dequantisation kernels write bfloat16, float16 or float32; found {dtype}."
        )
    if packed.dtype != torch.uint8 or not packed.is_contiguous():
        raise KernelConstraintError(
            "packed weights need to be contiguous uint8; found "
            f"{packed.dtype} with strides {tuple(packed.stride())}."
        )
    if packed.data_ptr() & 1:
        raise KernelConstraintError(
            "packed weights need an even address (their scales are 16-bit); found an odd one. "
            "Clone the tensor."
        )


def raw_launch_refusal(compiled: Any) -> str | None:
    """Why the compiled kernel cannot be launched by raw pointer, or `None`."""
    import triton

    if torch.version.hip is not None:
        return "the raw launch is written for CUDA, found ROCm"
    version = Version(triton.__version__)
    if not RUN_SIGNATURE_FROM <= version < RUN_SIGNATURE_BELOW:
        return (
            f"the launch signature is known for Triton {RUN_SIGNATURE_FROM} to below "
            f"{RUN_SIGNATURE_BELOW}, found {triton.__version__}"
        )
    missing = [n for n in ("run", "function", "packed_metadata") if not hasattr(compiled, n)]
    return f"the compiled kernel has no {', '.join(missing)}" if missing else None


def interpreting() -> bool:
    """Whether kernels are built for Triton's interpreter, which runs them on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@cache
def kernel_refusal(device: torch.device) -> str | None:
    """Why kernels cannot run on this device, or `None`."""
    if problem := env.triton_problem():
        return problem
    if device.type == "cpu":
        return None if interpreting() else "kernels need CUDA, found a CPU tensor"
    if device.type != "cuda":
        return f"kernels need CUDA, found {device.type}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"compute capability {found}, needs 8.0"
    return None
