"""What was being tried when a process ended, remembered for the next one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

log = logging.getLogger("speed_tier.crash_canary")


_LIVE: Final = "graph_being_captured"
_watching = 0  # captures of this process that are under way


class CrashCanary:
    """Remembers across processes what was being captured when a process ended.

    Each process has a note of its own, named by its id: two servers may share a user folder.

    Args:
        folder: where to write; None = nowhere, then nothing is remembered.
    """

    _SHOWN: Final = 200

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._live = None if folder is None else folder / f"{_LIVE}.{os.getpid()}.json"
        self._dead = None if folder is None else folder / "graphs_that_crashed.json"
        self._crashed: set[str] | None = None

    def crashed(self, key: str) -> bool:
        """Whether a process ended while it captured `key`."""
        if self._crashed is None:
            self._crashed = set(_read_keys(self._dead))
            left = self._left_behind()
            if ended := {key for path in left for key in _read_keys(path)} - self._crashed:
                log.warning("a process ended during a graph capture; not tried again")
                self._crashed |= ended
                _write_keys(self._dead, sorted(self._crashed)[-self._SHOWN :])
            for path in left:
                _remove(path)
        return key in self._crashed

    def _left_behind(self) -> list[Path]:
        """Notes of processes that have ended."""
        notes = [] if self._folder is None else sorted(self._folder.glob(f"{_LIVE}.*json"))
        return [path for path in notes if not _is_under_way(path)]

    @contextlib.contextmanager
    def watching(self, key: str) -> Iterator[None]:
        global _watching
        _write_keys(self._live, [key])
        _watching += 1
        try:
            yield
        finally:  # an exception is no crash
            _watching -= 1
            _remove(self._live)


def _is_under_way(note: Path) -> bool:
    owner = note.name.split(".")[1]
    if not owner.isdigit():
        return False
    # A restarted container gives its server the same id again: that note is the last one's.
    return _watching > 0 if int(owner) == os.getpid() else _is_running(int(owner))


def _is_running(process: int) -> bool:
    if os.name == "nt":  # there, signal 0 ends the process
        return _is_running_on_windows(process)
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _is_running_on_windows(process: int) -> bool:
    import ctypes

    synchronize, still_running = 0x00100000, 0x00000102
    kernel: Any = vars(ctypes)["windll"].kernel32
    handle = kernel.OpenProcess(synchronize, False, process)
    if not handle:
        return False
    try:
        return bool(kernel.WaitForSingleObject(handle, 0) == still_running)
    finally:
        kernel.CloseHandle(handle)


def _read_keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
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
