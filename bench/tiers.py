"""GGUF models through the host's own sampling path: our tiers beside ComfyUI-GGUF.

    python -m bench.tiers --comfy /path/to/ComfyUI --gguf-pack /path/to/ComfyUI-GGUF

Writes one file a family with random weights at the real size (removed afterwards), loads it once
for each runner in the same process, and appends one JSON row per (family, size, runner): step
times between sampler callbacks, first run, peak memory. A runner that fails says so and the others
go on.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import statistics
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .gguf_file import remove, write_model
from .host_session import REPO, enter_host, sample
from .record import Recorder, command_line

RESULTS = REPO / "bench" / "results" / "tiers.jsonl"
LORA_RANK = 32
# name -> (loader, tier or "" for an untiered model, how a LoRA is put on or "")
RUNNERS: dict[str, tuple[str, str, str]] = {
    "off": ("ours", "off", ""),
    "default": ("ours", "default", ""),
    "max": ("ours", "max", ""),
    "comfyui-gguf": ("pack", "", ""),
    "comfyui-gguf + default": ("pack", "default", ""),
    "default, LoRA": ("ours", "default", "adapters"),
    "default, LoRA added to the weight": ("ours", "default", "addmm"),
    "default, LoRA by the host": ("ours", "default", "rewrite"),
    "max, LoRA": ("ours", "max", "adapters"),
    "comfyui-gguf, LoRA": ("pack", "", "adapters"),
}


def load_ours(path: Path, pack: Any) -> Any:
    from speed_tier.speed.hosts import comfy_loader

    return comfy_loader.load_model(str(path))


def load_pack(path: Path, pack: Any) -> Any:
    """What the pack's loader node does, with a path in place of a name."""
    import folder_paths

    folder_paths.add_model_folder_path("unet", str(path.parent))
    return pack.NODE_CLASS_MAPPINGS["UnetLoaderGGUF"]().load_unet(path.name)[0]


def import_pack(folder: str) -> Any:
    """The pack, imported as the host does."""
    try:
        import nodes  # noqa: F401 - the host's; it wants packages that sampling does not
    except ImportError:
        sys.modules["nodes"] = types.ModuleType("nodes")  # the pack's text encoder nodes use it
    name = folder.replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, Path(folder) / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def tiered(model: Any, tier: str) -> Any:
    from speed_tier.speed import TierRequest, resolve_tier
    from speed_tier.speed.hosts import comfy

    request = TierRequest(resolve_tier(tier, is_gguf=True))
    return comfy.tier_clone(model, request, lambda report: lambda kind, data: None)


def with_lora(model: Any, rank: int) -> Any:
    """A clone with a random LoRA on every Linear of the repeated blocks."""
    import comfy.weight_adapter
    import torch

    generator = torch.Generator().manual_seed(rank)
    patches = {}
    for name, module in model.model.named_modules():
        is_block = ".layers." in name or ".transformer_blocks." in name
        if not is_block or not hasattr(module, "in_features"):
            continue
        up = torch.randn(module.out_features, rank, generator=generator) * 0.01
        down = torch.randn(rank, module.in_features, generator=generator) * 0.01
        weights = (up.bfloat16(), down.bfloat16(), None, None, None, None)
        patches[f"{name}.weight"] = comfy.weight_adapter.LoRAAdapter(set(), weights)
    clone = model.clone()
    clone.add_patches(patches, 1.0)
    return clone


def lora_route(how: str) -> Callable[[], None]:
    """Make packed layers take a LoRA by another route; returns what puts things back."""
    from speed_tier.speed.gguf import linear
    from speed_tier.speed.hosts import comfy_quant

    if how == "rewrite":
        original = comfy_quant.low_rank_terms
        comfy_quant.low_rank_terms = lambda patches, shape: None

        def restore() -> None:
            comfy_quant.low_rank_terms = original

        return restore
    if how == "addmm":
        kept = linear.QuantLinear.adapted_product
        linear.QuantLinear.adapted_product = _added_to_the_weight

        def restore() -> None:
            linear.QuantLinear.adapted_product = kept

        return restore
    return lambda: None


def _added_to_the_weight(layer: Any, input: Any, packed: Any, bias: Any) -> Any:
    """The other way: dequantise, add the low-rank product, use, forget."""
    import torch.nn.functional as F

    dense = layer.dense_weight(input.dtype, packed)
    if layer.adapters is not None:
        down, slices = layer.adapters._placed(dense.device, dense.dtype)
        for part in slices:
            dense[slice(*part.rows)].addmm_(part.up, down[slice(*part.ranks)])
    return F.linear(input, dense, bias)


def timed_run(model: Any, family: str, size: int, steps: int) -> tuple[list[float], float, Any]:
    """Milliseconds between sampler callbacks, seconds of the whole run, and the latents."""
    import torch

    marks: list[Any] = []

    def callback(*_: Any) -> None:
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append(event)
        else:
            marks.append(time.perf_counter())

    started = time.perf_counter()
    latents = sample(model, family, size, size, steps=steps, callback=callback)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    total_s = time.perf_counter() - started
    pairs = list(itertools.pairwise(marks))
    if torch.cuda.is_available():
        return [a.elapsed_time(b) for a, b in pairs], total_s, latents
    return [1000 * (b - a) for a, b in pairs], total_s, latents


def measure(
    model: Any, runner: str, family: str, size: int, steps: int, references: dict[Any, Any]
) -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    _, first_run_s, _ = timed_run(model, family, size, steps)
    first = _newest_report() if RUNNERS[runner][1] else None
    steps_ms, second_run_s, latents = timed_run(model, family, size, steps)
    again_ms, _, _ = timed_run(model, family, size, steps)
    # One-step latents: over more steps two right answers drift apart.
    one_step = sample(model, family, size, size, steps=1).double()
    reference = references.setdefault((size, bool(RUNNERS[runner][2])), one_step)
    ordered = sorted(steps_ms + again_ms)
    row = {
        "ms_p50": statistics.median(ordered),
        "ms_p20": ordered[len(ordered) // 5],
        "ms_p80": ordered[len(ordered) * 4 // 5],
        "first_run_s": first_run_s,
        "first_run_tax_s": first_run_s - second_run_s,
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        # Against the first runner of the same file with the same LoRA, or none.
        "distance": float((one_step - reference).norm() / reference.norm()),
        "finite": bool(latents.isfinite().all()),
    }
    if first is not None:
        row["engaged"] = _newest_report().engaged()
        row["compile_s"] = first.compile.seconds
    return row


def _newest_report() -> Any:
    from speed_tier.speed import REPORTS

    return max(REPORTS.runs(), key=lambda run: run.started_unix_s)


def run_runner(
    runner: str, path: Path, family: str, pack: Any, options: Any, references: Any, emit: Any
) -> None:
    import comfy.model_management as management
    import torch

    loader, tier, lora = RUNNERS[runner]
    restore = lora_route(lora)
    try:
        with torch.inference_mode():
            started = time.perf_counter()
            model = (load_ours if loader == "ours" else load_pack)(path, pack)
            load_s = time.perf_counter() - started
            if lora:
                model = with_lora(model, LORA_RANK)
            if tier:
                model = tiered(model, tier)
        for size in options.sizes:
            row = measure(model, runner, family, size, options.steps, references)
            emit({"runner": runner, "width": size, "height": size, "load_s": load_s, **row})
    finally:
        restore()
        management.unload_all_models()
        model = None
        gc.collect()
        management.soft_empty_cache()


def run_family(family: str, pack: Any, options: argparse.Namespace, emit: Any) -> None:
    path = Path(options.folder) / f"speed_tier_bench_{family}.gguf"
    deadline = time.monotonic() + options.budget_s
    references: dict[Any, Any] = {}
    try:
        counts = write_model(path, family, options.recipe, options.layers)
        print(f"{path.name}: {path.stat().st_size / 1e9:.2f} GB, {counts}", flush=True)
        for runner in options.runners:
            loader = RUNNERS[runner][0]
            if loader == "pack" and pack is None:
                continue
            if time.monotonic() > deadline:
                emit({"runner": runner, "failed": "out of time"})
                continue
            try:
                run_runner(runner, path, family, pack, options, references, emit)
            except Exception as error:
                traceback.print_exc()
                emit({"runner": runner, "failed": repr(error)[:300]})
    finally:
        remove(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comfy", required=True, help="a ComfyUI checkout")
    parser.add_argument("--gguf-pack", help="a ComfyUI-GGUF checkout")
    parser.add_argument("--families", default=["z_image", "qwen_image"], type=_words)
    parser.add_argument("--sizes", default=[1024, 512], type=lambda s: [int(x) for x in _words(s)])
    parser.add_argument("--runners", default=list(RUNNERS), type=lambda s: s.split(";"))
    parser.add_argument("--recipe", default="Q4_K_M")
    parser.add_argument("--steps", default=8, type=int)
    parser.add_argument("--layers", type=int, help="fewer layers than the real model")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="for the model files")
    parser.add_argument("--allocator", default="cudaMallocAsync")
    parser.add_argument("--host-args", default=[], type=str.split, help="of the host's main.py")
    parser.add_argument("--budget-s", type=float, default=600, help="for one family")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    out, command = options.out.resolve(), command_line("bench.tiers")
    pack_folder = str(Path(options.gguf_pack).resolve()) if options.gguf_pack else ""
    enter_host(str(Path(options.comfy).resolve()), options.allocator, options.host_args)
    record = Recorder(out, command, options.allocator, options.commit)
    pack = import_pack(pack_folder) if pack_folder else None
    for family in options.families:

        def emit(row: dict[str, Any], family: str = family) -> None:
            facts = {"family": family, "format": options.recipe, "batch": 1}
            record({**facts, "layers": options.layers, **row})

        run_family(family, pack, options, emit)


def _words(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
