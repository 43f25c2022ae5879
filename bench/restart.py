"""What the first run of a tier costs in a new process, without compiled code and with it.

    python -m bench.restart --comfy /path/to/ComfyUI
    python -m bench.restart --comfy /path/to/ComfyUI --tiny --out rows.jsonl      on a CPU

The same runs in one process after another that share an empty user folder: "cold" compiles and
leaves its code there, "restart" finds it. One JSON row a process and size. A size behind the first
is what a change of size costs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from typing import Any

from .child import print_rows, rows_of
from .host_session import REPO, enter_host, random_model, sample
from .options import model_parser, parsed_model_options
from .record import Recorder, command_line
from .tiers import tiered

RESULTS = REPO / "bench" / "results" / "restart.jsonl"
STATES = ("cold", "restart", "restart")
_USER = "SPEED_TIER_BENCH_USER"  # the children's user folder
# Where one of these is set, the user's own folder is used and not the host's.
_CACHES = dict.fromkeys(
    ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_FORCE_DISABLE_CACHES")
)


def measure(model: Any, family: str, size: int, steps: int) -> dict[str, Any]:
    """The first run of a size and a later one."""
    import torch
    from speed_tier.speed import REPORTS

    def run() -> tuple[float, Any]:
        started = time.perf_counter()
        latents = sample(model, family, size, size, steps=steps)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        assert latents.isfinite().all(), "the latents are not finite"
        return seconds, REPORTS.runs()[0]

    first_s, first = run()
    run()  # makes what pays from a second run on
    later_s, later = run()
    compiled = first.compile
    return {
        "first_step_s": first.timing.first_step_s,
        "first_step_tax_s": first.timing.first_step_tax_s,
        "first_run_s": first_s,
        "first_run_tax_s": first_s - later_s,
        "ms_p50": None if (s := later.timing.steady_step_s) is None else 1000 * s,
        "load_s": first.timing.load_s,
        "check_s": first.check.seconds,
        "compile_s": compiled.seconds,
        "compiles": {kind.name: kind.compiles for kind in compiled.kinds},
        "cache": compiled.cache,
        "engaged": first.engaged(),
    }


def child(family: str, options: argparse.Namespace) -> None:
    """All sizes of one family in this process; a row each on stdout."""
    import torch

    started = time.perf_counter()
    enter_host(options.comfy, options.allocator, options.host_args)
    import folder_paths

    folder_paths.set_user_directory(os.environ[_USER])
    with torch.inference_mode():
        model = tiered(random_model(family, torch.bfloat16, options.layers), options.tier)
    start_s = time.perf_counter() - started
    print_rows(
        options.sizes, lambda size: measure(model, family, size, options.steps), start_s=start_s
    )


def main() -> None:
    parser = model_parser(__doc__, RESULTS)
    parser.add_argument("--tier", default="max")
    parser.add_argument("--timeout-s", type=float, default=300, help="for one process")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parsed_model_options(parser)
    if options.child:
        child(options.child, options)
        return
    out, command, given = options.out.resolve(), command_line("bench.restart"), sys.argv[1:]
    enter_host(options.comfy, options.allocator, options.host_args)
    os.chdir(REPO)
    record = Recorder(out, command, options.allocator, options.commit)
    for family in options.families:
        with tempfile.TemporaryDirectory(prefix="speed_tier_bench_") as folder:
            for state in STATES:
                call = [sys.executable, "-m", "bench.restart", *given]
                call += ["--comfy", options.comfy, "--child", family]
                environment = {**_CACHES, _USER: folder}
                for row in rows_of(call, options.sizes, options.timeout_s, environment):
                    facts = {"family": family, "format": "bf16", "batch": 1, "cfg": 1.0}
                    facts |= {"steps": options.steps, "layers": options.layers}
                    record({**facts, "runner": options.tier, "state": state, **row})


if __name__ == "__main__":
    main()
