"""Every GGUF type and every oddity of public files, loaded by a real ComfyUI in this process.

Started as a script by the test: writes one Z-Image and one Qwen-Image file of real width whose
Linear weights go through all types, loads them, and prints one JSON line a file with what differs
from the gguf package's own reading. What is right or wrong is for the test to say.
"""

from __future__ import annotations

import json
import sys
import types
import zlib
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
POOL_BLOCKS = 509  # a prime: no two rows of a weight are alike
ROWS = 48  # dequantised by both sides from the start and the end of every weight


def plan_of(table: list[tuple[str, tuple[int, ...]]], odd: bool) -> list[Any]:
    """(stored name, shape, type): all types over the blocks' Linear weights.

    `odd` files have a prefix, norms and embedders quantised, and pad tokens of one dimension in
    BF16, as some converters leave them.
    """
    from gguf import GGML_QUANT_SIZES
    from gguf import GGMLQuantizationType as Q
    from speed_tier.speed.gguf import stays_packed
    from speed_tier.speed.kernels import QUANT_TYPES

    cycle = [Q(row.id) for row in QUANT_TYPES if row.id != Q.NVFP4] + [Q.NVFP4]
    plan, turn = [], 0
    for name, shape in table:
        qtype = Q.F32 if len(shape) == 1 else Q.BF16
        if stays_packed(name, int(Q.Q8_0), shape):
            qtype, turn = cycle[turn % len(cycle)], turn + 1
        elif odd and name.endswith("pad_token"):
            shape, qtype = shape[-1:], Q.BF16
        elif odd and shape[-1] % 32 == 0:
            qtype = Q.Q8_0
        if shape[-1] % GGML_QUANT_SIZES[qtype][0]:
            qtype = Q.F16
        plan.append((("model.diffusion_model." if odd else "") + name, shape, qtype))
    return plan


def stored_bytes(name: str, shape: tuple[int, ...], qtype: Any) -> Any:
    """A tensor's bytes, `(rows, bytes_per_row)`, the same for a given name."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES
    from speed_tier.tests.speed.gguf.packer import encode

    block_size, type_size = GGML_QUANT_SIZES[qtype]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    count = int(np.prod(shape)) // block_size
    pool = rng.standard_normal((min(count, POOL_BLOCKS), max(block_size, 1)), dtype=np.float32)
    pool = pool * 0.02 + float(len(shape) == 1)
    packed = encode(pool, qtype, rng).reshape(len(pool), type_size)
    return np.resize(packed, (count, type_size)).reshape(*shape[:-1], -1)


def write(path: Path, plan: list[Any], architecture: str | None) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, architecture or "none")
    if architecture is None:
        writer.kv_data[0].clear()
    made = [(name, stored_bytes(name, shape, qtype), qtype) for name, shape, qtype in plan]
    for name, data, qtype in made:
        writer.add_tensor_info(name, data.shape, np.dtype(np.uint8), data.nbytes, qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, data, _ in made:
        writer.write_tensor_data(data.reshape(-1))
    writer.close()


def compare(patcher: Any, plan: list[Any]) -> dict[str, Any]:
    """Loaded model against the gguf package's reading of what was written."""
    import gguf
    import torch
    from speed_tier.speed.kernels import dequantize

    denoiser = patcher.model.diffusion_model
    packed: dict[str, int] = {}
    plain, n_bytes, wrong = 0, 0, []
    for stored_name, shape, qtype in plan:
        name = stored_name.removeprefix("model.diffusion_model.")
        data = stored_bytes(stored_name, shape, qtype)
        module_name, _, parameter_name = name.rpartition(".")
        module = denoiser.get_submodule(module_name)
        found = getattr(module, parameter_name)
        if getattr(module, "qtype", None) is not None and parameter_name == "weight":
            same = bool((found.numpy() == data).all())
            for rows in (slice(0, ROWS), slice(-ROWS, None)):
                ours = dequantize(
                    found[rows], module.qtype, ROWS, shape[1], torch.float32, path="reference"
                )
                theirs = torch.from_numpy(gguf.quants.dequantize(data[rows], qtype).copy())
                same = same and torch.equal(ours, theirs)
            packed[qtype.name] = packed.get(qtype.name, 0) + 1
            n_bytes += data.nbytes
        else:
            theirs = torch.from_numpy(gguf.quants.dequantize(data, qtype).copy()).reshape(-1)
            same = torch.equal(found.detach().float().reshape(-1), theirs.to(found.dtype).float())
            plain += 1
            n_bytes += found.numel() * found.element_size()
        if not same:
            wrong.append(f"{name} ({qtype.name})")
    return {"packed": packed, "plain": plain, "wrong": wrong, "bytes": n_bytes}


def main() -> None:
    host, folder = sys.argv[1], Path(sys.argv[2])
    sys.argv = [sys.argv[0], "--cpu"]
    sys.path.insert(0, host)
    pack = types.ModuleType("speed_tier")
    pack.__path__ = [str(REPO)]
    sys.modules["speed_tier"] = pack
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.model_management
    import torch
    from speed_tier.speed.hosts.comfy_loader import load_gguf_model
    from speed_tier.tests.host.model_files import qwen_weights, zimage_weights

    families: list[tuple[str, Any, str]] = [
        ("zimage", zimage_weights, "lumina2"),
        ("qwen", qwen_weights, "qwen_image"),
    ]
    for family, weights, architecture in families:
        with torch.device("meta"):
            made = weights(layers=2 if family == "qwen" else 1)
        table = [(n, tuple(w.shape)) for n, w in made.items() if n != "norm_final.weight"]
        for odd in (False, True):
            plan = plan_of(table, odd)
            path = folder / f"{family}.gguf"
            write(path, plan, None if odd else architecture)
            with torch.inference_mode():
                patcher = load_gguf_model(str(path))
                facts = compare(patcher, plan)
            layers = facts["packed"]
            row = {"family": family, "odd": odd, "types": sorted(layers), **facts}
            size = comfy.model_management.module_size(patcher.model.diffusion_model)
            print(json.dumps({**row, "size": size}))
            del patcher
            path.unlink()


if __name__ == "__main__":
    main()
