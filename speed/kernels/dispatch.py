"""From a GGUF type id to the code that dequantises it: the type table, the path choice, the op.

`dequantize` is what everything else calls. In eager it goes straight to the chosen path; under
`torch.compile` it is the op `speed_tier::dequantize`, opaque and whole. Paths:

- `kernel`: the type's Triton kernel (CUDA, or CPU under Triton's interpreter);
- `compiled`: the torch reference under `torch.compile`;
- `reference`: the torch reference, eager.

A kernel wins where there is one. Without, `compiled` and `reference` are timed against each other
once for a type and device, when first needed.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import env
from ..errors import KernelConstraintError
from . import reference as ref
from . import reference_iq as iq
from .launch import OUT_DTYPES, DequantKernel, check_constraints, kernel_refusal

logger = logging.getLogger("speed_tier.kernels")

PATHS = ("kernel", "compiled", "reference")


@dataclass(frozen=True)
class QuantType:
    """What dispatch knows of one GGUF type.

    Attributes:
        id: the type's number in the file (`GGMLQuantizationType`).
        name: the gguf package's name.
        block_size, type_size: weights and bytes of a quant_block.
        reference: `(n, type_size) uint8 -> (n, block_size) float32`.
        kernel: the module in this package with the type's `KERNEL`, or `None`.
        has_table: whether `reference` takes the codebook as a second argument.
    """

    id: int
    name: str
    block_size: int
    type_size: int
    reference: ref.BlockFunction
    kernel: str | None = None
    has_table: bool = False

    @property
    def plain(self) -> bool:
        """A float type: a cast, no kernel needed."""
        return self.block_size == 1

    @property
    def slow(self) -> bool:
        """No kernel and not a mere cast: the report names these."""
        return self.kernel is None and not self.plain

    def packed_bytes(self, rows: int, cols: int) -> int:
        """Bytes of a `(rows, cols)` weight."""
        return rows * cols // self.block_size * self.type_size


QUANT_TYPES: tuple[QuantType, ...] = (
    QuantType(8, "Q8_0", 32, 34, ref.dequantize_q8_0, "q8_0"),
    QuantType(14, "Q6_K", 256, 210, ref.dequantize_q6_k, "q6_k"),
    QuantType(13, "Q5_K", 256, 176, ref.dequantize_q5_k, "q5_k"),
    QuantType(12, "Q4_K", 256, 144, ref.dequantize_q4_k, "q4_k"),
    QuantType(11, "Q3_K", 256, 110, ref.dequantize_q3_k, "q3_k"),
    QuantType(10, "Q2_K", 256, 84, ref.dequantize_q2_k, "q2_k"),
    QuantType(7, "Q5_1", 32, 24, ref.dequantize_q5_1, "q5_1"),
    QuantType(6, "Q5_0", 32, 22, ref.dequantize_q5_0, "q5_0"),
    QuantType(3, "Q4_1", 32, 20, ref.dequantize_q4_1, "q4_1"),
    QuantType(2, "Q4_0", 32, 18, ref.dequantize_q4_0, "q4_0"),
    QuantType(20, "IQ4_NL", 32, 18, iq.dequantize_iq4_nl, "iq4_nl", True),
    QuantType(23, "IQ4_XS", 256, 136, iq.dequantize_iq4_xs, "iq4_xs", True),
    QuantType(30, "BF16", 1, 2, ref.dequantize_bf16),
    QuantType(1, "F16", 1, 2, ref.dequantize_f16),
    QuantType(0, "F32", 1, 4, ref.dequantize_f32),
    QuantType(21, "IQ3_S", 256, 110, iq.dequantize_iq3_s, None, True),
    QuantType(18, "IQ3_XXS", 256, 98, iq.dequantize_iq3_xxs, None, True),
    QuantType(22, "IQ2_S", 256, 82, iq.dequantize_iq2_s, None, True),
    QuantType(17, "IQ2_XS", 256, 74, iq.dequantize_iq2_xs, None, True),
    QuantType(16, "IQ2_XXS", 256, 66, iq.dequantize_iq2_xxs, None, True),
    QuantType(19, "IQ1_S", 256, 50, iq.dequantize_iq1_s, None, True),
    QuantType(29, "IQ1_M", 256, 56, iq.dequantize_iq1_m, None, True),
    QuantType(34, "TQ1_0", 256, 54, iq.dequantize_tq1_0),
    QuantType(35, "TQ2_0", 256, 66, iq.dequantize_tq2_0),
    QuantType(39, "MXFP4", 32, 17, iq.dequantize_mxfp4, None, True),
    QuantType(40, "NVFP4", 64, 36, iq.dequantize_nvfp4, None, True),
)
BY_ID: dict[int, QuantType] = {row.id: row for row in QUANT_TYPES}

Launch = Callable[[Tensor, int, int, torch.dtype], Tensor]
# (type id, device index or -1 for the CPU) -> what runs it. Filled on first use.
_chosen: dict[tuple[int, int], Launch] = {}
_chosen_path: dict[tuple[int, int], tuple[str, str]] = {}


def dequantize(
    packed: Tensor,
    qtype: int,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    path: str | None = None,
) -> Tensor:
    """Dequantise one packed weight.

    Args:
        packed: `(rows, bytes_per_row)` or flat uint8, contiguous, `rows * cols` weights.
        qtype: GGUF type id.
        rows, cols: the weight's logical shape.
        dtype: bfloat16, float16 or float32.
        path: one of `PATHS` to force it; `None` chooses.

    Returns:
        `(rows, cols)` of `dtype`, a new tensor: the fp32 value, rounded once.

    Raises:
        KernelConstraintError: unknown type, wrong byte count, or a forced path that cannot run.
    """
    if torch.compiler.is_compiling():
        return torch.ops.speed_tier.dequantize(packed, qtype, rows, cols, dtype)
    if path is not None:
        check_packed(packed, qtype, rows, cols, dtype)
        return _launch_for(BY_ID[qtype], packed.device, path)(packed, rows, cols, dtype)
    launch = _chosen.get((qtype, packed.get_device()))
    if launch is None:
        check_packed(packed, qtype, rows, cols, dtype)
        launch = _choose(BY_ID[qtype], packed.device)
    return launch(packed, rows, cols, dtype)


def check_packed(packed: Tensor, qtype: int, rows: int, cols: int, dtype: torch.dtype) -> None:
    """Refuse what does not fit together; the loader calls it once for each weight.

    Raises:
        KernelConstraintError: says what was found and what is needed.
    """
    row = BY_ID.get(qtype)
    if row is None:
        known = ", ".join(r.name for r in QUANT_TYPES)
        raise KernelConstraintError(f"GGUF type {qtype} is not known. Known are {known}.")
    check_constraints(packed, dtype)
    if cols % row.block_size:
        raise KernelConstraintError(
            f"{row.name} needs rows of a multiple of {row.block_size} weights; found {cols}."
        )
    needed = row.packed_bytes(rows, cols)
    if packed.numel() != needed:
        raise KernelConstraintError(
            f"a {rows} x {cols} {row.name} weight needs {needed} bytes; found {packed.numel()}."
        )


def chosen_path(qtype: int, device: torch.device) -> tuple[str, str]:
    """The path for a type on a device and why, choosing now if need be.

    Returns:
        `(path, reason)`, both for the report.
    """
    key = (qtype, _device_key(device))
    if key not in _chosen_path:
        _choose(BY_ID[qtype], device)
    return _chosen_path[key]


def forget_choices() -> None:
    """Drop every choice, so that the next call makes it anew."""
    _chosen.clear()
    _chosen_path.clear()


def kernel_for(row: QuantType) -> DequantKernel:
    """The type's kernel; imports Triton."""
    assert row.kernel is not None
    module = importlib.import_module(f".{row.kernel}", __package__)
    kernel: DequantKernel = module.KERNEL
    return kernel


@cache
def table_for(name: str, device: torch.device) -> Tensor:
    """A type's codebook on a device, copied there once."""
    table = iq.codebook(name)
    assert table is not None
    return table.to(device)


def _device_key(device: torch.device) -> int:
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def _reference_launch(row: QuantType, device: torch.device) -> Launch:
    table = table_for(row.name, device) if row.has_table else None
    function, type_size = row.reference, row.type_size

    def launch(packed: Tensor, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        return ref.dequantize_reference(packed, function, type_size, rows, cols, dtype, table)

    return launch


@cache
def _compiled_reference() -> Callable[..., Tensor]:
    # One function for every type: each is its own graph, each with a symbolic number of blocks.
    return torch.compile(ref.dequantize_blocks, dynamic=True, fullgraph=True)


def _compiled_launch(row: QuantType, device: torch.device) -> Launch:
    table = table_for(row.name, device) if row.has_table else None
    compiled, function, type_size = _compiled_reference(), row.reference, row.type_size

    def launch(packed: Tensor, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        blocks = packed.reshape(-1, type_size)
        return compiled(blocks, function, dtype, table).reshape(rows, cols)

    return launch


def _launch_for(row: QuantType, device: torch.device, path: str) -> Launch:
    if path == "reference":
        return _reference_launch(row, device)
    if path == "compiled":
        return _compiled_launch(row, device)
    if path != "kernel":
        raise ValueError(f"path is one of {', '.join(PATHS)}; found {path!r}.")
    if row.kernel is None:
        raise KernelConstraintError(f"{row.name} has no kernel. Use the reference.")
    refusal = kernel_refusal(device)
    if refusal is not None:
        raise KernelConstraintError(f"the {row.name} kernel cannot run: {refusal}.")
    return kernel_for(row).launch


def _choose(row: QuantType, device: torch.device) -> Launch:
    """Decide the path for a type on a device, and keep it unless a capture is running."""
    refusal = kernel_refusal(device)
    if row.plain:
        path, reason = "reference", "a cast"
    elif row.kernel is not None and refusal is None and device.type != "cpu":
        path, reason = "kernel", "Triton kernel"
    else:
        # On the CPU the interpreter could run a kernel: for tests, when forced.
        why = (refusal or "CPU") if row.kernel is not None else f"{row.name} has no kernel"
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return _reference_launch(row, device)
        path, timing = _faster_reference(row, device)
        reason = f"{why}; {timing}"
    key = (row.id, _device_key(device))
    launch = _chosen[key] = _launch_for(row, device, path)
    _chosen_path[key] = (path, reason)
    logger.info("%s on %s: %s (%s)", row.name, device, path, reason)
    return launch


def _faster_reference(row: QuantType, device: torch.device) -> tuple[str, str]:
    """Time compiled against eager on a sample of zeros: `(path, reason)`."""
    rows, cols = 1024, 3072
    packed = torch.zeros(row.packed_bytes(rows, cols), dtype=torch.uint8, device=device)
    eager = _reference_launch(row, device)
    if problem := env.inductor_problem(device):
        return "reference", problem
    try:
        compiled = _compiled_launch(row, device)
        compiled_ms = _time_ms(compiled, packed, rows, cols)
    except (RuntimeError, ImportError, OSError) as error:
        # Dynamo's and Inductor's errors are RuntimeErrors; a missing compiler is an OSError.
        logger.debug("compiling the %s reference failed", row.name, exc_info=True)
        return "reference", f"compiling its reference failed ({type(error).__name__})"
    eager_ms = _time_ms(eager, packed, rows, cols)
    path = "compiled" if compiled_ms < eager_ms else "reference"
    return path, f"compiled {compiled_ms:.2f} ms, eager {eager_ms:.2f} ms for {rows} x {cols}"


def _time_ms(launch: Launch, packed: Tensor, rows: int, cols: int) -> float:
    def synchronize() -> None:
        if packed.is_cuda:
            torch.cuda.synchronize(packed.device)

    launch(packed, rows, cols, torch.bfloat16)
    times = []
    for _ in range(3):
        synchronize()
        start = time.perf_counter()
        launch(packed, rows, cols, torch.bfloat16)
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


# The op, defined by hand: `torch.library.custom_op` adds autograd and aliasing checks in Python to
# every call, and a weight's bytes have no gradient.
_library = torch.library.Library("speed_tier", "FRAGMENT")
_library.define(
    "dequantize(Tensor packed, int qtype, SymInt rows, SymInt cols, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _op_implementation(packed: Tensor, qtype: int, rows: int, cols: int, dtype: Any) -> Tensor:
    check_packed(packed, qtype, rows, cols, dtype)
    launch = _chosen.get((qtype, packed.get_device()))
    if launch is None:
        launch = _choose(BY_ID[qtype], packed.device)
    return launch(packed, rows, cols, dtype)


def _op_fake(packed: Tensor, qtype: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    if dtype not in OUT_DTYPES:
        raise KernelConstraintError(f"dequantize writes {OUT_DTYPES}; found {dtype}.")
    return packed.new_empty((rows, cols), dtype=dtype)


_library.impl("dequantize", _op_implementation, "CompositeExplicitAutograd")
torch.library.register_fake("speed_tier::dequantize", _op_fake, lib=_library)
