"""Packed layers that another pack loaded, told by their structure.

ComfyUI-GGUF keeps a weight as a uint8 tensor subclass with `tensor_type` (GGUF type id),
`tensor_shape` (logical) and `patches` ((host patches, key) pairs), in a Linear with a `get_weight`.
A `ForeignLinear` computes what such a layer computes, from the same bytes.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import BY_ID
from .adapters import Adapters, low_rank_terms
from .linear import QuantLinear, QuantState


class ForeignLinear(QuantLinear):
    """Stands in for another pack's packed Linear while a tiered call runs.

    Attributes:
        module: the other pack's layer; its weight stays where it is.
    """

    weight: Tensor | None  # type: ignore[assignment]
    bias: Tensor | None  # type: ignore[assignment]

    def __init__(self, module: Any, state: QuantState) -> None:
        rows, cols = module.weight.tensor_shape
        super().__init__(cols, rows)
        # Not as a submodule: it belongs to the other pack's model.
        self.__dict__["module"] = module
        self.state = state
        self.qtype = int(module.weight.tensor_type)
        self._source: Any = None
        self._source_bias: Any = None
        self._patch_groups: list[Any] = []
        self._by_its_own = False

    def is_free(self) -> bool:
        """Whether nobody else has replaced the layer's forward or hooked it."""
        module = self.__dict__["module"]
        return not ("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)

    def refresh(self) -> bool:
        """Follow the layer's current weight; returns whether it has adapters."""
        module = self.__dict__["module"]
        if module.weight is not self._source or module.bias is not self._source_bias:
            self._source, self._source_bias = module.weight, module.bias
            self.weight = _plain(module.weight)
            self.bias = None if module.bias is None else _plain(module.bias)
            self._read_patches(module.weight)
        return self.adapters is not None

    def _read_patches(self, weight: Any) -> None:
        groups = [group for group, _ in getattr(weight, "patches", ())]
        if len(groups) == len(self._patch_groups) and all(map(is_, groups, self._patch_groups)):
            return
        self._patch_groups = groups
        patches = [patch for group in groups for patch in group]
        terms = low_rank_terms(patches, (self.out_features, self.in_features))
        self._by_its_own = terms is None  # more than low rank: the layer's own code does it
        self.adapters = Adapters(terms) if terms else None

    def let_go(self) -> None:
        """Keep no weight between runs: the host may move the model away."""
        self._source = self._source_bias = self.weight = self.bias = None

    def forward(self, input: Tensor) -> Tensor:
        if self._by_its_own:
            module = self.__dict__["module"]
            output: Tensor = type(module).forward(module, input)
            return output
        return super().forward(input)


def foreign_layers(denoiser: nn.Module) -> list[ForeignLinear]:
    """A stand-in for every packed Linear of another pack, in module order."""
    state = QuantState()
    state.fast = True
    return [ForeignLinear(m, state) for m in denoiser.modules() if _is_foreign(m)]


def _is_foreign(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    shape = getattr(weight, "tensor_shape", None)
    qtype = getattr(weight, "tensor_type", None)
    if not isinstance(weight, Tensor) or shape is None or qtype is None:
        return False
    if not callable(getattr(module, "get_weight", None)) or not hasattr(module, "in_features"):
        return False
    row = BY_ID.get(int(qtype))
    if row is None or len(shape) != 2 or isinstance(module, QuantLinear):
        return False
    bias = getattr(module, "bias", None)
    if bias is not None and getattr(bias, "tensor_type", None) is not None:
        return False
    packed = _plain(weight)
    return (
        packed.dtype == torch.uint8
        and packed.is_contiguous()
        and packed.numel() == row.packed_bytes(*shape)
        and packed.data_ptr() % 2 == 0
    )


def _plain(tensor: Tensor) -> Tensor:
    """`tensor` without its subclass, on the same storage."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.as_subclass(tensor, Tensor).detach()
