"""Q6_K: 256 weights in 210 bytes.

| bytes | what |
|---|---|
| 0..127 | low four bits: byte 64h + l, nibbles for weights 128h + l and 128h + 64 + l |
| 128..191 | high two bits: byte 32h + l, crumb s for weight 128h + 32s + l (l below 32) |
| 192..207 | 16 int8 scales, one for 16 weights |
| 208..209 | d, f16 |

Weight = d * scale * (six-bit code - 32).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are in capitals, as everywhere in Triton
import triton
import triton.language as tl

from .codes import signed_to_float, to_float
from .launch import DequantKernel


@triton.jit(do_not_specialize=["n_quant_blocks"])
def _dequantize_q6_k_kernel(
    packed_ptr, out_ptr, n_quant_blocks, TILE: tl.constexpr, MANTISSA: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * TILE
    packed_ptr += first * 210
    out_ptr += first * 256
    halves_ptr = packed_ptr.to(tl.pointer_type(tl.float16))
    # A part is 16 bytes of high bits: half h = part >> 1, lanes 16 (part & 1) onwards.
    block = tl.arange(0, TILE)[:, None]
    part = tl.arange(0, 4)[None, :]
    mask = block < n_quant_blocks - first
    d = tl.load(halves_ptr + block * 105 + 104, mask=mask, other=0.0).to(tl.float32)
    scales_ptr = packed_ptr + block * 210 + 192 + (part >> 1) * 8 + (part & 1)

    lane = tl.arange(0, 16)[None, None, :]
    block3, part3, mask3 = block[:, :, None], part[:, :, None], mask[:, :, None]
    lows_ptr = packed_ptr + block3 * 210 + (part3 >> 1) * 64 + (part3 & 1) * 16 + lane
    # The file's 210 bytes a block allow loads of two bytes only. What helps is to give the many
    # masked-off registers no value, and to let the stores stream past the cache.
    near = tl.load(lows_ptr, mask=mask3).to(tl.int32)
    far = tl.load(lows_ptr + 32, mask=mask3).to(tl.int32)
    high = tl.load(packed_ptr + block3 * 210 + 128 + part3 * 16 + lane, mask=mask3)
    high = high.to(tl.int32)
    outs = out_ptr + block3 * 256 + (part3 >> 1) * 128 + (part3 & 1) * 16 + lane
    for quarter in tl.static_range(4):
        scale = tl.load(scales_ptr + quarter * 2, mask=mask)
        scale = d * signed_to_float(scale, MANTISSA)
        low = near if quarter % 2 == 0 else far
        if quarter < 2:
            code = (low & 0x0F) | ((high << (4 - quarter * 2)) & 0x30)
            out = scale[:, :, None] * to_float(code, 32, MANTISSA)
        else:
            code = (low & 0xF0) | ((high << (8 - quarter * 2)) & 0x300)
            out = (scale * 0.0625)[:, :, None] * to_float(code, 512, MANTISSA)
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(outs + quarter * 32, out, mask=mask3, cache_modifier=".cs")


KERNEL = DequantKernel(
    jit=_dequantize_q6_k_kernel,
    block_size=256,
    type_size=210,
    tile=4,
    num_warps=1,
    mantissa=False,
    sweep=((2, 1), (4, 1), (8, 1), (8, 2), (16, 2), (16, 4), (32, 4), (32, 8)),
)
