"""Each lever by itself, through the host's own sampling path, on a dense bf16 model.

    python -m bench.levers --comfy /path/to/ComfyUI [--families z_image,qwen_image]
    python -m bench.levers --comfy /path/to/ComfyUI --tiny --out rows.jsonl      on a CPU

Prints and appends one JSON row per (family, size, lever): median step, first-step tax, error of a
one-step latent against an fp32 model of the same weights, PSNR against off. Ratios are against
off in the same process. A lever that fails says so and the others go on.

PSNR is against the range of off's latents, `psnr_peak`; in rows without that field it is against
twice their largest absolute value.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
import traceback
from typing import Any

from .exact import in_fp32
from .first_block_cache import FirstBlockCache
from .host_session import REPO, enter_host, random_model, sample
from .options import model_parser, parsed_model_options, words
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
    # Each autotuned kernel's tile is walked on from, one parameter at a time.
    "compile coordinate descent": (
        "off",
        {"regional_compile": "on"},
        {"inductor": {"coordinate_descent_tuning": True}},
    ),
    # No tier has these: see first_block_cache.py.
    "first-block cache 0.05": ("off", {}, {"first_block_cache": 0.05}),
    "first-block cache 0.2": ("off", {}, {"first_block_cache": 0.2}),
    "max": ("max", {}, {}),
    "compile autotune": (
        "off",
        {"regional_compile": "on"},
        {"dynamic": False, "mode": "max-autotune-no-cudagraphs"},
    ),
}


def compile_config(settings: dict[str, Any]) -> Any:
    """A CompileConfig; "inductor" in the settings are options that the pack does not offer."""
    from speed_tier.speed.optimizations.regional_compile import CompileConfig

    options = settings.get("inductor")
    settings = {k: v for k, v in settings.items() if k != "first_block_cache"}
    if options is None:
        return CompileConfig(**settings)

    class WithOptions(CompileConfig):
        def options(self) -> dict[str, Any] | None:
            return dict(options)

    return WithOptions()


def block_cache(model: Any, lever: str) -> Any:
    """The first-block cache of a lever that has one, around one run."""
    threshold = LEVERS[lever][2].get("first_block_cache")
    if threshold is None:
        return contextlib.nullcontext()
    return FirstBlockCache(model.model.diffusion_model, threshold)


def tiered(model: Any, lever: str) -> Any:
    from speed_tier.speed import Switch, TierRequest, resolve_tier
    from speed_tier.speed.hosts import comfy
    from speed_tier.speed.optimizations import OPTIMIZATIONS
    from speed_tier.speed.optimizations.regional_compile import RegionalCompile

    tier, switches, settings = LEVERS[lever]
    compile_ = RegionalCompile(compile_config(settings))
    table = tuple(compile_ if o.name == compile_.name else o for o in OPTIMIZATIONS)
    chosen = {name: Switch(value) for name, value in switches.items()}
    # Nothing is dropped for what it does to the numbers: that is what is measured.
    request = TierRequest(resolve_tier(tier, is_gguf=False), chosen, table, self_check=False)
    return comfy.tier_clone(model, request, lambda report: lambda kind, data: None)


def measure(
    model: Any, family: str, size: int, lever: str, steps: int, ref: dict[str, Any]
) -> dict[str, Any]:
    import torch
    from speed_tier.speed import REPORTS
    from speed_tier.speed.metrics import difference, relative_error

    clone = tiered(model, lever)
    with block_cache(model, lever):
        started = time.perf_counter()
        latent = sample(clone, family, size, size, steps=steps)
        first_run_s = time.perf_counter() - started
    first = REPORTS.runs()[0]
    with block_cache(model, lever) as cache:
        sample(clone, family, size, size, steps=steps)
    report = REPORTS.runs()[0]
    one_step = sample(clone, family, size, size, steps=1)
    ref.setdefault("off_latent", latent)
    found = difference(ref["off_latent"], latent)
    steps_s = sorted(report.timing.steps_s[1:])
    off_ms = ref.setdefault("off_ms", 1000 * report.timing.steady_step_s)
    row = {
        "lever": lever,
        "family": family,
        "width": size,
        "ms_p50": 1000 * report.timing.steady_step_s,
        "ms_p20": 1000 * steps_s[len(steps_s) // 5],
        "ms_p80": 1000 * steps_s[len(steps_s) * 4 // 5],
        "ratio_to_off": off_ms / (1000 * report.timing.steady_step_s),
        "first_run_s": first_run_s,
        "first_step_tax_s": first.timing.first_step_tax_s,
        "compile_s": first.compile.seconds,
        "compiles": {kind.name: kind.compiles for kind in first.compile.kinds},
        "psnr_db_to_off": found.psnr_db,
        "psnr_peak": found.peak,
        "difference_to_off": found.words(lever),
        "engaged": report.engaged(),
        "features": {f.name: f.reason or f.note for f in report.features},
        "graph_breaks": first.compile.graph_breaks,
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }
    if cache is not None:
        # A step is a hit or not, so that their median says nothing.
        row |= {
            "calls": cache.calls,
            "hits": cache.hits,
            "ms_mean": 1000 * sum(steps_s) / len(steps_s),
        }
    if "fp32" in ref:
        row["relative_error_to_fp32"] = relative_error(ref["fp32"], one_step)
    return row


def flags_match(before: dict[str, Any]) -> bool:
    from speed_tier.speed.flags import snapshot

    return snapshot() == before


def fp32_reference(model: Any, family: str, size: int) -> Any:
    """One-step latent of the same weights in fp32."""
    with in_fp32(model):
        return sample(model, family, size, size, steps=1)


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
                ref["fp32"] = fp32_reference(model, family, size)
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
                row = measure(model, family, size, lever, options.steps, ref)
                emit({**row, "flags_restored": flags_match(before)})
            except Exception as error:
                traceback.print_exc()
                emit({"family": family, "width": size, "lever": lever, "failed": repr(error)[:300]})


def main() -> None:
    parser = model_parser(__doc__, RESULTS)
    parser.add_argument("--levers", default=list(LEVERS), type=words)
    parser.add_argument("--fp32", action="store_true", help="measure errors against fp32")
    parser.add_argument("--budget-s", type=float, default=600)
    options = parsed_model_options(parser)
    out, command = options.out.resolve(), command_line("bench.levers")
    enter_host(options.comfy, options.allocator, options.host_args)
    record = Recorder(out, command, options.allocator, options.commit)

    def emit(row: dict[str, Any]) -> None:
        record({"layers": options.layers, "steps": options.steps, **row})

    for family in options.families:
        run_family(family, options, emit)


if __name__ == "__main__":
    main()
