"""The only code that assigns attributes on objects the pack does not own.

Patches sit on instances, never on classes or modules of code, and only while a call runs: a
`PatchSet` is entered before the denoiser is called and left in `finally`. One registry keyed by
(object, attribute) stores the original once; patching twice is one patch with two holders, and
whoever lets go last restores exactly what was there, including "nothing in the instance".
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

_MISSING = object()
_lock = threading.RLock()


class Patch(NamedTuple):
    """Put `replacement` in the instance attribute `attribute` of `target`."""

    target: Any
    attribute: str
    replacement: Any


class _Slot:
    __slots__ = ("holders", "original", "target")

    def __init__(self, target: Any, original: Any) -> None:
        self.target = target  # kept, so that its id cannot be reused while patched
        self.original = original
        self.holders: list[Any] = []


_slots: dict[tuple[int, str], _Slot] = {}


class PatchSet:
    """Patches that go in and out together. Re-entrant, and safe across threads."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = tuple(patches)

    def __len__(self) -> int:
        return len(self._patches)

    def __enter__(self) -> PatchSet:
        done = 0
        with _lock:
            try:
                for patch in self._patches:
                    _put(patch)
                    done += 1
            except BaseException:
                for patch in reversed(self._patches[:done]):
                    _take(patch)
                raise
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            for patch in reversed(self._patches):
                _take(patch)


def _put(patch: Patch) -> None:
    key = (id(patch.target), patch.attribute)
    attributes = vars(patch.target)
    slot = _slots.get(key)
    if slot is None:
        slot = _slots[key] = _Slot(patch.target, attributes.get(patch.attribute, _MISSING))
    slot.holders.append(patch.replacement)
    # Straight into the instance: nn.Module.__setattr__ costs microseconds for every attribute,
    # and there are hundreds of these in one forward.
    attributes[patch.attribute] = patch.replacement


def _take(patch: Patch) -> None:
    key = (id(patch.target), patch.attribute)
    slot = _slots[key]
    attributes = vars(patch.target)
    for index in range(len(slot.holders) - 1, -1, -1):
        if slot.holders[index] is patch.replacement:
            del slot.holders[index]
            break
    if slot.holders:
        attributes[patch.attribute] = slot.holders[-1]
        return
    del _slots[key]
    if slot.original is _MISSING:
        attributes.pop(patch.attribute, None)
    else:
        attributes[patch.attribute] = slot.original


def beneath(target: Any, attribute: str, replacement: Any) -> Any:
    """What a call would reach if `replacement` were not there, or None for the class's own.

    An earlier patch, or what somebody else put there before this call.
    """
    slot = _slots.get((id(target), attribute))
    if slot is None:
        return None
    for index in range(len(slot.holders) - 1, 0, -1):
        if slot.holders[index] is replacement:
            return slot.holders[index - 1]
    return foreign(target, attribute)


def foreign(target: Any, attribute: str) -> Any:
    """What somebody else put in the instance in place of the class's own, or None."""
    if not is_replaced(target, attribute):
        return None
    slot = _slots.get((id(target), attribute))
    return vars(target)[attribute] if slot is None else slot.original


def active_patches() -> int:
    """How many (object, attribute) pairs are patched at this moment, in the whole process."""
    return len(_slots)


def is_replaced(target: Any, attribute: str) -> bool:
    """Whether the instance carries `attribute` itself, put there by somebody else."""
    own = vars(target).get(attribute, _MISSING)
    if own is _MISSING:
        return False
    slot = _slots.get((id(target), attribute))
    if slot is not None:
        return slot.original is not _MISSING and not _is_own_method(
            target, attribute, slot.original
        )
    return not _is_own_method(target, attribute, own)


def _is_own_method(target: Any, attribute: str, value: Any) -> bool:
    # A host that restored an object patch leaves the class's own method, bound, in the instance.
    method = getattr(type(target), attribute, _MISSING)
    return getattr(value, "__func__", None) is method and value.__self__ is target


def signature_drift(function: Callable[..., Any], parameters: Sequence[str]) -> str | None:
    """Why `function` is not the one a patch was written for, or None.

    Args:
        parameters: Names that must lead the signature, `self` left out.
    """
    try:
        found = [name for name in inspect.signature(function).parameters if name != "self"]
    except (TypeError, ValueError):
        return f"{getattr(function, '__qualname__', function)} has no readable signature"
    if found[: len(parameters)] != list(parameters):
        return (
            f"{getattr(function, '__qualname__', function)} takes ({', '.join(found)}), "
            f"the patch was written for ({', '.join(parameters)})"
        )
    return None


def body_drift(function: Callable[..., Any], needles: Sequence[str]) -> str | None:
    """Why the source of `function` lacks the lines a patch replaces, or None."""
    try:
        source = "".join(inspect.getsource(function).split())
    except (OSError, TypeError):
        return f"{getattr(function, '__qualname__', function)} has no readable source"
    missing = [needle for needle in needles if "".join(needle.split()) not in source]
    if missing:
        return f"{getattr(function, '__qualname__', function)} no longer contains {missing[0]!r}"
    return None


def point_at(parameter: torch.Tensor, storage: torch.Tensor) -> None:
    """Make `parameter` read its values from `storage`, which holds the same values."""
    parameter.data = storage


class GradOff:
    """Switches `requires_grad` off on parameters that have it on, until `remove`.

    Some hosts leave it on for loaded weights, while a weight with a merged LoRA has it off. It
    means nothing in inference, but compiled code guards on it: one more graph for every mix.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._changed = [weakref.ref(p) for p in parameters if p.requires_grad and p.is_leaf]
        for reference in self._changed:
            if (parameter := reference()) is not None:
                parameter.requires_grad_(False)

    def remove(self) -> None:
        # An inference tensor takes requires_grad only inside inference mode.
        with torch.inference_mode():
            for reference in self._changed:
                if (parameter := reference()) is not None:
                    parameter.requires_grad_(True)
        self._changed = []
