"""Q4_K: 256 weights in 144 bytes.

| bytes | what |
|---|---|
| 0..1 | d, f16: scale of the sub-block scales |
| 2..3 | dmin, f16: scale of the sub-block minima |
| 4..15 | 8 six-bit scales and 8 six-bit minima (`codes.six_bit_pair`) |
| 16..143 | 4 groups of 32 bytes; low nibbles are sub-block 2g, high nibbles sub-block 2g + 1 |

Weight = d * scale * nibble - dmin * minimum.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are in capitals, as everywhere in Triton
import triton
import triton.language as tl

from .codes import six_bit_pair, to_float
from .launch import DequantKernel


@triton.jit(do_not_specialize=["n_quant_blocks"])
def _dequantize_q4_k_kernel(
    packed_ptr, out_ptr, n_quant_blocks, TILE: tl.constexpr, MANTISSA: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * TILE
    packed_ptr += first * 144
    out_ptr += first * 256
    halves_ptr = packed_ptr.to(tl.pointer_type(tl.float16))
    words_ptr = packed_ptr.to(tl.pointer_type(tl.uint16))
    block = tl.arange(0, TILE)[:, None]
    group = tl.arange(0, 4)[None, :]
    mask = block < n_quant_blocks - first
    d = tl.load(halves_ptr + block * 72, mask=mask, other=0.0).to(tl.float32)
    dmin = tl.load(halves_ptr + block * 72 + 1, mask=mask, other=0.0).to(tl.float32)
    scale_even, scale_odd, min_even, min_odd = six_bit_pair(
        words_ptr, block * 72 + 2, group, mask, MANTISSA
    )

    lane = tl.arange(0, 32)[None, None, :]
    block, group, mask = block[:, :, None], group[:, :, None], mask[:, :, None]
    codes = tl.load(packed_ptr + block * 144 + 16 + group * 32 + lane, mask=mask, other=0)
    codes = codes.to(tl.int32)
    even = (d * scale_even)[:, :, None] * to_float(codes & 0x0F, 0, MANTISSA) - (dmin * min_even)[
        :, :, None
    ]
    odd = (d * scale_odd * 0.0625)[:, :, None] * to_float(codes & 0xF0, 0, MANTISSA)
    odd -= (dmin * min_odd)[:, :, None]
    outs = out_ptr + block * 256 + group * 64 + lane
    tl.store(outs, even.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(outs + 32, odd.to(out_ptr.dtype.element_ty), mask=mask)


KERNEL = DequantKernel(
    jit=_dequantize_q4_k_kernel,
    block_size=256,
    type_size=144,
    tile=8,
    num_warps=2,
    mantissa=False,
    sweep=((4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8)),
)
