"""Q3_K: 256 weights in 110 bytes.

| bytes | what |
|---|---|
| 0..31 | bit 4h + s of byte l is the third bit of weight 128h + 32s + l |
| 32..95 | low two bits: byte 32h + l, crumb s for weight 128h + 32s + l |
| 96..103 | low nibbles of the 16 six-bit scales: scale k in byte k & 7, nibble k >> 3 |
| 104..107 | high crumbs of the scales: scale k in byte k & 3, crumb k >> 2 |
| 108..109 | d, f16 |

Weight = d * (scale - 32) * (three-bit code - 4), one scale for 16 weights.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are in capitals, as everywhere in Triton
import triton
import triton.language as tl

from .codes import to_float
from .launch import DequantKernel


@triton.jit(do_not_specialize=["n_quant_blocks"])
def _dequantize_q3_k_kernel(
    packed_ptr, out_ptr, n_quant_blocks, TILE: tl.constexpr, MANTISSA: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * TILE
    packed_ptr += first * 110
    out_ptr += first * 256
    halves_ptr = packed_ptr.to(tl.pointer_type(tl.float16))
    # A part is 16 bytes of codes: half h = part >> 1, lanes 16 (part & 1) onwards.
    block = tl.arange(0, TILE)[:, None]
    part = tl.arange(0, 4)[None, :]
    mask = block < n_quant_blocks - first
    d = tl.load(halves_ptr + block * 55 + 54, mask=mask, other=0.0).to(tl.float32)
    scales_ptr = packed_ptr + block * 110 + 96 + (part & 1)

    lane = tl.arange(0, 16)[None, None, :]
    block3, part3, mask3 = block[:, :, None], part[:, :, None], mask[:, :, None]
    codes = tl.load(packed_ptr + block3 * 110 + 32 + part3 * 16 + lane, mask=mask3, other=0)
    codes = codes.to(tl.int32)
    third = tl.load(packed_ptr + block3 * 110 + (part3 & 1) * 16 + lane, mask=mask3, other=0)
    third = third.to(tl.int32) >> ((part3 >> 1) * 4)
    outs = out_ptr + block3 * 256 + (part3 >> 1) * 128 + (part3 & 1) * 16 + lane
    for crumb in tl.static_range(4):
        low = tl.load(scales_ptr + crumb * 2, mask=mask, other=0).to(tl.int32)
        high = tl.load(scales_ptr + 8 + (crumb % 2) * 2, mask=mask, other=0).to(tl.int32)
        low = (low >> ((part >> 1) * 4)) & 15
        high = (high >> ((part >> 1) * 4 + (crumb // 2) * 2)) & 3
        scale = (d * 0.25**crumb) * to_float(low | (high << 4), 32, MANTISSA)
        code = (codes & (3 << (crumb * 2))) | ((third << (crumb + 2)) & (4 << (crumb * 2)))
        out = scale[:, :, None] * to_float(code, 4 << (crumb * 2), MANTISSA)
        tl.store(outs + crumb * 32, out.to(out_ptr.dtype.element_ty), mask=mask3)


KERNEL = DequantKernel(
    jit=_dequantize_q3_k_kernel,
    block_size=256,
    type_size=110,
    tile=8,
    num_warps=1,
    mantissa=False,
    sweep=((8, 1), (8, 2), (16, 2), (16, 4), (32, 4), (32, 8)),
)
