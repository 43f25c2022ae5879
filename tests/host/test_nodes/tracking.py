"""What the tests watch inside the host: weak references, records, leftovers on modules."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import comfy.model_management as mm
import torch

_lock = threading.Lock()
_tracked: list[tuple[str, str, weakref.ref[Any]]] = []
_records: dict[str, list[Any]] = {}


def track(label: str, patcher: Any) -> None:
    """Remembers a patcher and its module weakly, so that the tests see when they are freed."""
    with _lock:
        for kind, thing in (("patcher", patcher), ("module", patcher.model)):
            known = any(ref() is thing and name == label for name, _, ref in _tracked)
            if not known:
                _tracked.append((label, kind, weakref.ref(thing)))


def record(name: str, value: Any) -> None:
    with _lock:
        _records.setdefault(name, []).append(value)


def records(clear: bool = False) -> dict[str, list[Any]]:
    with _lock:
        copy = {k: list(v) for k, v in _records.items()}
        if clear:
            _records.clear()
    return copy


def state() -> dict[str, Any]:
    """Alive tracked objects, loaded models, and anything left on tracked modules."""
    with _lock:
        tracked = list(_tracked)
    alive: dict[str, dict[str, int]] = {}
    leftovers: dict[str, dict[str, list[str]]] = {}
    for label, kind, ref in tracked:
        thing = ref()
        counts = alive.setdefault(label, {"patcher": 0, "module": 0})
        if thing is None:
            continue
        counts[kind] += 1
        if kind == "module":
            leftovers[label] = module_leftovers(thing)
    return {
        "alive": alive,
        "leftovers": leftovers,
        "loaded": [_describe(entry) for entry in list(mm.current_loaded_models)],
        "threads": sorted(t.name for t in threading.enumerate()),
    }


def module_leftovers(model: torch.nn.Module) -> dict[str, list[str]]:
    """Instance attributes that shadow a class's own, hooks, and wrapped modules, by name."""
    found: dict[str, list[str]] = {"shadowed": [], "hooks": [], "wrapped": []}
    for name, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if callable(value) and hasattr(type(module), key):
                found["shadowed"].append(f"{name}.{key}")
        if module._forward_hooks or module._forward_pre_hooks:
            found["hooks"].append(name)
        if type(module).__name__ == "OptimizedModule":
            found["wrapped"].append(name)
    return found


def _describe(entry: Any) -> dict[str, Any]:
    patcher = entry.model
    if patcher is None:
        return {"class": None}
    return {
        "class": type(patcher.model).__name__,
        "lowvram": bool(getattr(patcher.model, "model_lowvram", False)),
        "in_use": bool(entry.currently_used),
    }
