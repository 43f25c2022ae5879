"""Safetensors files that cannot be loaded, told before the host tries.

The host's own message names neither the file nor the cure. Reads the header alone; what
the tensors are is for the host to say.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

from ..errors import SpeedTierError

ENDINGS: Final = (".safetensors", ".sft")
_LENGTH_BYTES: Final = 8


def refuse_broken(path: str) -> None:
    """Raise where a safetensors file is cut off or holds something else.

    Raises:
        SpeedTierError: one sentence says what the file is and what to do.
        OSError: the file cannot be opened.
    """
    if not path.lower().endswith(ENDINGS):
        return
    name = os.path.basename(path)
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        start = file.read(_LENGTH_BYTES + 2)
        length = int.from_bytes(start[:_LENGTH_BYTES], "little")
        if start.startswith(b"GGUF"):
            raise SpeedTierError(
                f"{name} is a GGUF file by its first bytes; Load Diffusion Model (Speed Tier) "
                "needs the name of one to end in .gguf. Rename it."
            )
        if start[_LENGTH_BYTES:][:1] != b"{":
            raise SpeedTierError(
                f"{name} is not a safetensors file; found {start.decode('latin-1')!a} at the "
                f"start of {size} bytes. Download it again, by the link of the file itself."
            )
        file.seek(_LENGTH_BYTES)
        end = _data_end(file.read(min(length, size)))
    if end is None or _LENGTH_BYTES + length + end > size:
        expected = "a whole header" if end is None else f"{_LENGTH_BYTES + length + end} bytes"
        raise SpeedTierError(
            f"{name} is damaged or incomplete; expected {expected}, found {size} bytes. "
            "Download it again."
        )


def _data_end(header: bytes) -> int | None:
    """Where the last tensor ends, from the end of the header; `None` for a header that is none."""
    try:
        table: dict[str, Any] = json.loads(header)
        return max(
            (int(e["data_offsets"][1]) for n, e in table.items() if n != "__metadata__"), default=0
        )
    except (ValueError, AttributeError, LookupError, TypeError):
        return None
