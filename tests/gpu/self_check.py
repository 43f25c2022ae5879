"""The self-check on a real card: planted faults are caught and blamed, clean runs are not.

    python tests/gpu/self_check.py /path/to/ComfyUI --real-size 10

One process with a real ComfyUI. First tiny models of both families with a fault planted in each
(tests/host/self_check_cases.py), real CUDA graphs among what can be at fault, and clean random
runs; then clean runs of both at their real size: 512 to 1328 pixels, other batches and prompts,
with and without LoRA, default and max. Prints a line a case and a JSON line at the end. With
`--host-args=--cpu` a stand-in captures the tiny models' graphs.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import entry

ARCHS = ("zimage", "qwen")
SIZES = (512, 640, 768, 832, 1024, 1216, 1328)
STEPS = 3


def run_tiny(
    clean_runs: int, backend: str, allocator: str
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Named checks of what tiny models showed."""
    import torch
    from speed_tier.speed.cuda_graph import Captured, CudaRecorder
    from speed_tier.tests.host import self_check_cases as cases
    from speed_tier.tests.host.in_process import Session

    class Stale(Captured):
        """A replay does not see new inputs."""

        def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
            return super().replay(self._inputs)

    class Recorder(CudaRecorder):
        stale = False

        def capture(self, *arguments: Any) -> Any:
            captured, output = super().capture(*arguments)
            if self.stale:
                captured.__class__ = Stale
            return captured, output

    if torch.cuda.is_available():
        session = Session(Recorder())
    else:
        from speed_tier.tests.speed.optimizations import recording

        session = Session(recording.Recorder(strict=allocator == "cudaMallocAsync"))
    for arch in ARCHS:
        seen = {step.name: session.seen(step) for step in cases.planted_steps(arch)}
        for name, *_ in cases.PLANTED:
            yield f"{arch}: {name}", lambda n=name, s=seen: cases.check_caught(s, n)
            yield f"{arch}: {name}: again", lambda n=name, s=seen: cases.check_remembered(s, n)
        yield f"{arch}: stale", lambda s=seen: cases.check_stale(s)
        for step in cases.clean_steps(arch, clean_runs, backend, graphs=True):
            run, dtype = session.seen(step), cases.DTYPES[step.dtype]
            yield f"{arch}: {step.name}", lambda r=run, d=dtype: cases.check_clean(r, d)


def run_real(
    family: str, runs: int, layers: int | None, sizes: Sequence[int]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Named checks of clean runs at the real size."""
    import torch
    from speed_tier.bench.host_session import random_model, sample
    from speed_tier.bench.tiers import LORA_RANK, tiered, with_lora
    from speed_tier.speed import REPORTS
    from speed_tier.tests.host.in_process import Seen
    from speed_tier.tests.host.self_check_cases import check_clean

    with torch.inference_mode():
        plain = random_model(family, torch.bfloat16, layers)
    draw = random.Random(11)
    for number in range(runs):
        width, height, tokens = draw.choice(sizes), draw.choice(sizes), draw.randint(8, 300)
        batch, tier = draw.choice((1, 1, 2)), ("max", "default")[number % 2]
        with torch.inference_mode():
            model = with_lora(plain, LORA_RANK) if draw.random() < 0.3 else plain
            model = tiered(model, tier)
        latents = sample(model, family, width, height, batch, STEPS, tokens=tokens, seed=number)
        run = Seen(latents, 0, REPORTS.runs()[0].to_dict())
        name = f"{family} {tier} {width}x{height}, batch {batch}, {tokens} tokens"

        def check(run: Seen = run) -> dict[str, Any]:
            return check_clean(run, torch.bfloat16)

        yield name, check


def main() -> None:
    parser = entry.parser(__doc__)
    parser.add_argument("--clean-runs", type=int, default=6, help="of each tiny model")
    parser.add_argument("--real-size", type=int, default=10, help="runs of each family")
    parser.add_argument("--sizes", type=lambda s: [int(n) for n in s.split(",")], default=SIZES)
    parser.add_argument("--backend", default="inductor", help="of the tiny models' max")
    options = parser.parse_args()
    entry.enter(options)
    import comfy.model_management as management

    facts: dict[str, Any] = {"checks": 0, "wrong": [], "compared": 0, "largest": {}}

    def go_through(part: str, checks: Iterator[tuple[str, Callable[[], Any]]]) -> None:
        began = time.monotonic()
        try:
            for name, check in checks:
                facts["checks"] += 1
                try:
                    found = check() or {}
                except (AssertionError, StopIteration):
                    traceback.print_exc()
                    facts["wrong"].append(name)
                    continue
                facts["compared"] += found.get("calls", 0)
                errors = {k: found.get(k, 0.0) for k in ("block_error", "output_error")}
                largest = facts["largest"].setdefault(part, dict.fromkeys(errors, 0.0))
                facts["largest"][part] = {k: max(errors[k], largest[k]) for k in errors}
                print(name, {k: f"{v:.1e}" for k, v in errors.items()}, flush=True)
        except Exception as error:  # the other parts go on
            traceback.print_exc()
            facts["wrong"].append(f"{part}: {error!r}"[:300])
        management.unload_all_models()
        gc.collect()
        management.soft_empty_cache()
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)

    tiny = run_tiny(options.clean_runs, options.backend, options.allocator)
    go_through("tiny", tiny)
    for family in ("z_image", "qwen_image") if options.real_size else ():
        go_through(family, run_real(family, options.real_size, options.layers, options.sizes))
    print(json.dumps(facts), flush=True)
    sys.exit(1 if facts["wrong"] else 0)


if __name__ == "__main__":
    main()
