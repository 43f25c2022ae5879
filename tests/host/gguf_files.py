"""Writes GGUF files of real width in the mix that people download, their dense twins, and LoRAs.

Both hosts tell the families by widths, so that these are one Z-Image layer and three Qwen-Image
blocks of full width: the first and the last block are of another mix than the one between. Packed
weights are random blocks with scales that make every weight exact in bf16. A twin holds the same
weights, by the gguf package's own dequantisation, for the stock loader.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q
from safetensors.torch import save_file

from ..speed.gguf.packer import mixed
from .model_files import Weights, qwen_weights, zimage_weights
from .provision import cache_dir, write_once

# Part of the folder's name: files of another layout are simply not found, never misread.
LAYOUT = "v1"
RECIPE = "Q4_K_M"
FILE_TYPE = 15  # what the converters write for it
# A tensor repeats one run of random numbers, starting where its name says. Primes, so that no two
# rows of a weight are alike: drawing a thousand million numbers would take most of a minute.
PERIOD, BLOCK_PERIOD = 1_000_003, 4093
Plan = list[tuple[str, tuple[int, ...], Q]]


def _k_scales(rng: np.random.Generator, count: int, largest: int, middle: float) -> np.ndarray:
    """The 12 bytes of eight 6-bit scales and minima that put the codes' middle at zero."""
    scales = rng.integers(1, largest + 1, (count, 8))
    minima = np.minimum(np.rint(scales * middle), 63).astype(np.uint8)
    scales = scales.astype(np.uint8)
    low = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    mid = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    high = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    return np.concatenate([low, mid, high], axis=1)


def _blocks(qtype: Q, exponent: int) -> np.ndarray:
    """`(BLOCK_PERIOD, type_size) uint8`: weights are integers below 256 times `2**exponent`."""
    rng = np.random.default_rng(qtype)
    blocks = rng.integers(0, 256, (BLOCK_PERIOD, GGML_QUANT_SIZES[qtype][1]), dtype=np.uint8)
    scale = np.frombuffer(np.float16(2.0**exponent).tobytes(), np.uint8)
    if qtype is Q.Q6_K:
        blocks[:, 192:208] = rng.integers(-7, 8, (BLOCK_PERIOD, 16)).astype(np.int8).view(np.uint8)
        blocks[:, 208:] = scale
    else:
        blocks[:, :2] = blocks[:, 2:4] = scale
        largest, middle = {Q.Q4_K: (8, 7.5), Q.Q5_K: (4, 15.5)}[qtype]
        blocks[:, 4:16] = _k_scales(rng, BLOCK_PERIOD, largest, middle)
    return blocks


def _start(name: str, period: int) -> int:
    return zlib.crc32(name.encode()) % period


def _repeated(run: np.ndarray, name: str, count: int) -> np.ndarray:
    """`count` items of `run`, from the place that `name` says and over again."""
    return np.resize(np.roll(run, -_start(name, len(run)), axis=0), (count, *run.shape[1:]))


class _Contents:
    """A model's tensors twice: as a GGUF file stores them, and as bf16."""

    def __init__(self, weights: Callable[..., Weights], layers: int) -> None:
        with torch.device("meta"):  # names and shapes, without drawing
            table = [(n, tuple(w.shape)) for n, w in weights(layers=layers).items()]
        # No published file has it: only 0.3.75 builds this parameter, and reads it nowhere.
        table = [(name, shape) for name, shape in table if name != "norm_final.weight"]
        self.plan: Plan = mixed(table, RECIPE, layers)
        generator = torch.Generator().manual_seed(0)
        self._normal = torch.randn(PERIOD, generator=generator)
        self._packed: dict[tuple[Q, int], tuple[np.ndarray, np.ndarray]] = {}

    def stored(self, name: str, shape: tuple[int, ...], qtype: Q) -> np.ndarray:
        """The bytes of one tensor."""
        if qtype in (Q.F32, Q.BF16):
            plain = self.dense(name, shape, qtype)
            plain = plain.float() if qtype is Q.F32 else plain
            return plain.view(torch.uint8).numpy()
        blocks, _ = self._runs(qtype, shape)
        return _repeated(blocks, name, int(np.prod(shape)) // GGML_QUANT_SIZES[qtype][0])

    def dense(self, name: str, shape: tuple[int, ...], qtype: Q) -> torch.Tensor:
        """The same as the gguf package reads it, `shape` bfloat16."""
        count = int(np.prod(shape))
        if qtype not in (Q.F32, Q.BF16):
            _, values = self._runs(qtype, shape)
            flat = _repeated(values, name, count // values.shape[1])
            return torch.from_numpy(flat).view(torch.bfloat16).reshape(shape)
        scale, offset = 0.7 / shape[-1] ** 0.5, 0.0
        if len(shape) == 1:
            scale, offset = 0.05, float(not name.endswith(".bias"))
        run = (self._normal * scale + offset).bfloat16().view(torch.int16).numpy()
        return torch.from_numpy(_repeated(run, name, count)).view(torch.bfloat16).reshape(shape)

    def _runs(self, qtype: Q, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of a type for a weight's number of columns, and their weights as bf16 bits."""
        unit = gguf.quants.dequantize(_blocks(qtype, 0), qtype).std()
        exponent = round(float(np.log2(0.7 / shape[-1] ** 0.5 / unit)))
        if (qtype, exponent) not in self._packed:
            blocks = _blocks(qtype, exponent)
            exact = torch.from_numpy(gguf.quants.dequantize(blocks, qtype))
            rounded = exact.bfloat16()
            assert torch.equal(rounded.float(), exact), "a twin in bf16 would not be a twin"
            self._packed[qtype, exponent] = blocks, rounded.view(torch.int16).numpy()
        return self._packed[qtype, exponent]


def _stored_bytes(shape: tuple[int, ...], qtype: Q) -> int:
    block_size, type_size = GGML_QUANT_SIZES[qtype]
    return math.prod(shape) // block_size * type_size


def _write_gguf(path: Path, contents: _Contents, architecture: str) -> None:
    """A file as the common converter leaves it: three metadata entries, native names."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(FILE_TYPE)
    for name, shape, qtype in contents.plan:
        columns = _stored_bytes(shape[-1:], qtype)
        n_bytes = _stored_bytes(shape, qtype)
        writer.add_tensor_info(name, (*shape[:-1], columns), np.dtype(np.uint8), n_bytes, qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, qtype in contents.plan:
        writer.write_tensor_data(contents.stored(name, shape, qtype).reshape(-1))
    writer.close()


def _write_twin(path: Path, contents: _Contents) -> None:
    save_file({name: contents.dense(name, *rest) for name, *rest in contents.plan}, path)


def _random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5


# Published Z-Image LoRAs have three adapters for the one fused weight.
ZIMAGE_LINEARS = {
    "attention.to_q": (3840, 3840),
    "attention.to_k": (3840, 3840),
    "attention.to_v": (3840, 3840),
    "attention.to_out.0": (3840, 3840),
    "feed_forward.w1": (10240, 3840),
    "feed_forward.w2": (3840, 10240),
    "feed_forward.w3": (10240, 3840),
}
QWEN_LINEARS = {
    "attn.to_q": (3072, 3072),
    "attn.add_v_proj": (3072, 3072),
    "attn.to_out.0": (3072, 3072),
    "img_mlp.net.2": (3072, 12288),
}


def _lora(stems: Iterator[tuple[str, tuple[int, int]]], rank: int = 8) -> Weights:
    found: Weights = {}
    for stem, (rows, columns) in stems:
        seed = _start(stem, 1 << 31)
        found[f"diffusion_model.{stem}.lora_B.weight"] = 4 * _random(rows, rank, seed=seed)
        found[f"diffusion_model.{stem}.lora_A.weight"] = _random(rank, columns, seed=seed + 1)
        found[f"diffusion_model.{stem}.alpha"] = torch.tensor(rank / 2)
    return found


def _lokr(stems: Iterator[tuple[str, tuple[int, int]]]) -> Weights:
    found: Weights = {}
    for stem, (rows, columns) in stems:
        seed = _start(stem, 1 << 31)
        found[f"diffusion_model.{stem}.lokr_w1"] = _random(4, 4, seed=seed)
        found[f"diffusion_model.{stem}.lokr_w2"] = _random(rows // 4, columns // 4, seed=seed + 1)
        found[f"diffusion_model.{stem}.alpha"] = torch.tensor(1.0)
    return found


def _stems(
    blocks: list[str], linears: dict[str, tuple[int, int]]
) -> Iterator[tuple[str, tuple[int, int]]]:
    for block in blocks:
        for part, shape in linears.items():
            yield f"{block}.{part}", shape


def _zimage_lora() -> Weights:
    # A refiner too: its weights are plain bf16 in the file, and the host merges into those.
    return _lora(_stems(["layers.0", "noise_refiner.1"], ZIMAGE_LINEARS))


def _zimage_lokr() -> Weights:
    return _lokr(_stems(["layers.0"], ZIMAGE_LINEARS))


def _qwen_lora() -> Weights:
    return _lora(_stems([f"transformer_blocks.{i}" for i in range(3)], QWEN_LINEARS))


_MODELS: dict[str, tuple[str, Callable[..., Weights], int]] = {
    "zimage": ("lumina2", zimage_weights, 1),
    "qwen": ("qwen_image", qwen_weights, 3),
}
# The second family lies in the host's other folder for the same kind of file.
_PLACES = {
    "zimage gguf": f"diffusion_models/speedtier_zimage_{RECIPE}.gguf",
    "zimage twin": f"diffusion_models/speedtier_zimage_{RECIPE}_twin.safetensors",
    "zimage lora": "loras/speedtier_zimage_lora.safetensors",
    "zimage lokr": "loras/speedtier_zimage_lokr.safetensors",
    "qwen gguf": f"unet/speedtier_qwen_{RECIPE}.gguf",
    "qwen twin": f"unet/speedtier_qwen_{RECIPE}_twin.safetensors",
    "qwen lora": "loras/speedtier_qwen_lora.safetensors",
}
_LORAS: dict[str, Callable[[], Weights]] = {
    "zimage lora": _zimage_lora,
    "zimage lokr": _zimage_lokr,
    "qwen lora": _qwen_lora,
}


def file_name(kind: str) -> str:
    """The name that the loader nodes' dropdowns show."""
    return _PLACES[kind].partition("/")[2]


def gguf_files(*kinds: str) -> dict[str, Path]:
    """Writes what is missing and returns {"folder/name": path}, ready for HostServer(models=)."""
    found: dict[str, Path] = {}
    contents: dict[str, _Contents] = {}
    for kind in kinds or tuple(_PLACES):
        place = _PLACES[kind]
        path = found[place] = cache_dir() / f"gguf-{LAYOUT}" / place
        if path.is_file():
            continue
        if kind in _LORAS:
            weights = _LORAS[kind]()
            n_bytes = sum(weight.nbytes for weight in weights.values())
            write_once(path, n_bytes, partial(save_file, weights))
            continue
        family, form = kind.split()
        architecture, weights_of, layers = _MODELS[family]
        if family not in contents:
            contents[family] = _Contents(weights_of, layers)
        model = contents[family]
        if form == "gguf":
            write = partial(_write_gguf, contents=model, architecture=architecture)
            write_once(path, sum(_stored_bytes(*rest) for _, *rest in model.plan), write)
        else:
            n_bytes = sum(2 * math.prod(shape) for _, shape, _ in model.plan)
            write_once(path, n_bytes, partial(_write_twin, contents=model))
    return found


if __name__ == "__main__":
    for place, path in gguf_files().items():
        print(place, path.stat().st_size)
