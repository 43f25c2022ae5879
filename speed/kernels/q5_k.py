"""Q5_K: 256 weights in 176 bytes.

| bytes | what |
|---|---|
| 0..1 | d, f16: scale of the sub-block scales |
| 2..3 | dmin, f16: scale of the sub-block minima |
| 4..15 | 8 six-bit scales and 8 six-bit minima (`codes.six_bit_pair`) |
| 16..47 | 32 bytes: bit j of byte l is the fifth bit of weight l of sub-block j |
| 48..175 | 4 groups of 32 bytes; low nibbles are sub-block 2g, high nibbles sub-block 2g + 1 |

Weight = d * scale * five-bit code - dmin * minimum.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are in capitals, as everywhere in Triton
import triton
import triton.language as tl

from .codes import six_bit_pair, to_float
from .launch import DequantKernel


@triton.jit(do_not_specialize=["n_quant_blocks"])
def _dequantize_q5_k_kernel(
    packed_ptr, out_ptr, n_quant_blocks, TILE: tl.constexpr, MANTISSA: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * TILE
    packed_ptr += first * 176
    out_ptr += first * 256
    halves_ptr = packed_ptr.to(tl.pointer_type(tl.float16))
    words_ptr = packed_ptr.to(tl.pointer_type(tl.uint16))
    block = tl.arange(0, TILE)[:, None]
    group = tl.arange(0, 4)[None, :]
    mask = block < n_quant_blocks - first
    d = tl.load(halves_ptr + block * 88, mask=mask, other=0.0).to(tl.float32)
    dmin = tl.load(halves_ptr + block * 88 + 1, mask=mask, other=0.0).to(tl.float32)
    scale_even, scale_odd, min_even, min_odd = six_bit_pair(
        words_ptr, block * 88 + 2, group, mask, MANTISSA
    )

    lane = tl.arange(0, 32)[None, None, :]
    block, group, mask = block[:, :, None], group[:, :, None], mask[:, :, None]
    block_ptr = packed_ptr + block * 176
    codes = tl.load(block_ptr + 48 + group * 32 + lane, mask=mask, other=0).to(tl.int32)
    # Every group loads the same 32 bytes again, from cache: that leaves loads of 16 bytes a thread,
    # which is worth more (0.96 of copy against 0.88) than unpacking a byte once for all groups.
    fifth = tl.load(block_ptr + 16 + group * 0 + lane, mask=mask, other=0).to(tl.int32)
    fifth = fifth >> (group * 2)
    even = (codes & 0x0F) | ((fifth << 4) & 0x10)
    odd = (codes & 0xF0) | ((fifth << 7) & 0x100)
    even = (d * scale_even)[:, :, None] * to_float(even, 0, MANTISSA) - (dmin * min_even)[
        :, :, None
    ]
    odd = (d * scale_odd * 0.0625)[:, :, None] * to_float(odd, 0, MANTISSA)
    odd -= (dmin * min_odd)[:, :, None]
    outs = out_ptr + block * 256 + group * 64 + lane
    tl.store(outs, even.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(outs + 32, odd.to(out_ptr.dtype.element_ty), mask=mask)


KERNEL = DequantKernel(
    jit=_dequantize_q5_k_kernel,
    block_size=256,
    type_size=176,
    tile=4,
    num_warps=1,
    mantissa=False,
    sweep=((2, 1), (4, 1), (4, 2), (8, 1), (8, 2), (16, 4), (32, 8)),
)
