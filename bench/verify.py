"""Whether anything is lost: every tier beside off, and off before and after it.

    python -m bench.verify --comfy /path/to/ComfyUI
    python -m bench.verify --comfy /path/to/ComfyUI --tiny --out rows.jsonl      on a CPU

For each family, dense bf16 and GGUF, on random weights at the real size:

    off          the latents that everything is compared with
    each tier    PSNR and relative error of its latents against off's; its error over one forward
                 against an fp32 forward of the same weights, over off's own (at most 1.1 times)
    off again    after the model was unloaded: the same bytes

One JSON row each. A part that fails says so and the others go on; the exit status is 1 if anything
failed or a bound was broken.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .exact import REFERENCE, in_fp32, tf32_is_off
from .gguf_file import remove, write_model
from .host_session import REPO, enter_host, random_model, sample
from .options import model_parser, parsed_model_options, words
from .record import Recorder, command_line

RESULTS = REPO / "bench" / "results" / "verify.jsonl"
Emit = Callable[[dict[str, Any]], None]


def tiered(model: Any, tier: str) -> Any:
    from speed_tier.speed import TierRequest, resolve_tier
    from speed_tier.speed.hosts import comfy

    request = TierRequest(resolve_tier(tier, is_gguf=False))
    return comfy.tier_clone(model, request, lambda report: lambda kind, data: None)


@contextmanager
def loaded(family: str, format_: str, options: argparse.Namespace) -> Iterator[Any]:
    """A model of the family: dense with random weights, or from a GGUF file that is removed."""
    import torch

    if format_ == "bf16":
        yield random_model(family, torch.bfloat16, options.layers)
        return
    path = Path(options.folder) / f"speed_tier_verify_{family}.gguf"
    try:
        from speed_tier.speed.hosts import comfy_loader

        write_model(path, family, format_, options.layers)
        with torch.inference_mode():
            model = comfy_loader.load_model(str(path))
        yield model
    finally:
        remove(path)


def unload() -> None:
    import comfy.model_management as management

    management.unload_all_models()
    gc.collect()
    management.soft_empty_cache()


def compared(latents: Any, off: Any) -> dict[str, Any]:
    from speed_tier.speed.metrics import difference

    found = difference(off, latents)
    return {
        "identical": found.identical,
        "psnr_db": found.psnr_db,
        "relative_error": found.relative_error,
        "max_error": found.max_error,
        "mean_error": found.mean_error,
        "not_finite": found.not_finite,
        "words": found.words("this run"),
    }


def forward_error(one_step: Any, exact: Any, off_error: float | None) -> dict[str, Any]:
    """Error over one forward, and what the table of bounds says of it."""
    import torch
    from speed_tier.speed import REPORTS
    from speed_tier.speed.bounds import ERROR_FACTOR, allowed_error
    from speed_tier.speed.metrics import relative_error

    error = relative_error(exact, one_step)
    row: dict[str, Any] = {"forward_error": error, "reference": REFERENCE}
    if off_error is not None:
        dtype = getattr(torch, REPORTS.runs()[0].model.dtype)
        row["off_forward_error"] = off_error
        row["error_ratio"] = error / off_error if off_error else None
        row["allowed_ratio"] = ERROR_FACTOR
        row["within"] = error <= allowed_error(off_error, dtype)
    return row


class Case:
    """One model at one size: what off gave, and each tier beside it."""

    def __init__(self, model: Any, family: str, size: int, options: argparse.Namespace) -> None:
        self.model, self.family, self.size, self.options = model, family, size, options
        self.off: Any = None
        self.exact: Any = None
        self.off_error: float | None = None

    def latents(self, tier: str, steps: int) -> Any:
        options = self.options
        model = tiered(self.model, tier)
        return sample(model, self.family, self.size, self.size, options.batch, steps, options.cfg)

    def run_exact(self) -> dict[str, Any]:
        with in_fp32(self.model) as model:
            self.exact = sample(
                model, self.family, self.size, self.size, self.options.batch, 1, self.options.cfg
            )
        return {
            "reference": REFERENCE,
            "reference_is_fp32": tf32_is_off(),
            "finite": bool(self.exact.isfinite().all()),
        }

    def run_off(self) -> dict[str, Any]:
        self.off = self.latents("off", self.options.steps)
        row: dict[str, Any] = {"finite": bool(self.off.isfinite().all())}
        if self.exact is not None:
            row |= forward_error(self.latents("off", 1), self.exact, None)
            self.off_error = row["forward_error"]
        return row

    def run_tier(self, tier: str) -> dict[str, Any]:
        from speed_tier.speed import REPORTS

        # Twice: the second run replays what the first one captured, and must give the same.
        first = self.latents(tier, self.options.steps)
        latents = self.latents(tier, self.options.steps)
        report = REPORTS.runs()[0]
        row = {
            **compared(latents, self._known_off()),
            "finite": bool(latents.isfinite().all()),
            "engaged": report.engaged(),
            "features": {f.name: f.reason or f.note for f in report.features},
            "second_run": compared(latents, first)["words"],
        }
        if self.exact is not None and self.off_error is not None:
            row |= forward_error(self.latents(tier, 1), self.exact, self.off_error)
        return row

    def run_off_again(self) -> dict[str, Any]:
        unload()
        return compared(self.latents("off", self.options.steps), self._known_off())

    def _known_off(self) -> Any:
        if self.off is None:
            raise RuntimeError("off did not run, so that there is nothing to compare with")
        return self.off


def verify(case: Case, emit: Emit, deadline: float) -> None:
    """All parts of one case; a part that fails leaves the others."""
    parts: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("fp32", case.run_exact),
        ("off", case.run_off),
    ]
    for tier in case.options.tiers:
        parts.append((tier, lambda tier=tier: case.run_tier(tier)))  # type: ignore[misc]
        parts.append((f"off after {tier}", case.run_off_again))
    for name, part in parts:
        row = {"runner": name, "width": case.size, "height": case.size}
        if time.monotonic() > deadline:
            emit({**row, "failed": "out of time"})
            continue
        started = time.perf_counter()
        try:
            found = part()
            emit({**row, **found, "seconds": time.perf_counter() - started})
        except Exception as error:
            traceback.print_exc()
            emit({**row, "failed": repr(error)[:300]})


def problems(rows: list[dict[str, Any]]) -> list[str]:
    """What of the rows must not be, in words."""
    found = []
    for row in rows:
        where = f"{row['family']} {row['format']} {row.get('width', '')} {row['runner']}"
        if "failed" in row:
            found.append(f"{where}: {row['failed']}")
        if row.get("finite") is False:
            found.append(f"{where}: values that are not finite")
        if row["runner"].startswith("off after") and row.get("identical") is False:
            found.append(f"{where}: differs from off before it: {row['words']}")
        if row.get("within") is False:
            found.append(
                f"{where}: error {row['forward_error']:.3g} against fp32, "
                f"off's own is {row['off_forward_error']:.3g}"
            )
    return found


def main() -> None:
    parser = model_parser(__doc__, RESULTS)
    parser.add_argument("--formats", default=["bf16", "Q4_K_M"], type=words, help="bf16 = dense")
    parser.add_argument("--tiers", default=["default", "max"], type=words)
    parser.add_argument("--batch", default=1, type=int)
    parser.add_argument("--cfg", default=1.0, type=float, help="above 1: two conditions a step")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="for the GGUF files")
    parser.add_argument("--budget-s", type=float, default=1800, help="for all of it")
    options = parsed_model_options(parser)
    if options.tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    out, command = options.out.resolve(), command_line("bench.verify")
    enter_host(options.comfy, options.allocator, options.host_args)
    record = Recorder(out, command, options.allocator, options.commit)
    deadline = time.monotonic() + options.budget_s
    if options.tiny:
        from speed_tier.tests.triton_interpreter import round_to_nearest

        round_to_nearest()
    rows: list[dict[str, Any]] = []
    for family in options.families:
        for format_ in options.formats:
            facts = {
                "family": family,
                "format": format_,
                "batch": options.batch,
                "cfg": options.cfg,
                "steps": options.steps,
                "layers": options.layers,
            }

            def emit(row: dict[str, Any], facts: dict[str, Any] = facts) -> None:
                rows.append({**facts, **row})
                record(rows[-1])

            try:
                with loaded(family, format_, options) as model:
                    for size in options.sizes:
                        verify(Case(model, family, size, options), emit, deadline)
            except Exception as error:
                traceback.print_exc()
                emit({"runner": "load", "failed": repr(error)[:300]})
            model = None
            unload()
    wrong = problems(rows)
    print("\n".join(["nothing lost" if not wrong else f"{len(wrong)} PROBLEMS:", *wrong]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
