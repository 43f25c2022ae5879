"""IQ4_NL: 32 weights in 18 bytes.

| bytes | what |
|---|---|
| 0..1 | d, f16 |
| 2..17 | 16 bytes: low nibbles are weights 0..15, high nibbles 16..31 |

Weight = d * codebook[nibble], 16 int8 entries.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are in capitals, as everywhere in Triton
import triton
import triton.language as tl

from .codes import codebook_value
from .launch import DequantKernel


@triton.jit(do_not_specialize=["n_quant_blocks"])
def _dequantize_iq4_nl_kernel(
    packed_ptr, out_ptr, n_quant_blocks, TILE: tl.constexpr, MANTISSA: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * TILE
    packed_ptr += first * 18
    out_ptr += first * 32
    halves_ptr = packed_ptr.to(tl.pointer_type(tl.float16))
    block = tl.arange(0, TILE)[:, None]
    lane = tl.arange(0, 16)[None, :]
    mask = block < n_quant_blocks - first
    d = tl.load(halves_ptr + block * 9, mask=mask, other=0.0).to(tl.float32)
    codes = tl.load(packed_ptr + block * 18 + 2 + lane, mask=mask, other=0).to(tl.int32)
    low = d * codebook_value(codes & 0x0F, 1.0, MANTISSA)
    high = d * codebook_value(codes & 0xF0, 0.0625, MANTISSA)
    outs = out_ptr + block * 32 + lane
    tl.store(outs, low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(outs + 16, high.to(out_ptr.dtype.element_ty), mask=mask)


KERNEL = DequantKernel(
    jit=_dequantize_iq4_nl_kernel,
    block_size=32,
    type_size=18,
    tile=64,
    num_warps=4,
    mantissa=False,
    sweep=((32, 2), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8)),
)
