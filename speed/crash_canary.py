"""What was being tried when a process ended, remembered for the next one."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

log = logging.getLogger("speed_tier.crash_canary")


class CrashCanary:
    """Remembers across processes what was being captured when a process ended.

    Args:
        folder: where to write; None = nowhere, then nothing is remembered.
    """

    _SHOWN: Final = 200

    def __init__(self, folder: Path | None) -> None:
        self._live = None if folder is None else folder / "graph_being_captured.json"
        self._dead = None if folder is None else folder / "graphs_that_crashed.json"
        self._crashed: set[str] | None = None

    def crashed(self, key: str) -> bool:
        """Whether a process ended while it captured `key`."""
        if self._crashed is None:
            self._crashed = set(_read_keys(self._dead))
            if ended := set(_read_keys(self._live)) - self._crashed:
                log.warning("the last process ended during a graph capture; not tried again")
                self._crashed |= ended
                _write_keys(self._dead, sorted(self._crashed)[-self._SHOWN :])
            _remove(self._live)
        return key in self._crashed

    @contextlib.contextmanager
    def watching(self, key: str) -> Iterator[None]:
        _write_keys(self._live, [key])
        try:
            yield
        finally:  # an exception is no crash
            _remove(self._live)


def _read_keys(path: Path | None) -> list[str]:
    if path is None or not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [key for key in found if isinstance(key, str)] if isinstance(found, list) else []


def _write_keys(path: Path | None, keys: list[str]) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(keys), encoding="utf-8")
    except OSError as error:
        log.info("%s could not be written: %s", path.name, error)


def _remove(path: Path | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
