"""What a CUDA graph of a denoiser depends on, and what it cannot follow."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..cuda_graph import NotCapturableError
from ..gguf.linear import QuantLinear
from ..patching import is_replaced
from . import dynamo

# What of the host's options a forward does not read, or writes itself.
_NOT_READ: Final = frozenset(
    {
        *("cond_or_uncond", "uuids", "sigmas", "sample_sigmas", "callbacks"),
        *("total_blocks", "block_type", "block_index"),
    }
)
# Off or empty, they change nothing.
_HARMLESS_WHEN_EMPTY: Final = frozenset({"patches", "patches_replace", "prefetch_dynamic_vbars"})
# Wrappers that run inside the denoiser's forward; all other kinds are outside of it.
_INNER_WRAPPERS: Final = "diffusion_model"
_OVERRIDE: Final = "optimized_attention_override"
_OUR_ROOT: Final = __name__.partition(".")[0]


class Weights:
    """A model's parts, and where its weights and buffers are: asked at every call."""

    def __init__(self, denoiser: nn.Module) -> None:
        modules = list(denoiser.modules())
        self._held: list[Mapping[str, Tensor | None]] = [
            m._parameters for m in modules if m._parameters
        ]
        self._held += [m._buffers for m in modules if m._buffers]
        packed = [m for m in modules if isinstance(m, QuantLinear) and m.qtype is not None]
        # Another pack's layers run through stand-ins of ours.
        for module in modules:
            stand_in = getattr(vars(module).get("forward"), "__self__", None)
            if isinstance(stand_in, QuantLinear):
                packed.append(stand_in)
        self._packed = packed
        self._hooks = [m._forward_hooks for m in modules]
        self._hooks += [m._forward_pre_hooks for m in modules]
        self._patchable: list[Any] = [m for m in modules if hasattr(m, "weight_function")]
        self._modules = modules
        # Compared with in later runs, where a part may have been exchanged for another one.
        self._parts = tuple(weakref.ref(module) for module in modules)
        self._forwards = [(vars(m), vars(m).get("forward")) for m in modules]
        self._patched = [m for m in modules if _is_patched_block(m)]

    def tensors(self) -> Iterator[Tensor]:
        for held in self._held:
            for tensor in held.values():
                if tensor is not None:
                    yield tensor

    def addresses(self) -> Hashable:
        places = [tensor.data_ptr() for tensor in self.tensors()]
        for layer in self._packed:
            if layer.adapters is not None or layer.dense is not None:
                dense = layer.dense
                places += (id(layer.adapters), 0 if dense is None else dense.data_ptr())
        return self._parts, tuple(places)

    def adapters(self) -> list[Any]:
        """What the addresses name by identity: alive as long as a graph compares with it."""
        return [layer.adapters for layer in self._packed if layer.adapters is not None]

    def problem_now(self) -> str:
        """What may change from call to call and cannot be captured, or ""."""
        if any(self._hooks) or dynamo.has_global_hooks():
            return "a part of the model has a forward hook"
        if (
            any(own.get("forward") is not known for own, known in self._forwards)
            or any(is_replaced(module, "forward") for module in self._patched)
            or _replaced_methods(self._modules[0])
        ):
            return "another pack replaces code of the model at this call"
        if any(module.weight_function or module.bias_function for module in self._patchable):
            return "weights are patched at every call"
        for layer in self._packed:
            adapters = layer.adapters
            if adapters is not None and adapters.rewrite is not None:
                return "an adapter rewrites its weight at every call"
            if layer.state.hooked:
                return "a scheduled LoRA changes in mid-run"
        return ""

    def away(self, device: torch.device) -> str:
        """Which weights a graph cannot read where they are, or ""."""
        away = sum(tensor.device != device for tensor in self.tensors())
        return f"{away} weights are not on {device}" if away else ""

    def problem_of_run(self, device: torch.device) -> str:
        """What no call of a run can be captured for, or ""."""
        if away := self.away(device):
            return away
        special = {type(t).__name__ for t in self.tensors() if not _has_storage(t)}
        if special:
            return f"weights are of a special type ({', '.join(sorted(special))})"
        denoiser = self._modules[0]
        replaced = {m: names for m in self._modules if (names := _replaced_methods(m))}
        if denoiser in replaced:
            return f"another pack has replaced the model's {replaced[denoiser][0]}"
        if replaced:
            kinds = {f"{names[0]} of {type(m).__name__}" for m, names in replaced.items()}
            return f"another pack has replaced the {', the '.join(sorted(kinds)[:3])}"
        if parts := {type(m).__name__ for m in self._modules if _is_foreign(m, denoiser)}:
            return f"another pack has put parts into the model ({', '.join(sorted(parts)[:3])})"
        return ""


def _is_patched_block(module: nn.Module) -> bool:
    # Stand-ins of packed layers, hundreds of them, are looked after by their own feature.
    forward = vars(module).get("forward")
    return forward is not None and not isinstance(getattr(forward, "__self__", None), QuantLinear)


def _replaced_methods(module: nn.Module) -> list[str]:
    """Methods of the class that somebody else has replaced in the instance."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value)
        and callable(getattr(type(module), name, None))
        and is_replaced(module, name)
    ]


def _has_storage(tensor: Tensor) -> bool:
    """False for a tensor made of others, whose memory cannot be told by its address."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def _is_foreign(module: nn.Module, denoiser: nn.Module) -> bool:
    """Whether another pack's class computes something here: it may keep numbers that change from
    step to step in Python (a rotary embedding that follows the timestep), and a graph would not.

    A layer with a weight that is the host's by descent is another pack's loader's.
    """
    host, found = _root(type(denoiser)), _root(type(module))
    if found in (_OUR_ROOT, "torch") or found.startswith(host):
        return False
    ancestors = {_root(kind) for kind in type(module).__mro__}
    return "weight" not in module._parameters or host not in ancestors


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def options_signature(options: Any) -> Hashable:
    """What a forward reads of the host's options.

    Raises:
        NotCapturableError: something in them acts inside the forward.
    """
    found: list[Hashable] = []
    for name, value in options.items():
        if name in _NOT_READ or (name in _HARMLESS_WHEN_EMPTY and not value):
            continue
        if name == "wrappers":
            inner = [key for key, held in value.get(_INNER_WRAPPERS, {}).items() if held]
            if inner:
                raise NotCapturableError(f"a wrapper runs inside the model ({inner[0]})")
        elif name == _OVERRIDE and getattr(value, "__name__", "") == "speed_tier_attention":
            found.append((name, id(value)))  # alive: one a backend for the whole process
        else:
            raise NotCapturableError(f"the host's option {name} is set")
    return tuple(found)


def sizeless(signature: Any) -> Hashable:
    """A signature in which calls of other sizes, that run the same operations, are the same.

    None and one are no sizes: code branches on an absent text and on a single picture.
    """
    if not isinstance(signature, tuple):
        return signature
    if all(type(number) is int for number in signature):  # a shape, or strides
        return tuple(min(number, 2) for number in signature)
    return tuple(map(sizeless, signature))
