"""Runs Z-Image and Qwen-Image in a real ComfyUI on the CPU: off, default, max, with reports.

The models are one layer deep with random weights, so the pictures are noise. What the demo shows
is the whole path: stock loader, Speed Tier, stock sampler, report, and every process flag back
where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import types
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
# The same alias as in tests/conftest.py: this file is run as a script.
package = sys.modules.setdefault("speed_tier", types.ModuleType("speed_tier"))
package.__path__ = [str(REPO)]

from speed_tier.tests.host import graphs, model_files, provision  # noqa: E402
from speed_tier.tests.host.events import Event  # noqa: E402
from speed_tier.tests.host.server import HostServer  # noqa: E402

FAMILIES = (("zimage", "Z-Image"), ("qwen", "Qwen-Image"))
TIERS = ("off", "default", "max")
SIZE = 64
STEPS = 3


def say(text: str = "") -> None:
    print(text, flush=True)


class Narrator:
    """Prints the events of a run as they arrive: steps, and what Speed Tier announces."""

    def __call__(self, event: Event) -> None:
        if event.type == "progress":
            say(f"    step {event.data['value']}/{event.data['max']}")
        elif event.type == "speed_tier.update":
            say(f"    speed_tier.update: {event.data.get('kind', '?')}")


def flags_now(server: HostServer) -> dict[str, Any]:
    """The flags as a node sees them, on the thread that runs the prompts."""
    result = server.run({"f": {"class_type": "TestFlags", "inputs": {"name": "demo"}}})
    return json.loads(result.ui("f", "flags"))


def print_flags(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Prints the table; True when nothing changed."""
    say("Process flags, read by a node of the tests, not by the pack")
    say(f"  {'flag':<62} {'before':<14} {'after':<14}")
    same = True
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        mark = "" if old == new else "  <-- CHANGED"
        same = same and old == new
        say(f"  {name:<62} {old!s:<14} {new!s:<14}{mark}")
    return same


def run_one(
    server: HostServer, family: str, title: str, tier: str, output: Path
) -> tuple[list[str], str, float]:
    """Runs one tier; returns what was wrong with it, the latent's hash, and the seconds."""
    say(f"\n{title}, tier {tier}")
    prefix = f"speedtier_{family}_{tier}"
    names = (model_files.file_name(family), model_files.file_name(f"{family}_vae"))
    graph = graphs.demo_run(*names, family, tier, size=SIZE, steps=STEPS, seed=1, prefix=prefix)
    began = time.monotonic()
    result = server.run(graph, check=False, timeout=1200)
    seconds = time.monotonic() - began
    if not result.ok:
        message = (result.error or {}).get("exception_message", result.status)
        return [f"{title} {tier}: the run failed: {message}"], "", seconds
    problems = []
    report = json.loads(result.ui("report", "json"))
    say("  " + result.ui("report", "text").strip().replace("\n", "\n  "))
    image = result.ui("save", "images")
    saved = output / image["filename"]
    shutil.copy2(server.output_dir / image["subfolder"] / image["filename"], saved)
    say(f"  {seconds:.1f} s for the whole prompt; image: {saved}")
    if result.ui("sink", "finite") is not True:
        problems.append(f"{title} {tier}: the result is not finite")
    if tier != "off" and report["tier"]["resolved"] != tier:
        problems.append(f"{title} {tier}: resolved to {report['tier']['resolved']}")
    if tier == "max":
        states = {f["name"]: f for f in report["features"]}
        compiled = states.get("regional_compile", {"state": "missing", "reason": None})
        if compiled["state"] != "engaged":
            reason = compiled["reason"]
            problems.append(f"{title} max: regional_compile {compiled['state']}: {reason}")
    return problems, result.ui("sink", "sha256"), seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=REPO / "demo_output")
    options = parser.parse_args()
    output: Path = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    host = provision.find_host()
    say(f"host: ComfyUI {provision.host_version(host)} in {host}")
    say("model files: one layer each, random weights")
    models = model_files.model_files()
    for path in models.values():
        say(f"  {path} ({path.stat().st_size / 2**20:.0f} MiB)")
    problems: list[str] = []
    rows = []
    # Two threads: real widths, so this is the one place where they pay.
    threads = min(os.cpu_count() or 1, 4)
    # The host's own choice on a CPU, sub-quadratic attention, breaks the graph of every block.
    args = ("--use-pytorch-cross-attention",)
    with HostServer(models=models, tag="demo", threads=threads, extra_args=args) as server:
        say(f"server up in {server.start_seconds:.1f} s, log: {server.log_path}")
        server.events.add_listener(Narrator())
        before = flags_now(server)
        for family, title in FAMILIES:
            for tier in TIERS:
                found, digest, seconds = run_one(server, family, title, tier, output)
                problems += found
                rows.append((title, tier, seconds, digest[:12]))
            # One model at a time keeps the demo within a few GiB.
            server.free(unload_models=True, free_memory=True)
        say()
        if not print_flags(before, flags_now(server)):
            problems.append("a process flag is not what it was before")
        shutil.copy2(server.log_path, output / "comfyui.log")
    say(f"\n{'model':<12} {'tier':<9} {'prompt s':>8}  latent sha256")
    for title, tier, seconds, digest in rows:
        say(f"{title:<12} {tier:<9} {seconds:>8.1f}  {digest}")
    say("(one layer on a CPU: the first run of a model includes loading, the first max compiling)")
    say(f"\n{time.monotonic() - began:.0f} s in all; everything is in {output}")
    for problem in problems:
        say(f"FAILED: {problem}")
    say("demo failed" if problems else "demo passed: every run finished, every flag is back")
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except provision.ProvisionError as error:
        sys.exit(str(error))
