"""GGUF files of a model's full size, with random weights: for speed, not for pictures.

Tensors of equal type and shape hold the same bytes: a file of 13 GB takes seconds to write, and to
a kernel they are different weights at different addresses.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

# Blocks that are really quantised; a tensor is filled with random picks of them.
_POOL_BLOCKS = 4096


def tensor_table(family: str, layers: int | None) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the host's own model."""
    from .host_session import empty_model

    return [
        (name, tuple(parameter.shape))
        for name, parameter in empty_model(family, layers).diffusion_model.named_parameters()
        if name != "norm_final.weight"  # built by 0.3.75, read by nobody, in no file
    ]


def write_model(path: Path, family: str, recipe: str, layers: int | None = None) -> dict[str, int]:
    """Write a file with the recipe's mix of types; returns how many tensors each type has."""
    from speed_tier.tests.speed.gguf.packer import mixed

    table = tensor_table(family, layers)
    stem = "layers." if family == "z_image" else "transformer_blocks."
    n_layers = 1 + max(int(n.split(".")[1]) for n, _ in table if n.startswith(stem))
    plan = mixed(table, recipe, n_layers)
    writer = gguf.GGUFWriter(path, "lumina2" if family == "z_image" else "qwen_image")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, shape, qtype in plan:
        block_size, type_size = GGML_QUANT_SIZES[qtype]
        byte_shape = (*shape[:-1], shape[-1] // block_size * type_size)
        n_bytes = int(np.prod(byte_shape))
        writer.add_tensor_info(name, byte_shape, np.dtype(np.uint8), n_bytes, qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    made: dict[Any, np.ndarray] = {}
    counts: dict[str, int] = {}
    for name, shape, qtype in plan:
        is_norm = len(shape) == 1 and "norm" in name
        key = (qtype, shape, is_norm)
        if key not in made:
            made[key] = _random_bytes(shape, qtype, is_norm)
        writer.write_tensor_data(made[key])
        counts[qtype.name] = counts.get(qtype.name, 0) + 1
    writer.close()
    return counts


def _random_bytes(shape: tuple[int, ...], qtype: GGMLQuantizationType, is_norm: bool) -> np.ndarray:
    """Stored bytes, flat, of normal weights scaled by 0.7 / sqrt(fan in); norms are 1."""
    from speed_tier.tests.speed.gguf.packer import encode

    rng = np.random.default_rng(int(qtype) + int(np.prod(shape)))
    block_size, type_size = GGML_QUANT_SIZES[qtype]
    count = int(np.prod(shape)) // block_size
    if is_norm:
        pool = np.ones((1, block_size), np.float32)
    else:
        fan_in = shape[-1] if len(shape) > 1 else 10_000
        pool = rng.standard_normal((min(count, _POOL_BLOCKS), block_size), dtype=np.float32)
        pool *= 0.7 * fan_in**-0.5
    packed = encode(pool, qtype, rng).reshape(len(pool), type_size)
    return packed[rng.integers(0, len(packed), count)].reshape(-1)


def remove(path: Path) -> None:
    """A file of this size is in the way of the next one."""
    if path.exists():
        os.unlink(path)
