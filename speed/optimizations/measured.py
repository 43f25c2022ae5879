"""Engagement by measurement: what an optimization put in stays only where it is faster."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from .. import probe
from ..errors import is_out_of_memory
from ..families.vae import part_of
from .base import Context, Handle

Variant = Callable[[], AbstractContextManager[object]]


def part_in_use(context: Context) -> Any:
    """The half of the VAE that the call runs."""
    trial = context.host.trial
    return part_of(context.denoiser, "vae decode" if trial is None else trial.what)


def why_not(context: Context, name: str) -> str | None:
    """Why `name` would not pay here, from what is known, or None."""
    if context.forced:
        return None
    if context.host.trial is None:
        return "not measured: there is no call to try it on"
    found = probe.known(_key(context, name), context.host.state_folder)
    return None if found is None or found.wins else _no_gain(found)


def settle(
    handle: Handle,
    context: Context,
    name: str,
    variant: Variant,
    set_up_is_counted: bool = True,
) -> Handle:
    """`handle`, with its figures; emptied where it did not win.

    Args:
        variant: In this context the call goes with the handle in place.
        set_up_is_counted: As in `probe.measure`.
    """
    trial = context.host.trial
    if context.forced or trial is None:
        return handle
    key = _key(context, name)
    found = probe.known(key, context.host.state_folder)
    if found is None:
        try:
            found = probe.measure(
                trial,
                variant,
                context.device,
                probe.BUDGET_S,
                set_up_is_counted=set_up_is_counted,
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found = probe.Figures(problem="not enough memory to measure it")
        if handle.fell_back:  # nothing was measured but what runs without it
            handle.flags, handle.patches = {}, ()
            return handle
        probe.remember(key, context.host.state_folder, found)
    if found.wins:
        handle.note = "; ".join(part for part in (handle.note, found.text()) if part)
    else:
        handle.flags, handle.patches = {}, ()
        handle.not_used = _no_gain(found)
    return handle


def _no_gain(found: probe.Figures) -> str:
    return found.text() if found.problem else f"does not pay here: {found.text()}"


def _key(context: Context, name: str) -> str:
    trial = context.host.trial
    assert trial is not None
    # Sizes within a factor of 1.4 in area share their figures.
    size = round(2 * math.log2(max(1, trial.size[0] * trial.size[1] * trial.pixels**2)))
    return probe.key(
        context.device,
        name,
        *(f"with {other}" for other in sorted(context.engaged)),
        trial.what,
        _digest(part_in_use(context)),
        context.dtype,
        context.batch,
        f"2^{size / 2:g} px",
    )


def _digest(part: nn.Module) -> str:
    shapes = repr([(name, tuple(p.shape)) for name, p in part.named_parameters()])
    return hashlib.sha256(f"{type(part).__name__} {shapes}".encode()).hexdigest()[:16]
