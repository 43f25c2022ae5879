"""Where compiled code is kept, so that a new process does not compile again.

torch keeps what Inductor and Triton built in a folder of the system's temporary files: lost at a
restart of the machine, shared with everything, without a bound. Here it is a folder a *key* in the
host's user folder: card, torch, Triton, Python and this pack (the model is in torch's own key of
each entry). It is named to torch only while a run lasts, through leased flags. Where the user
folder cannot hold it, torch's own folder is used as before, with the reason in the report.

Two processes may share a folder: torch writes every entry aside and moves it into place. What is
deleted is moved out of the way first, so nobody finds half of it, and nothing is deleted under a
process that has said that it runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from .env import capabilities, pack_version, versions
from .flags import breaks_compile_commands, default_inductor_cache, safe_inductor_cache

log = logging.getLogger("speed_tier.compile_cache")

LIMIT_BYTES: Final = 2 * 2**30
_ROOT: Final = "compiled"
_ABOUT: Final = "about.json"
_IN_USE: Final = "in_use"
_TRASH: Final = "trash-"
# No run compiles for that long; a process that was killed leaves its mark behind.
_MARK_LASTS_S: Final = 3600
_REASONS_KEPT: Final = 20
# Triton's own folders and file names below ours take up to 170 characters. Windows stops at 260;
# elsewhere a path may have 4096, and a shebang or socket in a build far fewer.
_MAX_LENGTH: Final = 90 if os.name == "nt" else 400
# File locks and moves are not to be relied on there, and thousands of small files are slow.
_NETWORK: Final = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "drvfs", "fuse.sshfs", "afs", "ceph", "davfs")
)
_MADE_HERE: Final[set[Path]] = set()  # folders that were new to this process
_lock = threading.Lock()  # one deletion at a time


@dataclass
class CompileCache:
    """The folder that one run compiles with.

    Attributes:
        flags: Process-wide flags to hold while the run lasts.
        where: The folder, and why it is not ours where it is not; for the report.
        folder: Ours, None where torch's own or the user's is used.
    """

    flags: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    folder: Path | None = None
    _mark: Path | None = None

    def open(self) -> None:
        """The run begins: nobody deletes what it may be reading."""
        if self.folder is None:
            return
        marks = self.folder.parent / _IN_USE
        mark = marks / f"{self.folder.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):
            marks.mkdir(exist_ok=True)
            mark.touch()
            self._mark = mark
            os.utime(self.folder / _ABOUT)  # the key that was used last is deleted last

    def close(self, grown: bool) -> None:
        """The run has ended. Idempotent.

        Args:
            grown: Something was compiled anew; the bound is looked after, beside what comes next.
        """
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.unlink(missing_ok=True)
            self._mark = None
            if grown and self.folder is not None:
                threading.Thread(target=prune, args=(self.folder,), daemon=True).start()

    def make_anew(self, reason: str) -> bool:
        """Whether the folder was emptied because something in it may be damaged.

        Once for a reason and key: what fails in an empty folder as well is not the folder's fault,
        and emptying it at every start would cost every other block its warm start.
        """
        if self.folder is None or self.folder in _MADE_HERE:
            return False
        reasons = _reasons(self.folder)
        if reason in reasons or _is_in_use(self.folder, but_for=os.getpid()):
            return False
        log.warning("%s is made anew: %s", self.folder, reason)
        with _lock:
            if not _remove(self.folder):
                return False
            _MADE_HERE.add(self.folder)
            try:
                _make(self.folder, "", [*reasons, reason][-_REASONS_KEPT:])
            except OSError as error:
                log.warning("%s cannot be made anew: %s", self.folder, error)
                return False
        return True


def choose(state_folder: Path | None, device: torch.device) -> CompileCache:
    """The folder for compiles on `device`, made if need be.

    Args:
        state_folder: Where the pack may keep files between processes, None = nowhere.
    """
    asked = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    own = default_inductor_cache()
    # Inductor leaves its default set after somebody else's compile; that is nobody's wish.
    if asked and os.path.abspath(asked) != os.path.abspath(own):
        return _torchs(f"{asked} (TORCHINDUCTOR_CACHE_DIR)", asked, device)
    if state_folder is None:
        return _torchs(own, own, device)
    text = _key_text(device)
    folder = state_folder.absolute() / _ROOT / hashlib.sha256(text.encode()).hexdigest()[:12]
    problem = _unsuitable(folder)
    if not problem:
        try:
            if not folder.is_dir():
                _MADE_HERE.add(folder)
                _make(folder, text, [])
            problem = _not_ours_alone(folder.parent) or _not_ours_alone(folder)
            if not problem:
                _try_to_write(folder)
        except OSError as error:
            problem = f"cannot be written ({error.strerror or error})"
    if problem:
        log.info("compiled code is not kept in %s: it %s", folder, problem)
        return _torchs(f"{own}, because {folder} {problem}", own, device)
    flags = {"env.TORCHINDUCTOR_CACHE_DIR": str(folder)}
    return CompileCache({**flags, **_triton_flag(folder / "triton", device)}, str(folder), folder)


def _torchs(where: str, folder: str, device: torch.device) -> CompileCache:
    flags = safe_inductor_cache()
    used = flags.get("env.TORCHINDUCTOR_CACHE_DIR", folder)
    if breaks_compile_commands(folder):
        where = f"{used}, because blanks and quotes in {where} break compile commands"
    # Where Inductor puts it by itself, and leaves the variable set.
    triton = Path(used) / "triton" / str(device.index or 0)
    return CompileCache({**flags, **_triton_flag(triton, device)}, where)


def _triton_flag(folder: Path, device: torch.device) -> dict[str, Any]:
    """Triton's folder, unless the user named one; Inductor sets it to its own where it is unset."""
    asked = os.environ.get("TRITON_CACHE_DIR")
    if device.type == "cpu" or (asked and not asked.startswith(default_inductor_cache())):
        return {}
    return {"env.TRITON_CACHE_DIR": str(folder)}


def _key_text(device: torch.device) -> str:
    found = versions()
    name = capabilities(device).device_name if device.type != "cpu" else _cpu_name()
    parts = (name, found["torch"], found["triton"], found["python"], pack_version())
    return " | ".join(map(str, parts))


def _cpu_name() -> str:
    """The processor: code for one may not run on another, and user folders are moved about."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return f"{platform.machine()} {platform.processor()}"


def _unsuitable(folder: Path) -> str:
    if breaks_compile_commands(str(folder)):
        return "has a blank or a quote in it, which breaks compile commands"
    if len(str(folder)) > _MAX_LENGTH:
        return f"is too long ({len(str(folder))} characters; at most {_MAX_LENGTH})"
    if kind := _network_kind(folder):
        return f"is on a network drive ({kind})"
    return ""


def _network_kind(folder: Path) -> str:
    """The kind of network file system that `folder` is on, or ""."""
    if os.name == "nt":
        return "UNC path" if str(folder).startswith("\\\\") else ""
    found = ("", "")
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8") as file:
        real = os.path.realpath(folder) + os.sep
        for line in file:
            _, place, kind, *_ = line.split(" ")
            place = place.replace("\\040", " ").rstrip(os.sep) + os.sep
            if real.startswith(place) and len(place) >= len(found[0]):
                found = (place, kind)
    return found[1] if found[1] in _NETWORK else ""


def _not_ours_alone(folder: Path) -> str:
    """Why code from `folder` is not run, or "".

    What is in there is run (modules, libraries, pickles), so nobody else may be able to put
    something in. torch makes its own folder with the process's default mode and asks nothing; this
    one is made for its owner alone and refused where another user owns it or may write to it. On
    Windows the folder has the access rights of the host's, which holds code of its own.
    """
    if not hasattr(os, "getuid"):
        return ""
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if found.st_uid != os.getuid():
        return f"belongs to another user (uid {found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by other users (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _make(folder: Path, text: str, reasons: list[str]) -> None:
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    about = {"holds": "compiled code; may be deleted", "key": text, "made_anew_for": reasons}
    (folder / _ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")


def _try_to_write(folder: Path) -> None:
    probe = folder / f"probe.{os.getpid()}.{threading.get_ident()}"
    try:
        probe.write_bytes(b"x")
    finally:
        probe.unlink(missing_ok=True)


def _reasons(folder: Path) -> list[str]:
    try:
        found = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))["made_anew_for"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []


def prune(folder: Path, limit_bytes: int = LIMIT_BYTES) -> int:
    """Keep everything below `limit_bytes`: keys used longest ago first, then the oldest entries.

    Args:
        folder: The key that is used now.

    Returns:
        How many bytes were freed.
    """
    root, freed = folder.parent, 0
    with _lock:
        _empty_trash(root)
        keys = {key: _size(key) for key in _keys(root)}
        total = sum(keys.values())
        for key in sorted(keys, key=_last_used_s):
            if total - freed > limit_bytes and key != folder and not _is_in_use(key):
                freed += keys[key] if _remove(key) else 0
        for entry in sorted(_entries(folder), key=_newest_s):
            if total - freed <= limit_bytes or _is_in_use(folder):
                break
            size = _size(entry)
            freed += size if _remove(entry, root) else 0
    if freed:
        log.info("%s: %.0f MiB of old compiled code deleted", root, freed / 2**20)
    return freed


@dataclass(frozen=True)
class Cleared:
    """What deleting all compiled code came to.

    Attributes:
        freed_bytes: What was deleted.
        kept_bytes: What was left because a run, or on Windows this process, uses it.
    """

    freed_bytes: int = 0
    kept_bytes: int = 0


def clear(state_folder: Path) -> Cleared:
    """Delete all compiled code that no run uses now. What is in memory goes on working."""
    root = state_folder.absolute() / _ROOT
    freed = kept = 0
    if root.is_symlink() or not root.is_dir():
        return Cleared()
    with _lock:
        _empty_trash(root)
        for key in _keys(root):
            size = _size(key)
            if not _is_in_use(key) and not _remove(key):
                for entry in _entries(key):  # Windows: what this process has loaded stays
                    _remove(entry, root)
            left = _size(key)
            freed, kept = freed + size - left, kept + left
    return Cleared(freed, kept)


def _keys(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return [p for p in root.iterdir() if p.is_dir() and (p / _ABOUT).is_file()]


def _last_used_s(key: Path) -> float:
    try:
        return (key / _ABOUT).stat().st_mtime
    except OSError:
        return 0.0


def _is_in_use(key: Path, but_for: int = 0) -> bool:
    """Whether a run has said that it uses `key`; those of process `but_for` do not count."""
    with contextlib.suppress(OSError):
        for mark in (key.parent / _IN_USE).glob(f"{key.name}.*"):
            if mark.name.startswith(f"{key.name}.{but_for}."):
                continue
            if time.time() - mark.stat().st_mtime < _MARK_LASTS_S:
                return True
            mark.unlink(missing_ok=True)
    return False


def _entries(folder: Path) -> Iterator[Path]:
    """Folders with files in them, each deleted as a whole: half a kernel would be broken."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "locks"]
        if files and Path(place) != folder:
            folders.clear()
            yield Path(place)


def _newest_s(entry: Path) -> float:
    with contextlib.suppress(OSError):
        return max((found.stat().st_mtime for found in os.scandir(entry)), default=0.0)
    return 0.0


def _size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _remove(folder: Path, root: Path | None = None) -> bool:
    """Move `folder` out of the way and delete it; False where it cannot be moved (Windows)."""
    trash = (root or folder.parent) / f"{_TRASH}{uuid.uuid4().hex[:12]}"
    try:
        folder.rename(trash)
    except OSError:
        return False
    shutil.rmtree(trash, ignore_errors=True)
    return True


def _empty_trash(root: Path) -> None:
    for left in root.glob(f"{_TRASH}*"):
        shutil.rmtree(left, ignore_errors=True)
