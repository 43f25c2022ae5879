"""What a CUDA graph of a denoiser depends on, and what it cannot follow."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..cuda_graph import NotCapturableError
from ..gguf.linear import QuantLinear
from ..patching import is_replaced

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


class Weights:
    """Where a model's weights and buffers are, asked at every call."""

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
        return tuple(places)

    def adapters(self) -> list[Any]:
        """What the addresses name by identity: alive as long as a graph compares with it."""
        return [layer.adapters for layer in self._packed if layer.adapters is not None]

    def problem_now(self) -> str:
        """What may change from call to call and cannot be captured, or ""."""
        if any(self._hooks):
            return "a part of the model has a forward hook"
        if any(module.weight_function or module.bias_function for module in self._patchable):
            return "weights are patched at every call"
        for layer in self._packed:
            adapters = layer.adapters
            if adapters is not None and adapters.rewrite is not None:
                return "an adapter rewrites its weight at every call"
            if layer.state.hooked:
                return "a scheduled LoRA changes in mid-run"
        return ""

    def problem_of_run(self, device: torch.device, denoiser: nn.Module) -> str:
        """What no call of a run can be captured for, or ""."""
        away = sum(tensor.device != device for tensor in self.tensors())
        if away:
            return f"{away} weights are not on {device}"
        replaced = [m for m in self._modules if is_replaced(m, "forward")]
        if denoiser in replaced:
            return "another pack has replaced the model's forward"
        if replaced:
            names = {type(module).__name__ for module in replaced}
            return f"another pack has replaced the forward of {', '.join(sorted(names)[:3])}"
        return ""


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
