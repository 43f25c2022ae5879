"""GGUF models through the host's own sampling path: our tiers beside ComfyUI-GGUF.

    python -m bench.tiers --comfy /path/to/ComfyUI --gguf-pack /path/to/ComfyUI-GGUF

Writes one file a family with random weights at the real size (removed afterwards), loads it once
for each runner in the same process, and appends one JSON row per (family, size, runner): step
times between sampler callbacks, first run, peak memory. A runner that fails says so and the others
go on.
"""

from __future__ import annotations

import argparse
import functools
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bare_diffusers import BareTransformer
from .gguf_file import remove, write_model
from .host_session import REPO, enter_host, random_model, sample
from .options import model_parser, parsed_model_options
from .record import Recorder, command_line

RESULTS = REPO / "bench" / "results" / "tiers.jsonl"
LORA_RANK = 32


@dataclass(frozen=True)
class Runner:
    """One way of running a model.

    Attributes:
        loader: "ours", "pack" (ComfyUI-GGUF), "dense" (bf16 weights of its own), or "diffusers" (a
            bare transformer, bf16, in a loop of ours: no host).
        tier: "" for an untiered model.
        lora: how a LoRA is put on: "adapters", "addmm", "rewrite", or "".
        off: features switched off.
        node: a compile node in the graph: "core", "kj", "kj dynamic", or ""; of diffusers,
            "compile" is its own compile_repeated_blocks.
    """

    loader: str
    tier: str = ""
    lora: str = ""
    off: tuple[str, ...] = ()
    node: str = ""


_NO_GRAPH = ("graph_capture",)
RUNNERS: dict[str, Runner] = {
    "off": Runner("ours", "off"),
    "default": Runner("ours", "default"),
    "default, no graph": Runner("ours", "default", off=_NO_GRAPH),
    "max": Runner("ours", "max"),
    "max, no graph": Runner("ours", "max", off=_NO_GRAPH),
    "comfyui-gguf": Runner("pack"),
    "core-compile": Runner("pack", node="core"),
    "kj-compile": Runner("pack", node="kj"),
    "kj-compile dynamic": Runner("pack", node="kj dynamic"),
    "comfyui-gguf + default": Runner("pack", "default"),
    "default, LoRA": Runner("ours", "default", "adapters"),
    "default, LoRA added to the weight": Runner("ours", "default", "addmm"),
    "default, LoRA by the host": Runner("ours", "default", "rewrite"),
    "max, LoRA": Runner("ours", "max", "adapters"),
    "comfyui-gguf, LoRA": Runner("pack", lora="adapters"),
    "dense off": Runner("dense", "off"),
    "dense default": Runner("dense", "default"),
    "dense max": Runner("dense", "max"),
    "dense kj-compile": Runner("dense", node="kj"),
    "dense kj-compile dynamic": Runner("dense", node="kj dynamic"),
    "diffusers": Runner("diffusers"),
    "diffusers-compile": Runner("diffusers", node="compile"),
    "diffusers default": Runner("diffusers", "default"),
    "diffusers max": Runner("diffusers", "max"),
}
_BF16 = ("dense", "diffusers")


def load_ours(path: Path, family: str, options: Any) -> Any:
    from speed_tier.speed.hosts import comfy_loader

    return comfy_loader.load_model(str(path))


def load_dense(path: Path, family: str, options: Any) -> Any:
    """The same architecture in bf16, with random weights of its own."""
    import torch

    return random_model(family, torch.bfloat16, options.layers)


def load_pack(path: Path, family: str, options: Any) -> Any:
    """What the pack's loader node does, with a path in place of a name."""
    import folder_paths

    pack = options.pack

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


LOADERS = {"ours": load_ours, "pack": load_pack, "dense": load_dense}


def compiled(model: Any, node: str, kj_folder: str) -> Any:
    """What a compile node returns: the host's own, or KJNodes' at its settings for blocks."""
    if node == "core":
        from comfy_extras.nodes_torch_compile import TorchCompileModel

        return TorchCompileModel.execute(model, "inductor")[0]
    path = Path(kj_folder) / "nodes" / "model_optimization_nodes.py"
    spec = importlib.util.spec_from_file_location("kj_model_optimization_nodes", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TorchCompileModelAdvanced().patch(
        model,
        backend="inductor",
        fullgraph=False,
        mode="default",
        dynamic="true" if node.endswith("dynamic") else "false",
        dynamo_cache_size_limit=64,
        compile_transformer_blocks_only=True,
        debug_compile_keys=False,
    )[0]


def tiered(model: Any, tier: str, off: tuple[str, ...] = ()) -> Any:
    from speed_tier.speed import Switch, TierRequest, resolve_tier
    from speed_tier.speed.hosts import comfy

    request = TierRequest(resolve_tier(tier, is_gguf=True), dict.fromkeys(off, Switch.OFF))
    return comfy.tier_clone(model, request, lambda report: lambda kind, data: None)


def with_lora(model: Any, rank: int, strength: float = 1.0) -> Any:
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
    clone.add_patches(patches, strength)
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


def timed_run(
    run: Callable[..., Any], size: int, steps: int, batch: int = 1, cfg: float = 1.0
) -> tuple[list[float], float, Any]:
    """Milliseconds between sampler callbacks, seconds of the whole run, and the latents.

    Args:
        run: Samples; takes width, height, batch, steps, cfg and a callback.
    """
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
    latents = run(size, size, batch, steps, cfg, callback=callback)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    total_s = time.perf_counter() - started
    pairs = list(itertools.pairwise(marks))
    if torch.cuda.is_available():
        return [a.elapsed_time(b) for a, b in pairs], total_s, latents
    return [1000 * (b - a) for a, b in pairs], total_s, latents


def measure(
    run: Callable[..., Any], runner: str, size: int, options: Any, references: dict[Any, Any]
) -> dict[str, Any]:
    import torch

    setting = (options.steps, options.batch, options.cfg)

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    first_ms, first_run_s, _ = timed_run(run, size, *setting)
    first = _newest_report() if RUNNERS[runner].tier else None
    # The second run still makes what pays from a second run on.
    timed_run(run, size, *setting)
    steps_ms, later_run_s, latents = timed_run(run, size, *setting)
    # One-step latents: over more steps two right answers drift apart.
    one_step = run(size, size, options.batch, 1, options.cfg).double()
    # The runners in bf16 have weights of their own.
    loader = RUNNERS[runner].loader
    kind = (size, bool(RUNNERS[runner].lora), loader if loader in _BF16 else "")
    reference = references.setdefault(kind, one_step)
    ordered = sorted(steps_ms)
    row = {
        "ms_p50": statistics.median(ordered),
        "ms_p20": ordered[len(ordered) // 5],
        "ms_p80": ordered[len(ordered) * 4 // 5],
        "first_run_ms_p50": statistics.median(first_ms),
        "first_run_s": first_run_s,
        "first_run_tax_s": first_run_s - later_run_s,
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        # Against the first runner of the same file with the same LoRA, or none.
        "distance": float((one_step - reference).norm() / reference.norm()),
        "finite": bool(latents.isfinite().all()),
    }
    if first is not None:
        newest = _newest_report()
        row["engaged"] = newest.engaged()
        row["compile_s"] = first.compile.seconds
        row["graphs"] = vars(newest.graphs)
        row["peak_bytes"] = newest.peak_bytes or row["peak_bytes"]  # with the graphs' own memory
        if (graph := newest.feature("graph_capture")) is not None:
            row["graph_capture"] = graph.reason or graph.note
    return row


def _newest_report() -> Any:
    from speed_tier.speed import REPORTS

    return max(REPORTS.runs(), key=lambda run: run.started_unix_s)


def host_model(runner: Runner, path: Path, family: str, options: Any) -> Any:
    """The MODEL that reaches the host's sampler."""
    import torch

    with torch.inference_mode():
        model = LOADERS[runner.loader](path, family, options)
        if runner.lora:
            model = with_lora(model, LORA_RANK)
        if runner.node:
            model = compiled(model, runner.node, options.kj)
        return tiered(model, runner.tier, runner.off) if runner.tier else model


def run_runner(
    name: str, path: Path, family: str, options: Any, references: Any, emit: Any
) -> None:
    import comfy.model_management as management

    runner = RUNNERS[name]
    restore = lora_route(runner.lora)
    bare = None
    try:
        started = time.perf_counter()
        if runner.loader == "diffusers":
            bare = BareTransformer(family, options.layers, runner.node or runner.tier)
            run = bare.sample
        else:
            model = host_model(runner, path, family, options)
            run = functools.partial(sample, model, family)
        load_s = time.perf_counter() - started
        for size in options.sizes:
            row = measure(run, name, size, options, references)
            emit({"runner": name, "width": size, "height": size, "load_s": load_s, **row})
    finally:
        restore()
        if bare is not None:
            bare.close()
        management.unload_all_models()
        run = model = bare = None
        gc.collect()
        management.soft_empty_cache()


def run_family(family: str, options: argparse.Namespace, emit: Any) -> None:
    path = Path(options.folder) / f"speed_tier_bench_{family}.gguf"
    deadline = time.monotonic() + options.budget_s
    references: dict[Any, Any] = {}
    try:
        counts = write_model(path, family, options.recipe, options.layers)
        print(f"{path.name}: {path.stat().st_size / 1e9:.2f} GB, {counts}", flush=True)
        for runner in options.runners:
            if RUNNERS[runner].loader == "pack" and options.pack is None:
                continue
            if RUNNERS[runner].node.startswith("kj") and not options.kj:
                continue
            if time.monotonic() > deadline:
                emit({"runner": runner, "failed": "out of time"})
                continue
            try:
                run_runner(runner, path, family, options, references, emit)
            except Exception as error:
                traceback.print_exc()
                emit({"runner": runner, "failed": repr(error)[:300]})
    finally:
        remove(path)


def main() -> None:
    parser = model_parser(__doc__, RESULTS)
    parser.add_argument("--gguf-pack", help="a ComfyUI-GGUF checkout")
    parser.add_argument("--kj", default="", help="a ComfyUI-KJNodes checkout")
    parser.add_argument("--runners", default=list(RUNNERS), type=lambda s: s.split(";"))
    parser.add_argument("--recipe", default="Q4_K_M")
    parser.add_argument("--batch", default=1, type=int)
    parser.add_argument("--cfg", default=1.0, type=float, help="above 1: two conditions a step")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="for the model files")
    parser.add_argument("--budget-s", type=float, default=600, help="for one family")
    options = parsed_model_options(parser)
    out, command = options.out.resolve(), command_line("bench.tiers")
    options.kj = str(Path(options.kj).resolve()) if options.kj else ""
    pack_folder = str(Path(options.gguf_pack).resolve()) if options.gguf_pack else ""
    enter_host(options.comfy, options.allocator, options.host_args)
    record = Recorder(out, command, options.allocator, options.commit)
    options.pack = import_pack(pack_folder) if pack_folder else None
    for family in options.families:

        def emit(row: dict[str, Any], family: str = family) -> None:
            facts = {"family": family, "batch": options.batch, "cfg": options.cfg}
            facts["steps"] = options.steps
            facts["format"] = "bf16" if RUNNERS[row["runner"]].loader in _BF16 else options.recipe
            record({**facts, "layers": options.layers, **row})

        run_family(family, options, emit)


if __name__ == "__main__":
    main()
