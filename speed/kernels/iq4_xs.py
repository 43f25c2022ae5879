"""IQ4_XS: 256 weights in 136 bytes.

| bytes | what |
|---|---|
| 0..1 | d, f16 |
| 2..3 | u16: bits 2j, 2j + 1 are the high bits of sub-block j's scale |
| 4..7 | 8 nibbles: the low four bits of the scales, even sub-blocks in the low nibbles |
| 8..135 | 8 sub-blocks of 16 bytes: low nibbles are weights 0..15, high nibbles 16..31 |

Weight = d * (six-bit scale - 32) * codebook[nibble], the codebook of IQ4_NL.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are in capitals, as everywhere in Triton
import triton
import triton.language as tl

from .codes import codebook_value, to_float
from .launch import DequantKernel


@triton.jit(do_not_specialize=["n_quant_blocks"])
def _dequantize_iq4_xs_kernel(
    packed_ptr, out_ptr, n_quant_blocks, TILE: tl.constexpr, MANTISSA: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * TILE
    packed_ptr += first * 136
    out_ptr += first * 256
    halves_ptr = packed_ptr.to(tl.pointer_type(tl.float16))
    words_ptr = packed_ptr.to(tl.pointer_type(tl.uint16))
    block = tl.arange(0, TILE)[:, None]
    sub = tl.arange(0, 8)[None, :]
    mask = block < n_quant_blocks - first
    d = tl.load(halves_ptr + block * 68, mask=mask, other=0.0).to(tl.float32)
    high_bits = tl.load(words_ptr + block * 68 + 1, mask=mask, other=0).to(tl.int32)
    low_bits = tl.load(packed_ptr + block * 136 + 4 + (sub >> 1), mask=mask, other=0).to(tl.int32)
    scale = ((low_bits >> ((sub & 1) * 4)) & 15) | (((high_bits >> (sub * 2)) & 3) << 4)
    scale = (d * to_float(scale, 32, MANTISSA))[:, :, None]

    lane = tl.arange(0, 16)[None, None, :]
    block, sub, mask = block[:, :, None], sub[:, :, None], mask[:, :, None]
    codes = tl.load(packed_ptr + block * 136 + 8 + sub * 16 + lane, mask=mask, other=0).to(tl.int32)
    low = scale * codebook_value(codes & 0x0F, 1.0, MANTISSA)
    high = scale * codebook_value(codes & 0xF0, 0.0625, MANTISSA)
    outs = out_ptr + block * 256 + sub * 32 + lane
    tl.store(outs, low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(outs + 16, high.to(out_ptr.dtype.element_ty), mask=mask)


KERNEL = DequantKernel(
    jit=_dequantize_iq4_xs_kernel,
    block_size=256,
    type_size=136,
    tile=8,
    num_warps=4,
    mantissa=False,
    sweep=((4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8)),
)
