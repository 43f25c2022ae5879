"""Torch twins of the codebook, ternary and micro-scaled float types.

Same contract as `reference.py`. Codebooks are read at run time from the gguf package (its own
tables, so that they cannot drift from it) and handed in as one flat float32 tensor per type.
IQ4_NL and IQ4_XS also have kernels; the others run here only, and are reported as slow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .reference import bits, crumbs, half_at, nibbles


def codebook(name: str) -> Tensor | None:
    """The constant table of a type, from the gguf package, as flat float32 on the CPU.

    Args:
        name: the type's name in `GGMLQuantizationType`.

    Returns:
        The grid (types with one), followed by the 128 sign patterns for the types that index them;
        the 16 values of the 4-bit types; `None` for types without a table.
    """
    import gguf.quants
    import numpy as np

    def grid(of: str) -> Any:
        cls = getattr(gguf.quants, of)
        cls.init_grid()
        return cls.grid.reshape(-1)

    def signs() -> Any:
        return np.frombuffer(gguf.quants.IQ2_XXS.ksigns, dtype=np.uint8)

    parts: list[Any] = []
    if name in ("IQ4_NL", "IQ4_XS"):
        parts = [gguf.quants.IQ4_NL.kvalues]
    elif name == "MXFP4":
        parts = [gguf.quants.MXFP4.kvalues]
    elif name == "NVFP4":
        scales = gguf.quants.NVFP4.ue4m3_to_fp32(np.arange(256, dtype=np.uint8))
        parts = [gguf.quants.NVFP4.kvalues, scales]
    elif name in ("IQ2_XXS", "IQ2_XS", "IQ3_XXS"):
        parts = [grid(name), signs()]
    elif name in ("IQ2_S", "IQ3_S", "IQ1_S", "IQ1_M"):
        parts = [grid(name)]
    if not parts:
        return None
    return torch.from_numpy(np.concatenate([np.asarray(p, dtype=np.float32) for p in parts]))


def word_at(codes: Tensor) -> Tensor:
    """`(..., 2 * k) uint8`, little-endian, to `(..., k) int32` of 16-bit numbers."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 2).int()
    return pairs[..., 0] | (pairs[..., 1] << 8)


def _sign_of(patterns: Tensor) -> Tensor:
    """`(..., k)` bit patterns to `(..., k, 8) float32` of +1 and -1, lowest bit first."""
    return 1.0 - 2.0 * torch.stack([(patterns >> i) & 1 for i in range(8)], dim=-1).float()


def _look_up(table: Tensor, codes: Tensor, width: int, count: int) -> Tensor:
    """Rows of the first `count` of `width` values each: `(..., k)` to `(..., k, width)`."""
    return table[: count * width].view(count, width)[codes.long()]


def dequantize_iq4_nl(blocks: Tensor, table: Tensor) -> Tensor:
    """32 weights in 18 bytes: d f16, 16 bytes of nibbles into a table of 16."""
    return half_at(blocks, 0) * table[nibbles(blocks[:, 2:]).flatten(1).long()]


def dequantize_iq4_xs(blocks: Tensor, table: Tensor) -> Tensor:
    """256 weights in 136 bytes: d f16, u16 of high and 4 of low scale bits, 128 of nibbles."""
    low = nibbles(blocks[:, 4:8]).transpose(1, 2).flatten(1)
    high = crumbs(blocks[:, 2:4]).transpose(1, 2).flatten(1)
    scales = half_at(blocks, 0) * ((low | (high << 4)).float() - 32.0)
    codes = nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32)
    return (scales.unsqueeze(2) * table[codes.long()]).flatten(1)


def dequantize_iq3_xxs(blocks: Tensor, table: Tensor) -> Tensor:
    """256 weights in 98 bytes: d f16, 64 grid indices, 8 u32 of four 7-bit signs and a scale."""
    words = word_at(blocks[:, 66:]).reshape(-1, 8, 2)
    packed = words[..., 0] | (words[..., 1] << 16)
    scales = half_at(blocks, 0) * (0.5 + ((packed >> 28) & 15).float()) * 0.5
    index = torch.stack([(packed >> s) & 127 for s in (0, 7, 14, 21)], dim=-1)
    signs = _sign_of(table[1024:].int()[index.long()])
    grid = _look_up(table, blocks[:, 2:66], 4, 256).reshape(-1, 8, 4, 8)
    return (scales.reshape(-1, 8, 1, 1) * grid * signs).flatten(1)


def dequantize_iq3_s(blocks: Tensor, table: Tensor) -> Tensor:
    """256 weights in 110 bytes: d f16, 64 indices, 8 of ninth bits, 32 of signs, 4 of scales."""
    scales = half_at(blocks, 0) * (
        1.0 + 2.0 * nibbles(blocks[:, 106:]).transpose(1, 2).flatten(1).float()
    )
    ninth = bits(blocks[:, 66:74]).transpose(1, 2).flatten(1).int() << 8
    grid = _look_up(table, blocks[:, 2:66].int() | ninth, 4, 512).reshape(-1, 8, 4, 8)
    signs = _sign_of(blocks[:, 74:106]).reshape(-1, 8, 4, 8)
    return (scales.reshape(-1, 8, 1, 1) * grid * signs).flatten(1)


def dequantize_iq2_xxs(blocks: Tensor, table: Tensor) -> Tensor:
    """256 weights in 66 bytes: d f16, 8 of (4 indices, u32 of four 7-bit signs and a scale)."""
    groups = blocks[:, 2:].reshape(-1, 8, 8)
    words = word_at(groups[..., 4:])
    packed = words[..., 0] | (words[..., 1] << 16)
    scales = half_at(blocks, 0) * (0.5 + ((packed >> 28) & 15).float()) * 0.25
    index = torch.stack([(packed >> s) & 127 for s in (0, 7, 14, 21)], dim=-1)
    signs = _sign_of(table[2048:].int()[index.long()])
    grid = _look_up(table, groups[..., :4], 8, 256)
    return (scales.reshape(-1, 8, 1, 1) * grid * signs).flatten(1)


def _scale_pairs(half: Tensor, codes: Tensor) -> Tensor:
    """Sixteen 4-bit scales of IQ2_XS and IQ2_S, as `(n, 16, 1, 1) float32`."""
    scales = nibbles(codes).transpose(1, 2).flatten(1).float()
    return (half * (0.5 + scales) * 0.25).reshape(-1, 16, 1, 1)


def dequantize_iq2_xs(blocks: Tensor, table: Tensor) -> Tensor:
    """256 weights in 74 bytes: d f16, 32 u16 (9 bits of index, 7 of signs), 8 bytes of scales."""
    words = word_at(blocks[:, 2:66])
    signs = _sign_of(table[4096:].int()[(words >> 9).long()]).reshape(-1, 16, 2, 8)
    grid = _look_up(table, words & 511, 8, 512).reshape(-1, 16, 2, 8)
    return (_scale_pairs(half_at(blocks, 0), blocks[:, 66:]) * grid * signs).flatten(1)


def dequantize_iq2_s(blocks: Tensor, table: Tensor) -> Tensor:
    """256 weights in 82 bytes: d f16, 32 indices, 32 of signs, 8 of high bits, 8 of scales."""
    high = crumbs(blocks[:, 66:74]).transpose(1, 2).flatten(1).int() << 8
    grid = _look_up(table, blocks[:, 2:34].int() | high, 8, 1024).reshape(-1, 16, 2, 8)
    signs = _sign_of(blocks[:, 34:66]).reshape(-1, 16, 2, 8)
    return (_scale_pairs(half_at(blocks, 0), blocks[:, 74:]) * grid * signs).flatten(1)


_IQ1_DELTA = 0.125


def dequantize_iq1_s(blocks: Tensor, table: Tensor) -> Tensor:
    """256 weights in 50 bytes: d f16, 32 indices, 8 u16 (four 3-bit highs, scale, delta sign)."""
    words = word_at(blocks[:, 34:])
    scales = half_at(blocks, 0) * (2.0 * ((words >> 12) & 7).float() + 1.0)
    delta = _IQ1_DELTA - 2.0 * _IQ1_DELTA * ((words >> 15) & 1).float()
    high = torch.stack([(words >> s) & 7 for s in (0, 3, 6, 9)], dim=-1).flatten(1) << 8
    grid = _look_up(table, blocks[:, 2:34].int() | high, 8, 2048).reshape(-1, 8, 32)
    return (scales.unsqueeze(2) * (grid + delta.unsqueeze(2))).flatten(1)


def dequantize_iq1_m(blocks: Tensor, table: Tensor) -> Tensor:
    """256 weights in 56 bytes: 32 indices, 16 of highs and delta signs, 4 u16 of scales and d."""
    words = word_at(blocks[:, 48:])
    # The fp16 scale is spread over the top nibbles of the four words, lowest first.
    d = words >> 12
    d = d[:, :1] | (d[:, 1:2] << 4) | (d[:, 2:3] << 8) | (d[:, 3:] << 12)
    half = d.to(torch.int16).view(torch.float16).float()
    codes = torch.stack([(words >> s) & 7 for s in (0, 3, 6, 9)], dim=-1).flatten(1)
    scales = (half * (2.0 * codes.float() + 1.0)).reshape(-1, 16, 1, 1)
    high = nibbles(blocks[:, 32:48]).transpose(1, 2).flatten(1).int()
    delta = _IQ1_DELTA - 2.0 * _IQ1_DELTA * (high >> 3).float()
    grid = _look_up(table, blocks[:, :32].int() | ((high & 7) << 8), 8, 2048)
    return (scales * (grid + delta.unsqueeze(2)).reshape(-1, 16, 2, 8)).flatten(1)


def _trits(codes: Tensor, digits: int) -> Tensor:
    """`(n, k) uint8` to `(n, digits * k) float32` of -1, 0, 1: base-3 digits, highest first."""
    powers = [(codes * (3**i)).int() * 3 >> 8 for i in range(digits)]
    return torch.cat(powers, dim=1).float() - 1.0


def dequantize_tq1_0(blocks: Tensor) -> Tensor:
    """256 ternary weights in 54 bytes: 48 bytes of five, 4 bytes of four, d f16."""
    codes = (_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4))
    return half_at(blocks, 52) * torch.cat(codes, dim=1)


def dequantize_tq2_0(blocks: Tensor) -> Tensor:
    """256 ternary weights in 66 bytes: 64 bytes of 2-bit codes, d f16."""
    codes = crumbs(blocks[:, :64].reshape(-1, 2, 32)).flatten(1).float() - 1.0
    return half_at(blocks, 64) * codes


def dequantize_mxfp4(blocks: Tensor, table: Tensor) -> Tensor:
    """32 weights in 17 bytes: a power-of-two exponent, 16 bytes of nibbles into a table of 16."""
    exponent = blocks[:, :1].int()
    # Half of 2^(e - 127): the two lowest exponents are denormal.
    normal, denormal = (exponent - 1) << 23, 0x00200000 << exponent.clamp(max=1)
    scale = torch.where(exponent < 2, denormal, normal).view(torch.float32)
    return scale * table[nibbles(blocks[:, 1:]).flatten(1).long()]


def dequantize_nvfp4(blocks: Tensor, table: Tensor) -> Tensor:
    """64 weights in 36 bytes: four 8-bit float scales, 4 x 8 bytes of nibbles."""
    scales = table[16:][blocks[:, :4].long()].reshape(-1, 4, 1)
    codes = nibbles(blocks[:, 4:].reshape(-1, 4, 8)).flatten(2)
    return (scales * table[codes.long()]).flatten(1)
