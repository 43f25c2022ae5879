"""Q8_0: 32 weights in 34 bytes.

| bytes | what |
|---|---|
| 0..1 | d, f16 |
| 2..33 | 32 int8 codes |

Weight = d * code.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are in capitals, as everywhere in Triton
import triton
import triton.language as tl

from .codes import signed_to_float
from .launch import DequantKernel


@triton.jit(do_not_specialize=["n_quant_blocks"])
def _dequantize_q8_0_kernel(
    packed_ptr, out_ptr, n_quant_blocks, TILE: tl.constexpr, MANTISSA: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * TILE
    packed_ptr += first * 34
    out_ptr += first * 32
    halves_ptr = packed_ptr.to(tl.pointer_type(tl.float16))
    block = tl.arange(0, TILE)[:, None]
    lane = tl.arange(0, 32)[None, :]
    mask = block < n_quant_blocks - first
    d = tl.load(halves_ptr + block * 17, mask=mask, other=0.0).to(tl.float32)
    codes = tl.load(packed_ptr + block * 34 + 2 + lane, mask=mask, other=0)
    out = d * signed_to_float(codes, MANTISSA)
    tl.store(out_ptr + block * 32 + lane, out.to(out_ptr.dtype.element_ty), mask=mask)


KERNEL = DequantKernel(
    jit=_dequantize_q8_0_kernel,
    block_size=32,
    type_size=34,
    tile=64,
    num_warps=4,
    mantissa=False,
    sweep=((32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8)),
)
