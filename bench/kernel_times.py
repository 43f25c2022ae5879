"""Where a step's time goes, kernel by kernel.

    python -m bench.kernel_times --comfy /path/to/ComfyUI --runners "dense off;dense max"

The runners of bench.tiers, warm, under torch's profiler: one JSON row a kernel with its
milliseconds and launches a step, the longest first, and one row for how long the device was busy
in a step and what all other kernels took. The plain step beside them was timed without a profiler.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from .gguf_file import remove, write_model
from .host_session import REPO, enter_host, sample
from .options import model_parser, parsed_model_options
from .record import Recorder, command_line
from .tiers import RUNNERS, host_model, timed_run

RESULTS = REPO / "bench" / "results" / "kernel_times.jsonl"
HOST_RUNNERS = ("off", "default", "max", "dense off", "dense default", "dense max")


def kernels_of(run: Any, size: int, steps: int) -> tuple[Counter[str], Counter[str], float]:
    """Milliseconds and launches by kernel over a whole run, and how long the device was busy."""
    import torch
    from torch.profiler import ProfilerActivity

    on_card = torch.cuda.is_available()
    kind = ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        timed_run(run, size, steps)
    milliseconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    busy_us = last_us = 0.0
    events = [e for e in profiler.events() if not on_card or e.device_type.name == "CUDA"]
    for event in sorted(events, key=lambda e: e.time_range.start):
        start, end = event.time_range.start, event.time_range.end
        # On a CPU operators lie inside one another.
        own_us = end - start if on_card else event.self_cpu_time_total
        milliseconds[event.name] += own_us / 1000
        launches[event.name] += 1
        busy_us += max(0.0, end - max(start, last_us))
        last_us = max(last_us, end)
    return milliseconds, launches, busy_us / 1000


def measure(run: Any, size: int, steps: int, top: int) -> list[dict[str, Any]]:
    for _ in range(3):
        plain_ms, _, _ = timed_run(run, size, steps)
    milliseconds, launches, busy_ms = kernels_of(run, size, steps)
    if not busy_ms:
        raise RuntimeError("the profiler saw no kernel; is another profiler attached?")
    step_ms = statistics.median(plain_ms)
    facts = {"width": size, "height": size, "step_ms_p50": step_ms}
    rows = [
        {
            **facts,
            "kernel": name,
            "ms_per_step": total / steps,
            "launches_per_step": launches[name] / steps,
            "share": total / busy_ms,
        }
        for name, total in milliseconds.most_common(top)
    ]
    rest = sum(milliseconds.values()) - sum(total for _, total in milliseconds.most_common(top))
    return [*rows, {**facts, "busy_ms_per_step": busy_ms / steps, "others_ms": rest / steps}]


def run_runner(name: str, path: Path, family: str, options: argparse.Namespace, emit: Any) -> None:
    import comfy.model_management as management

    try:
        run = functools.partial(sample, host_model(RUNNERS[name], path, family, options), family)
        for size in options.sizes:
            for row in measure(run, size, options.steps, options.top):
                emit({"family": family, "runner": name, **row})
    finally:
        run = None
        management.unload_all_models()
        gc.collect()
        management.soft_empty_cache()


def main() -> None:
    parser = model_parser(__doc__, RESULTS)
    parser.add_argument("--runners", default=list(HOST_RUNNERS), type=lambda s: s.split(";"))
    parser.add_argument("--recipe", default="Q4_K_M")
    parser.add_argument("--top", default=12, type=int, help="kernels a row is written for")
    parser.add_argument(
        "--folder", default=Path(tempfile.gettempdir()), type=Path, help="for the model files"
    )
    options = parsed_model_options(parser)
    options.folder = options.folder.resolve()  # the host's folder is the working one later
    out, command = options.out.resolve(), command_line("bench.kernel_times")
    enter_host(options.comfy, options.allocator, options.host_args)
    record = Recorder(out, command, options.allocator, options.commit)
    for family in options.families:
        path = options.folder / f"speed_tier_kernels_{family}.gguf"
        try:
            if any(RUNNERS[name].loader == "ours" for name in options.runners):
                write_model(path, family, options.recipe, options.layers)
            for name in options.runners:
                try:
                    run_runner(name, path, family, options, record)
                except Exception as error:
                    traceback.print_exc()
                    record({"family": family, "runner": name, "failed": repr(error)[:300]})
        finally:
            remove(path)


if __name__ == "__main__":
    main()
