"""Torch twins of the kernels: the definition of what each GGUF quant type means, on any device.

A `quant_block` is GGUF's unit: `type_size` bytes that hold `block_size` weights. Every function
here takes `(n_quant_blocks, type_size) uint8` and gives `(n_quant_blocks, block_size) float32`;
`dequantize_blocks` rounds that once to the output dtype. Products of an fp16 scale, a sub-block
scale and a code fit fp32's 24 bits in every type, so the only rounding before that is the one
subtraction or addition of types with a minimum: a fused multiply-add gives the same bits.

No function makes a constant tensor on the device (that would synchronise, and could not be captured
in a CUDA graph): codes are unpacked by scalar shifts and `stack`, tables come in as arguments.

Source: the layouts of the gguf package (`gguf.quants`), which is also the tests' oracle.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BlockFunction = Callable[..., Tensor]


def half_at(blocks: Tensor, byte: int) -> Tensor:
    """The fp16 field at an even byte offset, as `(n_quant_blocks, 1) float32`."""
    return blocks[:, byte : byte + 2].view(torch.float16).float()


def nibbles(codes: Tensor) -> Tensor:
    """`(..., k) uint8` to `(..., 2, k)`: low nibbles, then high nibbles."""
    return torch.stack((codes & 15, codes >> 4), dim=-2)


def crumbs(codes: Tensor) -> Tensor:
    """`(..., k) uint8` to `(..., 4, k)`: the four 2-bit codes of a byte, lowest first."""
    return torch.stack((codes & 3, (codes >> 2) & 3, (codes >> 4) & 3, codes >> 6), dim=-2)


def bits(codes: Tensor) -> Tensor:
    """`(..., k) uint8` to `(..., 8, k)`: the eight bits of a byte, lowest first."""
    return torch.stack([(codes >> i) & 1 for i in range(8)], dim=-2)


def dequantize_q8_0(blocks: Tensor) -> Tensor:
    """32 weights in 34 bytes: d f16, 32 int8."""
    return half_at(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def dequantize_q4_0(blocks: Tensor) -> Tensor:
    """32 weights in 18 bytes: d f16, 16 bytes of nibbles (low = first half), offset 8."""
    codes = nibbles(blocks[:, 2:]).flatten(1).float() - 8.0
    return half_at(blocks, 0) * codes


def dequantize_q4_1(blocks: Tensor) -> Tensor:
    """32 weights in 20 bytes: d f16, m f16, 16 bytes of nibbles."""
    return half_at(blocks, 0) * nibbles(blocks[:, 4:]).flatten(1).float() + half_at(blocks, 2)


def _fifth_bits(high: Tensor) -> Tensor:
    """`(n, 4) uint8`, one bit a weight, to `(n, 32)` holding 0 or 16."""
    return bits(high).transpose(1, 2).flatten(1) << 4


def dequantize_q5_0(blocks: Tensor) -> Tensor:
    """32 weights in 22 bytes: d f16, 4 bytes of fifth bits, 16 bytes of nibbles, offset 16."""
    codes = nibbles(blocks[:, 6:]).flatten(1) | _fifth_bits(blocks[:, 2:6])
    return half_at(blocks, 0) * (codes.float() - 16.0)


def dequantize_q5_1(blocks: Tensor) -> Tensor:
    """32 weights in 24 bytes: d f16, m f16, 4 bytes of fifth bits, 16 bytes of nibbles."""
    codes = nibbles(blocks[:, 8:]).flatten(1) | _fifth_bits(blocks[:, 4:8])
    return half_at(blocks, 0) * codes.float() + half_at(blocks, 2)


def dequantize_q2_k(blocks: Tensor) -> Tensor:
    """256 weights in 84 bytes: 16 scale/min nibble pairs, 64 bytes of 2-bit codes, d, dmin f16."""
    pairs = blocks[:, :16]
    scales = (half_at(blocks, 80) * (pairs & 15).float()).unsqueeze(2)
    minima = (half_at(blocks, 82) * (pairs >> 4).float()).unsqueeze(2)
    codes = crumbs(blocks[:, 16:80].reshape(-1, 2, 32)).reshape(-1, 16, 16).float()
    return (scales * codes - minima).flatten(1)


def dequantize_q3_k(blocks: Tensor) -> Tensor:
    """256 weights in 110 bytes: 32 high-bit masks, 64 of 2-bit codes, 12 of 6-bit scales, d f16."""
    low = nibbles(blocks[:, 96:104]).flatten(1)
    high = crumbs(blocks[:, 104:108]).flatten(1)
    scales = (half_at(blocks, 108) * ((low | (high << 4)).float() - 32.0)).unsqueeze(2)
    codes = crumbs(blocks[:, 32:96].reshape(-1, 2, 32)).reshape(-1, 16, 16).float()
    # A clear mask bit means "four less".
    third = bits(blocks[:, :32]).reshape(-1, 16, 16).float()
    return (scales * (codes + third * 4.0 - 4.0)).flatten(1)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 + 8 six-bit numbers of bytes 4..15 (Q4_K, Q5_K), times d and dmin: two `(n, 8, 1)`."""
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minima = torch.cat((mid & 63, (high >> 4) | ((mid >> 2) & 48)), dim=1)
    return (
        (half_at(blocks, 0) * scales.float()).unsqueeze(2),
        (half_at(blocks, 2) * minima.float()).unsqueeze(2),
    )


def dequantize_q4_k(blocks: Tensor) -> Tensor:
    """256 weights in 144 bytes: d, dmin f16, 12 of 6-bit scales and minima, 128 of nibbles."""
    scales, minima = _scales_and_minima(blocks)
    codes = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).float()
    return (scales * codes - minima).flatten(1)


def dequantize_q5_k(blocks: Tensor) -> Tensor:
    """256 weights in 176 bytes: as Q4_K, with 32 bytes of fifth bits before the nibbles."""
    scales, minima = _scales_and_minima(blocks)
    codes = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    codes = (codes | (bits(blocks[:, 16:48]) << 4)).float()
    return (scales * codes - minima).flatten(1)


def dequantize_q6_k(blocks: Tensor) -> Tensor:
    """256 weights in 210 bytes: 128 of low nibbles, 64 of high crumbs, 16 int8 scales, d f16."""
    scales = (half_at(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()).unsqueeze(2)
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 16, 16)
    high = crumbs(blocks[:, 128:192].reshape(-1, 2, 32)).reshape(-1, 16, 16)
    codes = (low | (high << 4)).float() - 32.0
    return (scales * codes).flatten(1)


def dequantize_bf16(blocks: Tensor) -> Tensor:
    """One weight in 2 bytes."""
    return blocks.view(torch.bfloat16).float()


def dequantize_f16(blocks: Tensor) -> Tensor:
    """One weight in 2 bytes."""
    return blocks.view(torch.float16).float()


def dequantize_f32(blocks: Tensor) -> Tensor:
    """One weight in 4 bytes."""
    return blocks.view(torch.float32)


def dequantize_blocks(
    blocks: Tensor, function: BlockFunction, dtype: torch.dtype, table: Tensor | None = None
) -> Tensor:
    """`(n_quant_blocks, type_size) uint8` to `(n_quant_blocks, block_size)` of `dtype`."""
    return (function(blocks) if table is None else function(blocks, table)).to(dtype)


def dequantize_reference(
    packed: Tensor,
    function: BlockFunction,
    type_size: int,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    table: Tensor | None = None,
) -> Tensor:
    """Dequantise a packed weight with torch operations only.

    Args:
        packed: any shape of uint8 that holds `rows * cols` weights, contiguous.
        function: the type's block function from this package.
        type_size: bytes of one quant_block.
        rows, cols: the weight's logical shape.
        dtype: bfloat16, float16 or float32.
        table: the type's codebook on `packed.device`, for the types that have one.

    Returns:
        `(rows, cols)` of `dtype`: the fp32 value, rounded once.
    """
    blocks = packed.reshape(-1, type_size)
    return dequantize_blocks(blocks, function, dtype, table).reshape(rows, cols)
