"""Q2_K: 256 weights in 84 bytes.

| bytes | what |
|---|---|
| 0..15 | scale (low nibble) and minimum (high nibble) of each 16 weights |
| 16..79 | two-bit codes: byte 32h + l, crumb s for weight 128h + 32s + l |
| 80..81 | d, f16: scale of the scales |
| 82..83 | dmin, f16: scale of the minima |

Weight = d * scale * code - dmin * minimum.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are in capitals, as everywhere in Triton
import triton
import triton.language as tl

from .codes import to_float
from .launch import DequantKernel


@triton.jit(do_not_specialize=["n_quant_blocks"])
def _dequantize_q2_k_kernel(
    packed_ptr, out_ptr, n_quant_blocks, TILE: tl.constexpr, MANTISSA: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * TILE
    packed_ptr += first * 84
    out_ptr += first * 256
    halves_ptr = packed_ptr.to(tl.pointer_type(tl.float16))
    # A part is 16 bytes of codes: half h = part >> 1, lanes 16 (part & 1) onwards.
    block = tl.arange(0, TILE)[:, None]
    part = tl.arange(0, 4)[None, :]
    mask = block < n_quant_blocks - first
    d = tl.load(halves_ptr + block * 42 + 40, mask=mask, other=0.0).to(tl.float32)
    dmin = tl.load(halves_ptr + block * 42 + 41, mask=mask, other=0.0).to(tl.float32)
    pairs_ptr = packed_ptr + block * 84 + (part >> 1) * 8 + (part & 1)

    lane = tl.arange(0, 16)[None, None, :]
    block3, part3, mask3 = block[:, :, None], part[:, :, None], mask[:, :, None]
    codes = tl.load(packed_ptr + block3 * 84 + 16 + part3 * 16 + lane, mask=mask3, other=0)
    codes = codes.to(tl.int32)
    outs = out_ptr + block3 * 256 + (part3 >> 1) * 128 + (part3 & 1) * 16 + lane
    for crumb in tl.static_range(4):
        pair = tl.load(pairs_ptr + crumb * 2, mask=mask, other=0).to(tl.int32)
        scale = (d * 0.25**crumb) * to_float(pair & 0x0F, 0, MANTISSA)
        minimum = dmin * to_float(pair >> 4, 0, MANTISSA)
        out = (
            scale[:, :, None] * to_float(codes & (3 << (crumb * 2)), 0, MANTISSA)
            - minimum[:, :, None]
        )
        tl.store(outs + crumb * 32, out.to(out_ptr.dtype.element_ty), mask=mask3)


KERNEL = DequantKernel(
    jit=_dequantize_q2_k_kernel,
    block_size=256,
    type_size=84,
    tile=8,
    num_warps=1,
    mantissa=False,
    sweep=((8, 1), (8, 2), (16, 2), (16, 4), (32, 4), (32, 8)),
)
