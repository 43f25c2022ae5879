"""Measurements in processes of their own: what a child prints, and how it ended."""

from __future__ import annotations

import json
import os
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .host_session import REPO

_MARK = "ROW "


def print_rows(
    sizes: Sequence[int], measure: Callable[[int], dict[str, Any]], **facts: Any
) -> None:
    """A row a size for the process that started this one; one that fails says how."""
    for size in sizes:
        row: dict[str, Any] = {"width": size, "height": size, **facts}
        try:
            row |= measure(size)
        except Exception as error:
            traceback.print_exc()
            row["failed"] = f"{type(error).__name__}: {error}"[:600]
        print(_MARK + json.dumps(row), flush=True)


def rows_of(
    command: Sequence[str],
    sizes: Sequence[int],
    timeout_s: float,
    environment: Mapping[str, str | None],
) -> list[dict[str, Any]]:
    """Rows that a child printed, and one that says how it ended for every size it did not reach.

    Args:
        environment: Set on top of this process's own; None = not set in the child.
    """
    rows: list[dict[str, Any]] = []
    merged = {**os.environ, **environment}
    try:
        done = subprocess.run(
            command,
            cwd=REPO,
            env={name: value for name, value in merged.items() if value is not None},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
        said, errors = done.stdout, done.stderr
        end = f"the process ended with code {done.returncode}"
    except subprocess.TimeoutExpired as expired:
        said, errors = _text(expired.stdout), _text(expired.stderr)
        end = f"still running after {timeout_s:.0f} s"
    for line in said.splitlines():
        if line.startswith(_MARK):
            rows.append(json.loads(line.removeprefix(_MARK)))
    last = " | ".join(line for line in errors.strip().splitlines()[-4:])
    for size in sizes[len(rows) :]:
        rows.append({"width": size, "height": size, "failed": f"{end}: {last}"[:600]})
    return rows


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
