"""Q5_1: 32 weights in 24 bytes.

| bytes | what |
|---|---|
| 0..1 | d, f16 |
| 2..3 | m, f16 |
| 4..7 | u32: bit i is the fifth bit of weight i |
| 8..23 | 16 bytes: low nibbles are weights 0..15, high nibbles 16..31 |

Weight = d * five-bit code + m.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are in capitals, as everywhere in Triton
import triton
import triton.language as tl

from .codes import to_float
from .launch import DequantKernel


@triton.jit(do_not_specialize=["n_quant_blocks"])
def _dequantize_q5_1_kernel(
    packed_ptr, out_ptr, n_quant_blocks, TILE: tl.constexpr, MANTISSA: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * TILE
    packed_ptr += first * 24
    out_ptr += first * 32
    halves_ptr = packed_ptr.to(tl.pointer_type(tl.float16))
    words_ptr = packed_ptr.to(tl.pointer_type(tl.uint16))
    block = tl.arange(0, TILE)[:, None]
    lane = tl.arange(0, 16)[None, :]
    mask = block < n_quant_blocks - first
    d = tl.load(halves_ptr + block * 12, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(halves_ptr + block * 12 + 1, mask=mask, other=0.0).to(tl.float32)
    fifth_low = tl.load(words_ptr + block * 12 + 2, mask=mask, other=0).to(tl.int32)
    fifth_high = tl.load(words_ptr + block * 12 + 3, mask=mask, other=0).to(tl.int32)
    codes = tl.load(packed_ptr + block * 24 + 8 + lane, mask=mask, other=0).to(tl.int32)
    low = (codes & 0x0F) | (((fifth_low << 4) >> lane) & 0x10)
    high = (codes & 0xF0) | (((fifth_high << 8) >> lane) & 0x100)
    outs = out_ptr + block * 32 + lane
    low = d * to_float(low, 0, MANTISSA) + m
    high = (d * 0.0625) * to_float(high, 0, MANTISSA) + m
    tl.store(outs, low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(outs + 16, high.to(out_ptr.dtype.element_ty), mask=mask)


KERNEL = DequantKernel(
    jit=_dequantize_q5_1_kernel,
    block_size=32,
    type_size=24,
    tile=64,
    num_warps=4,
    mantissa=False,
    sweep=((32, 2), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8)),
)
