"""Packed weights of every GGUF type with chosen contents, checked against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from speed_tier.speed.kernels import BY_ID, QUANT_TYPES, QuantType, dequantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BY_NAME = {row.name: row for row in QUANT_TYPES}
# Byte offsets of the fp16 fields of a quant_block.
HALVES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS"), (0,)),
    **dict.fromkeys(("IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "F16"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
CONTENTS = ("random", "denormal", "extreme", "ones", "zeros")


def scales(content: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """`(count,) float16` for the scale fields: never inf or nan."""
    if content == "denormal":
        bits = rng.integers(1, 0x400, count, dtype=np.uint16) | (
            rng.integers(0, 2, count, dtype=np.uint16) << 15
        )
        return bits.view(np.float16)
    if content == "extreme":
        return rng.choice(np.float16([65504, -65504, 6.1e-5, -6e-8, 0.0, -0.0, 1.0]), count)
    if content == "zeros":
        return np.zeros(count, np.float16)
    return (rng.standard_normal(count) * 0.01).astype(np.float16)


def packed(name: str, content: str, n_quant_blocks: int, seed: int = 0) -> np.ndarray:
    """`(n_quant_blocks, type_size) uint8`: codes as `content` says, scales finite."""
    rng = np.random.default_rng([seed, len(name), *name.encode()])
    size = BY_NAME[name].type_size
    if content == "ones":
        blocks = np.full((n_quant_blocks, size), 0xFF, np.uint8)
    elif content == "zeros":
        blocks = np.zeros((n_quant_blocks, size), np.uint8)
    else:
        blocks = rng.integers(0, 256, (n_quant_blocks, size), dtype=np.uint8)
    for at in HALVES.get(name, ()):
        half = np.ascontiguousarray(scales(content, n_quant_blocks, rng)).view(np.uint8)
        blocks[:, at : at + 2] = half.reshape(-1, 2)
    if name == "IQ1_M":  # the fp16 scale stands in the top nibbles of the last four words
        half = scales(content, n_quant_blocks, rng).view(np.uint16)
        words = np.ascontiguousarray(blocks[:, 48:]).view(np.uint16)
        for i in range(4):
            words[:, i] = (words[:, i] & 0x0FFF) | (((half >> (4 * i)) & 15) << 12)
        blocks[:, 48:] = words.view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(0, 250, n_quant_blocks)
        if content == "denormal":
            blocks[:, 0] = rng.integers(0, 3, n_quant_blocks)
    if name in ("BF16", "F32"):  # every bit pattern but inf and nan
        floats = blocks[:, -2:].copy().view(np.uint16)
        floats[(floats & 0x7F80) == 0x7F80] &= 0xBF7F
        if content == "denormal":
            floats &= 0x807F
        blocks[:, -2:] = floats.view(np.uint8)
    return blocks


def oracle(name: str, blocks: np.ndarray) -> torch.Tensor:
    """The gguf package's numpy dequantisation, flat float32."""
    out = gguf.quants.dequantize(blocks, GGMLQuantizationType[name])
    return torch.from_numpy(np.ascontiguousarray(out, dtype=np.float32).reshape(-1))


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal as bytes, so that -0.0 is not 0.0."""
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def check_path(name: str, path: str, content: str, rows: int, cols: int) -> None:
    """Every output dtype against the oracle: fp32 bit for bit, the others rounded once."""
    row = BY_NAME[name]
    blocks = packed(name, content, rows * cols // row.block_size)
    expected = oracle(name, blocks).reshape(rows, cols)
    assert torch.isfinite(expected).all()
    device_blocks = torch.from_numpy(blocks).to(DEVICE)
    for dtype in DTYPES:
        out = dequantize(device_blocks, row.id, rows, cols, dtype, path=path)
        assert out.shape == (rows, cols) and out.dtype == dtype
        assert equal_bits(out, expected.to(dtype)), (name, path, content, dtype)


def kernel_cases() -> list:
    """`(content, rows, cols)`: every content, odd row counts, one quant_block, several tiles."""
    cases = [(content, 5, 768) for content in CONTENTS]
    return [pytest.param(*c, id="-".join(map(str, c))) for c in [*cases, ("random", 1, 256)]]


def check_shifted_and_odd_addresses(name: str) -> None:
    """A row slice starts at an even address; an odd one is refused with a sentence."""
    from speed_tier.speed.errors import KernelConstraintError

    row = BY_NAME[name]
    blocks = packed(name, "random", 3)
    expected = oracle(name, blocks).reshape(1, -1)
    storage = torch.zeros(blocks.size + 2, dtype=torch.uint8, device=DEVICE)
    shifted = storage[2:]
    shifted.copy_(torch.from_numpy(blocks.reshape(-1)))
    out = dequantize(shifted, row.id, 1, expected.numel(), torch.float32, path="kernel")
    assert equal_bits(out, expected)
    odd = storage[1:-1]
    with pytest.raises(KernelConstraintError, match="even address"):
        dequantize(odd, row.id, 1, expected.numel(), torch.float32, path="kernel")


def check_several_tiles(name: str) -> None:
    """More than one program, and a last one that is not full."""
    from speed_tier.speed.kernels.dispatch import kernel_for

    row = BY_NAME[name]
    n_quant_blocks = kernel_for(row).tile * 2 + 1
    blocks = packed(name, "random", n_quant_blocks)
    out = dequantize(
        torch.from_numpy(blocks).to(DEVICE),
        row.id,
        n_quant_blocks,
        row.block_size,
        torch.bfloat16,
        path="kernel",
    )
    assert equal_bits(out.flatten(), oracle(name, blocks).to(torch.bfloat16))


def gguf_sizes(row: QuantType) -> tuple[int, int]:
    return GGML_QUANT_SIZES[GGMLQuantizationType(row.id)]


__all__ = ["BY_ID", "BY_NAME", "CONTENTS", "DEVICE", "DTYPES", "QUANT_TYPES"]
