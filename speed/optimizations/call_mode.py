"""How a denoiser call of this thread is run while a graph is made of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager


class _Mode(threading.local):
    eager_blocks = False
    uninterrupted = False


MODE = _Mode()


@contextlib.contextmanager
def eager_blocks(wanted: bool) -> Iterator[None]:
    """Blocks run without the compiler, if `wanted`."""
    before, MODE.eager_blocks = MODE.eager_blocks, MODE.eager_blocks or wanted
    try:
        yield
    finally:
        MODE.eager_blocks = before


@contextlib.contextmanager
def uninterrupted(hold: Callable[[], AbstractContextManager[object]] | None) -> Iterator[None]:
    """Nobody's interrupt is raised: an exception inside a capture may end the process.

    Args:
        hold: holds off the host's own interrupt.
    """
    before, MODE.uninterrupted = MODE.uninterrupted, True
    try:
        with hold() if hold is not None else contextlib.nullcontext():
            yield
    finally:
        MODE.uninterrupted = before
