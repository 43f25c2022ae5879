"""Picture sizes that are prepared before the first step of a run.

What is compiled, compared or captured once a size then happens at a known moment and not when the
user changes the size. A preparing call goes the way of any call, on random numbers, and its output
is thrown away.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from .engagement import Call
from .errors import is_out_of_memory
from .report import Report

MULTIPLE: Final = 16  # pixels of one token, each way: 8 a latent, 2 latents a patch
MOST: Final = 8
SMALLEST, LARGEST = 64, 8192
_PIXELS: Final = 8  # of one latent, in both families
# Compared and compiled, measured and captured, replayed.
_CALLS: Final = 3
Invoke = Callable[[Mapping[str, Any]], Any]


class Tiered(Protocol):
    """What a run of apply.py is here."""

    report: Report

    @property
    def publish(self) -> Callable[[str, dict[str, Any]], None]: ...

    def through(self, call: Call, invoke: Invoke) -> Any: ...


@dataclass(frozen=True)
class Size:
    """Width and height of a picture in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    def latent_like(self, x: Tensor) -> Tensor:
        """Random numbers of this size, with the other dimensions, dtype and device of `x`.

        The sampler's own random numbers are left alone.
        """
        generator = torch.Generator(x.device).manual_seed(0)
        shape = (*x.shape[:-2], *self.latent_sides)
        return torch.randn(shape, generator=generator, dtype=x.dtype, device=x.device)

    @property
    def latent_sides(self) -> tuple[int, int]:
        return self.height // _PIXELS, self.width // _PIXELS


def parse_sizes(text: str) -> tuple[Size, ...]:
    """Sizes in a text such as "1024x1024, 832x1216"; the same one twice is one.

    Raises:
        ValueError: Another word than a size, a size that no latent has, or too many.
    """
    found: dict[Size, None] = {}
    for word in re.split(r"[,;\s]+", text.strip()):
        if not word:
            continue
        match = re.fullmatch(r"(\d{1,6})[xX*](\d{1,6})", word)
        sides = tuple(map(int, match.groups())) if match else ()
        if any(s % MULTIPLE or not SMALLEST <= s <= LARGEST for s in sides) or not sides:
            raise ValueError(
                f"warm_up_sizes needs sizes in pixels, such as 1024x1024, 832x1216, with sides "
                f"that are multiples of {MULTIPLE} from {SMALLEST} to {LARGEST}; found {word!r}."
            )
        found[Size(*sides)] = None
    if len(found) > MOST:
        raise ValueError(f"warm_up_sizes takes {MOST} sizes at most; found {len(found)}.")
    return tuple(found)


class WarmUp:
    """Which of the sizes one tiered model still has to prepare."""

    def __init__(self, sizes: Sequence[Size]) -> None:
        self._sizes = tuple(sizes)
        self._done: set[Hashable] = set()

    def forget(self) -> None:
        """The model was unloaded, and what was made for it is gone."""
        self._done.clear()

    def prepare(
        self,
        run: Tiered,
        call: Call,
        x: Tensor,
        hindrance: Callable[[], str],
        at: Callable[[Tensor], tuple[Call, Invoke]],
    ) -> None:
        """Prepare the sizes for the batch that `x` has, if that has not been done.

        Args:
            call: What is about to be called.
            x: Its latents, (B, C, [T,] H, W).
            hindrance: Says why a call of another size cannot be made from this one, or "".
            at: Describes and makes the call with other latents in it.
        """
        wanted = [size for size in self._sizes if size.latent_sides != tuple(x.shape[-2:])]
        key = (id(call.denoiser), x.shape[0], x.dtype)
        if key in self._done or not wanted:
            return
        self._done.add(key)
        if reason := call.host.participant or hindrance():
            run.report.notes.append(f"no size was prepared: {reason}")
            return
        said = []
        for index, size in enumerate(wanted, 1):
            facts = {"size": str(size), "index": index, "count": len(wanted)}
            phase = {"phase": "preparing", **facts}
            said.append(f"{size} ({_prepare_one(run, phase, *at(size.latent_like(x)))})")
        run.publish("phase", {"phase": "sampling"})
        run.report.notes.append(f"prepared before the first step: {', '.join(said)}")


def _prepare_one(run: Tiered, phase: dict[str, Any], call: Call, invoke: Invoke) -> str:
    """What it took, or why it was left."""
    spare = call.host.spare_bytes() if call.host.spare_bytes is not None else 0
    if spare < 0:
        return f"left out: {-spare / 2**30:.1f} GiB short of memory"
    started = time.perf_counter()
    try:
        for _ in range(_CALLS):
            # Each time: what engages and what compiles has its own word for the page.
            run.publish("phase", phase)
            run.through(call, invoke)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if call.host.after_out_of_memory is not None:
            call.host.after_out_of_memory(call.denoiser)
        return "left out: out of memory"
    if call.device.type == "cuda":
        torch.cuda.synchronize(call.device)
    return f"{time.perf_counter() - started:.1f} s"
