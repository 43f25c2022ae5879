"""Makes the pack importable as `speed_tier`, and says aloud which tests cannot run here."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import types
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")

# The pack's own folder name is not an identifier, and its top level must not be on sys.path:
# our `nodes` would hide the host's module of that name.
if "speed_tier" not in sys.modules:
    package = types.ModuleType("speed_tier")
    package.__path__ = [str(REPO)]
    sys.modules["speed_tier"] = package

# Compiled code of the tests, and of the hosts they start, goes into no host's user folder, and one
# test run after another finds what it has. Tests of the folder itself set their own.
OWNER = os.getuid() if hasattr(os, "getuid") else "user"
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(tempfile.gettempdir(), f"speed_tier_tests_inductor_{OWNER}"),
)

try:
    import torch
except ImportError:  # the static contracts need no torch
    torch = None
else:
    # OpenMP threads cost more than they give on tiny tensors, and one thread repeats bit for bit.
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # Triton reads it when it is imported and when a kernel is decorated; test modules that
        # are collected before the kernels' may import Triton.
        os.environ["TRITON_INTERPRET"] = "1"


def chromium_path() -> str | None:
    return next((p for p in map(shutil.which, CHROMIUM_NAMES) if p), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Host tests are never skipped: a host that cannot be found or fetched is an error.
    reasons = {}
    if torch is None or not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device; found none"
    if chromium_path() is None:
        reasons["browser"] = "needs Chromium; found none. Run: apt-get install -y chromium"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    texts = [r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr) for r in skipped]
    for reason in sorted(set(texts)):
        terminalreporter.write_line(f"NOT RUN ({texts.count(reason)}): {reason}", yellow=True)
