"""Each lever by itself, through the host's own sampling path, on a dense bf16 model.

    python -m bench.levers --comfy /path/to/ComfyUI [--families z_image,qwen_image]

Prints and appends one JSON row per (family, size, lever): median step, first-step tax, error of a
one-step latent against an fp32 model of the same weights, PSNR against off. Ratios are against
off in the same process. A lever that fails says so and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from pathlib import Path
from typing import Any

from .host_session import REPO, enter_host, random_model, sample
from .record import Recorder, command_line

RESULTS = REPO / "bench" / "results" / "levers.jsonl"
# name -> (tier, switches, compile settings)

LEVERS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "off": ("off", {}, {}),
    "default": ("default", {}, {}),
    "attention_backend on": ("default", {"attention_backend": "on"}, {}),
    "fused_qkv on": ("off", {"fused_qkv": "on"}, {}),
    "compile dynamic": ("off", {"regional_compile": "on"}, {"dynamic": True}),
    "compile automatic": ("off", {"regional_compile": "on"}, {"dynamic": None}),
    "compile static": ("off", {"regional_compile": "on"}, {"dynamic": False}),
    "compile casts": ("off", {"regional_compile": "on"}, {"emulate_precision_casts": True}),
    "max": ("max", {}, {}),
    "compile autotune": (
        "off",
        {"regional_compile": "on"},
        {"dynamic": False, "mode": "max-autotune-no-cudagraphs"},
    ),
}


def tiered(model: Any, lever: str) -> Any:
    from speed_tier.speed import Switch, TierRequest, resolve_tier
    from speed_tier.speed.hosts import comfy
    from speed_tier.speed.optimizations import OPTIMIZATIONS
    from speed_tier.speed.optimizations.regional_compile import CompileConfig, RegionalCompile

    tier, switches, settings = LEVERS[lever]
    compile_ = RegionalCompile(CompileConfig(**settings))
    table = tuple(compile_ if o.name == compile_.name else o for o in OPTIMIZATIONS)
    chosen = {name: Switch(value) for name, value in switches.items()}
    request = TierRequest(resolve_tier(tier, is_gguf=False), chosen, table)
    return comfy.tier_clone(model, request, lambda report: lambda kind, data: None)


def relative(x: Any, reference: Any) -> float:
    return float((x.double() - reference.double()).norm() / reference.double().norm())


def psnr_db(x: Any, reference: Any) -> float:
    error = (x.double() - reference.double()).pow(2).mean()
    peak = reference.double().abs().max() * 2
    return float(10 * (peak**2 / error).log10()) if error > 0 else float("inf")


def measure(model: Any, family: str, size: int, lever: str, ref: dict[str, Any]) -> dict[str, Any]:
    import torch
    from speed_tier.speed import REPORTS

    clone = tiered(model, lever)
    started = time.perf_counter()
    latent = sample(clone, family, size, size)
    first_run_s = time.perf_counter() - started
    first = REPORTS.runs()[0]
    sample(clone, family, size, size)
    report = REPORTS.runs()[0]
    one_step = sample(clone, family, size, size, steps=1)
    ref.setdefault("off_latent", latent)
    steps = sorted(report.timing.steps_s[1:])
    off_ms = ref.setdefault("off_ms", 1000 * report.timing.steady_step_s)
    row = {
        "lever": lever,
        "family": family,
        "width": size,
        "ms_p50": 1000 * report.timing.steady_step_s,
        "ms_p20": 1000 * steps[len(steps) // 5],
        "ms_p80": 1000 * steps[len(steps) * 4 // 5],
        "ratio_to_off": off_ms / (1000 * report.timing.steady_step_s),
        "first_run_s": first_run_s,
        "first_step_tax_s": first.timing.first_step_tax_s,
        "compile_s": first.compile.seconds,
        "compiles": {kind.name: kind.compiles for kind in first.compile.kinds},
        "psnr_db_to_off": psnr_db(latent, ref["off_latent"]),
        "engaged": report.engaged(),
        "features": {f.name: f.reason or f.note for f in report.features},
        "graph_breaks": first.compile.graph_breaks,
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }
    if "fp32" in ref:
        row["relative_error_to_fp32"] = relative(one_step, ref["fp32"])
    return row


def flags_match(before: dict[str, Any]) -> bool:
    from speed_tier.speed.flags import snapshot

    return snapshot() == before


def fp32_reference(model: Any, family: str, size: int, layers: int | None) -> Any:
    """One-step latent of the same weights in fp32."""
    import torch

    reference = random_model(family, torch.float32, layers)
    with torch.inference_mode():
        source = dict(model.model.named_parameters())
        for name, parameter in reference.model.named_parameters():
            parameter.data.copy_(source[name].data.float())
    return sample(reference, family, size, size, steps=1)


def run_family(family: str, options: argparse.Namespace, emit: Any) -> None:
    import comfy.model_management as management
    import torch
    from speed_tier.speed.flags import snapshot

    deadline = time.monotonic() + options.budget_s
    model = random_model(family, torch.bfloat16, options.layers)
    before = snapshot()
    for size in options.sizes:
        ref: dict[str, Any] = {}
        if options.fp32:
            try:
                ref["fp32"] = fp32_reference(model, family, size, options.layers)
            except torch.cuda.OutOfMemoryError as error:
                emit({"family": family, "width": size, "failed": f"fp32: {error}"[:200]})
            management.unload_all_models()
            gc.collect()
            management.soft_empty_cache()
        for lever in options.levers:
            if time.monotonic() > deadline:
                emit({"family": family, "width": size, "lever": lever, "failed": "out of time"})
                continue
            try:
                row = measure(model, family, size, lever, ref)
                emit({**row, "flags_restored": flags_match(before)})
            except Exception as error:
                traceback.print_exc()
                emit({"family": family, "width": size, "lever": lever, "failed": repr(error)[:300]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comfy", required=True, help="a ComfyUI checkout")
    parser.add_argument("--families", default="z_image,qwen_image", type=lambda s: s.split(","))
    parser.add_argument(
        "--sizes", default=[1024, 512], type=lambda s: [int(x) for x in s.split(",")]
    )
    parser.add_argument("--levers", default=list(LEVERS), type=lambda s: s.split(","))
    parser.add_argument("--layers", type=int, help="fewer layers than the real model")
    parser.add_argument("--fp32", action="store_true", help="measure errors against fp32")
    parser.add_argument("--allocator", default="cudaMallocAsync")
    parser.add_argument("--host-args", default=[], type=str.split, help="of the host's main.py")
    parser.add_argument("--budget-s", type=float, default=600)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    out, command = options.out.resolve(), command_line("bench.levers")
    enter_host(str(Path(options.comfy).resolve()), options.allocator, options.host_args)
    record = Recorder(out, command, options.allocator, options.commit)

    def emit(row: dict[str, Any]) -> None:
        record({"layers": options.layers, **row})

    for family in options.families:
        run_family(family, options, emit)


if __name__ == "__main__":
    main()
