"""The modes of torch.compile on the repeated blocks: what each gains, costs and how it fails.

    python -m bench.compile_modes --comfy /path/to/ComfyUI
    python -m bench.compile_modes --comfy /path/to/ComfyUI --tiny --out rows.jsonl      on a CPU

Each mode runs in a process of its own, because the two with CUDA graphs can end it. They overwrite
a block's output before the next block has read it, so that `CompileConfig` refuses them; they are
tried here and nowhere else. One JSON row a mode: steps, compile time, PSNR against off, whether a
second run gives the same, or how it failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from .child import print_rows, rows_of
from .host_session import REPO, enter_host, random_model, sample
from .options import model_parser, parsed_model_options, words
from .record import Recorder, command_line

RESULTS = REPO / "bench" / "results" / "compile_modes.jsonl"
MODES = ("default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune")
# Compile times are those of a first time.
_NO_CACHE = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}


def config_of(mode: str) -> Any:
    """A CompileConfig with a mode that its own check refuses to everybody else."""
    from speed_tier.speed.optimizations.regional_compile import CompileConfig

    config = CompileConfig()
    # Past the check, on this one object: no node and no setting can get here.
    object.__setattr__(config, "mode", mode)
    return config


def compile_only(model: Any, mode: str) -> Any:
    """A clone on which nothing but compiled blocks engages, in any mode there is."""
    from speed_tier.speed import Switch, TierRequest, resolve_tier
    from speed_tier.speed.hosts import comfy
    from speed_tier.speed.optimizations import OPTIMIZATIONS
    from speed_tier.speed.optimizations.regional_compile import RegionalCompile

    own = RegionalCompile(config_of(mode))
    table = tuple(own if row.name == own.name else row for row in OPTIMIZATIONS)
    # Nothing is dropped for what it does to the numbers: that is what is measured.
    request = TierRequest(
        resolve_tier("off", is_gguf=False), {own.name: Switch.ON}, table, self_check=False
    )
    return comfy.tier_clone(model, request, lambda report: lambda kind, data: None)


def off_clone(model: Any) -> Any:
    from speed_tier.speed import TierRequest, resolve_tier
    from speed_tier.speed.hosts import comfy

    request = TierRequest(resolve_tier("off", is_gguf=False))
    return comfy.tier_clone(model, request, lambda report: lambda kind, data: None)


def measure(model: Any, mode: str, family: str, size: int, steps: int) -> dict[str, Any]:
    """Off and then the mode, in this process."""
    import torch
    from speed_tier.speed import REPORTS
    from speed_tier.speed.metrics import difference

    def run(clone: Any) -> Any:
        return sample(clone, family, size, size, steps=steps)

    off = off_clone(model)
    run(off)
    off_latents = run(off)
    off_s = REPORTS.runs()[0].timing.steady_step_s
    clone = compile_only(model, mode)
    started = time.perf_counter()
    first = run(clone)
    first_run_s = time.perf_counter() - started
    compiled = REPORTS.runs()[0]
    latents = run(clone)
    report = REPORTS.runs()[0]
    found = difference(off_latents, latents)
    feature = report.feature("regional_compile")
    steady_s = report.timing.steady_step_s
    return {
        "ms_p50": None if steady_s is None else 1000 * steady_s,
        "off_ms": None if off_s is None else 1000 * off_s,
        "ratio_to_off": off_s / steady_s if off_s and steady_s else None,
        "first_run_s": first_run_s,
        "first_step_tax_s": compiled.timing.first_step_tax_s,
        "compile_s": compiled.compile.seconds,
        "compiles": {kind.name: kind.compiles for kind in compiled.compile.kinds},
        "graph_breaks": report.compile.graph_breaks,
        "engaged": report.engaged(),
        "regional_compile": "" if feature is None else feature.reason or feature.note,
        "psnr_db_to_off": found.psnr_db,
        "relative_error": found.relative_error,
        "finite": bool(latents.isfinite().all()),
        "second_run": difference(first, latents).words("the second run"),
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def child(mode: str, family: str, options: argparse.Namespace) -> None:
    """Measure one mode of one family in this process; a row a size on stdout."""
    import torch

    enter_host(options.comfy, options.allocator, options.host_args)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    model = random_model(family, torch.bfloat16, options.layers)
    print_rows(options.sizes, lambda size: measure(model, mode, family, size, options.steps))


def main() -> None:
    parser = model_parser(__doc__, RESULTS)
    parser.add_argument("--modes", default=list(MODES), type=words)
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0 = torch's choice")
    parser.add_argument("--timeout-s", type=float, default=900, help="for one mode of one family")
    parser.add_argument("--child", nargs=2, metavar=("MODE", "FAMILY"), help=argparse.SUPPRESS)
    options = parsed_model_options(parser)
    if options.child:
        child(*options.child, options)
        return
    out, command, given = options.out.resolve(), command_line("bench.compile_modes"), sys.argv[1:]
    enter_host(options.comfy, options.allocator, options.host_args)
    os.chdir(REPO)
    record = Recorder(out, command, options.allocator, options.commit)
    for family in options.families:
        for mode in options.modes:
            call = [sys.executable, "-m", "bench.compile_modes", *given]
            call += ["--comfy", options.comfy, "--child", mode, family]
            for row in rows_of(call, options.sizes, options.timeout_s, _NO_CACHE):
                facts = {"family": family, "format": "bf16", "batch": 1, "cfg": 1.0}
                facts |= {"steps": options.steps, "layers": options.layers, "runner": mode}
                record({**facts, **row})


if __name__ == "__main__":
    main()
