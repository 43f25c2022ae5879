"""One JSON row a measurement, each with the machine, versions and command that gave it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .host_session import REPO

_NOT_SHOWN = ("versions", "peak_bytes", "command", "gpu", "host", "commit", "started")


def command_line(module: str) -> str:
    """The command of this process. Before the host is entered, which takes sys.argv."""
    return " ".join([f"python -m {module}", *sys.argv[1:]])


def current_commit() -> str:
    """Short commit of this checkout, "" outside one."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=False)
    return done.stdout.strip()


class Recorder:
    """Prints rows and appends them to a file. Made after the host is on the path."""

    def __init__(self, out: Path, command: str, allocator: str, commit: str = "") -> None:
        import comfyui_version
        import torch
        from speed_tier.speed.env import versions

        self.out = out.resolve()
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._facts = {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "commit": commit or current_commit(),
            "allocator": allocator,
            "host": comfyui_version.__version__,
            "versions": versions(),
            "command": command,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def __call__(self, row: dict[str, Any]) -> None:
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print({k: v for k, v in shown.items() if k not in _NOT_SHOWN}, flush=True)
        with self.out.open("a") as file:
            file.write(json.dumps({**self._facts, **row}) + "\n")
