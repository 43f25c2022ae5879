"""What was measured on this machine, kept between processes.

Some choices can only be made by measuring what costs seconds to set up (compiled blocks beside
fused ones). The figures are kept in the host's user folder, under a key that names everything they
hold for: card, versions of torch, Triton and this pack, model and size. Another version measures
again. A file that is damaged or cannot be written changes nothing but the cost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import Final

import torch

from .env import capabilities, pack_version, versions

log = logging.getLogger("speed_tier.probe")

_FILE: Final = "measured.json"
_KEPT: Final = 500
_lock = threading.Lock()


def key(device: torch.device, *what: object) -> str:
    """A key for what was measured on `device` with the running versions."""
    card, found = capabilities(device), versions()
    parts = (card.device_name, found["torch"], found["triton"], pack_version(), *what)
    return " | ".join(map(str, parts))


class Measurements:
    """Pairs of milliseconds by key, in one file.

    Args:
        folder: where the file is; None = nowhere, then nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / _FILE

    def get(self, key: str) -> tuple[float, float] | None:
        """The two figures under `key`, or None."""
        pair = self._read().get(key)
        return None if pair is None else (pair[0], pair[1])

    def put(self, key: str, first_ms: float, second_ms: float) -> None:
        """Keep two figures; the oldest of very many are forgotten."""
        if self._path is None:
            return
        with _lock:
            rows = self._read()
            rows.pop(key, None)
            rows[key] = [round(first_ms, 4), round(second_ms, 4)]
            kept = dict(list(rows.items())[-_KEPT:])
            # Written aside and moved: another process may read or write at the same moment.
            aside = self._path.with_name(f"{_FILE}.{os.getpid()}")
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                aside.write_text(json.dumps(kept), encoding="utf-8")
                aside.replace(self._path)
            except OSError as error:
                log.info("%s could not be written: %s", _FILE, error)
                with contextlib.suppress(OSError):
                    aside.unlink(missing_ok=True)

    def _read(self) -> dict[str, list[float]]:
        if self._path is None or not self._path.is_file():
            return {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {name: pair for name, pair in found.items() if _is_pair(pair)}


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(ms) in (int, float) and 0 < ms < 1e9 for ms in value)
    )
