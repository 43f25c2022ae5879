"""How the scripts of this folder get at a host: imported by them before torch."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every script here."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("comfy", type=Path, help="a ComfyUI checkout")
    made.add_argument("--layers", type=int, help="fewer than the real models have")
    made.add_argument("--allocator", default="cudaMallocAsync")
    made.add_argument("--host-args", default=[], type=str.split)
    return made


def enter(options: argparse.Namespace) -> None:
    """The pack as `speed_tier`, and the host imported."""
    pack = types.ModuleType("speed_tier")
    pack.__path__ = [str(REPO)]
    sys.modules["speed_tier"] = pack
    from speed_tier.bench.host_session import enter_host

    # The folder of a script is on the path, and names in it would hide the host's.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [place for place in sys.path if place != here]
    enter_host(str(options.comfy.resolve()), options.allocator, options.host_args)
