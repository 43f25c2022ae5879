"""Picture sizes that a run prepares beside its own.

What is compiled, compared or captured once a size then happens at a known moment and not when the
user changes the size. A preparing call goes the way of any call, on random numbers, and its output
is thrown away. They come after the run's own first call: what is measured and compiled for a first
size is that of the picture that is made.
"""

from __future__ import annotations

import logging
import re
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from .engagement import Call, Engagement
from .errors import is_out_of_memory
from .report import Report

log = logging.getLogger("speed_tier.warm_up")

MULTIPLE: Final = 16  # pixels of one token, each way: 8 a latent, 2 latents a patch
MOST: Final = 5  # with the run's own as many as there are graphs
SMALLEST, LARGEST = 64, 8192
_PIXELS: Final = 8  # of one latent, in both families
_CALLS: Final = 6  # compiled code is captured at the fifth call, and the sixth replays
Invoke = Callable[[Mapping[str, Any]], Any]


class Tiered(Protocol):
    """What a run of apply.py is here."""

    report: Report
    prepared: bool

    @property
    def publish(self) -> Callable[[str, dict[str, Any]], None]: ...

    def engagement(self, call: Call) -> Engagement: ...

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
        shape = (*x.shape[:-2], *self.sides)
        return torch.randn(shape, generator=generator, dtype=x.dtype, device=x.device)

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the latent."""
        return self.height // _PIXELS, self.width // _PIXELS


def parse_sizes(text: str) -> tuple[Size, ...]:
    """Sizes in a text such as "1024x1024, 832x1216"; the same one twice is one.

    Raises:
        ValueError: Another word than a size, a size that no latent has, or too many.
    """
    if not isinstance(text, str):  # over a link, whatever there is may come
        raise ValueError(f"warm_up_sizes needs a text; found {type(text).__name__}.")
    found: dict[Size, None] = {}
    for word in re.split(r"[,;\s]+", re.sub(r"(?<=\d)\s*[xX*]\s*(?=\d)", "x", text.strip())):
        if not word:
            continue
        match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", word)
        sides = tuple(map(int, match.groups())) if match else ()
        if any(s % MULTIPLE or not SMALLEST <= s <= LARGEST for s in sides) or not sides:
            raise ValueError(
                f"warm_up_sizes needs sizes in pixels, such as 1024x1024, 832x1216, with sides "
                f"that are multiples of {MULTIPLE} from {SMALLEST} to {LARGEST}; "
                f"found {word[:40]!r}."
            )
        found[Size(*sides)] = None
    if len(found) > MOST:
        raise ValueError(f"warm_up_sizes takes {MOST} sizes at most; found {len(found)}.")
    return tuple(found)


# What was prepared, by denoiser: a node that runs again has nothing to do again. An unload is no
# reason to forget it: the code stays, and a graph is made anew at its use.
_done: Final[weakref.WeakKeyDictionary[nn.Module, set[Hashable]]] = weakref.WeakKeyDictionary()


def prepare(
    sizes: Sequence[Size],
    run: Tiered,
    call: Call,
    x: Tensor,
    hindrance: Callable[[], str],
    at: Callable[[Tensor], tuple[Call, Invoke]],
) -> None:
    """After a run's first call: prepare the sizes for its batch, those that are not.

    Args:
        call: What was just called.
        x: Its latents, (B, C, [T,] H, W).
        hindrance: Says why a call of another size cannot be made from this one, or "".
        at: Describes and makes the call with other latents in it.
    """
    if run.prepared or not sizes:
        return
    run.prepared = True
    engaged = run.engagement(call).in_use()
    if not engaged:
        return
    done = _done.setdefault(call.denoiser, set())
    others = {size: (size, x.shape[0], x.dtype, engaged) for size in sizes}
    wanted = [s for s, key in others.items() if key not in done and s.sides != x.shape[-2:]]
    if wanted and (reason := call.host.participant or hindrance()):
        run.report.notes.append(f"no size was prepared: {reason}")
        return
    said = []
    for index, size in enumerate(wanted, 1):
        phase = {"phase": "preparing", "size": str(size), "index": index, "count": len(wanted)}
        other, invoke = at(size.latent_like(x))
        if short := _shortage(other):
            said.append(f"{size} (left out for now: {short})")  # memory comes and goes
            continue
        said.append(f"{size} ({_prepare_one(run, phase, other, invoke)})")
        done.add(others[size])
    if said:
        run.publish("phase", {"phase": "sampling"})
        run.report.notes.append(f"prepared in the first step: {', '.join(said)}")


def _shortage(call: Call) -> str:
    """How much memory a call lacks, or ""."""
    spare = call.host.spare_bytes() if call.host.spare_bytes is not None else 0
    return f"{-spare / 2**30:.1f} GiB short of memory" if spare < 0 else ""


def _prepare_one(run: Tiered, phase: dict[str, Any], call: Call, invoke: Invoke) -> str:
    """What it took, or why it was left."""
    started = time.perf_counter()
    try:
        for _ in range(_CALLS):
            # Each time: what compiles has its own word for the page.
            run.publish("phase", phase)
            run.through(call, invoke)
            if not any(handle.settling for handle in run.engagement(call).handles.values()):
                break
    except RuntimeError as error:  # of a size that nobody has asked for yet
        if is_out_of_memory(error) and call.host.after_out_of_memory is not None:
            call.host.after_out_of_memory(call.denoiser)
        log.warning("%s could not be prepared: %s", phase["size"], error)
        said = "out of memory" if is_out_of_memory(error) else " ".join(str(error).split())[:120]
        return f"left out: {said}"
    if call.device.type == "cuda":
        torch.cuda.synchronize(call.device)
    return f"{time.perf_counter() - started:.1f} s"
