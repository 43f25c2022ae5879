"""Packed layers that another pack loaded, told by their structure.

ComfyUI-GGUF keeps a weight as a uint8 tensor subclass with `tensor_type` (GGUF type id),
`tensor_shape` (logical) and `patches` ((host patches, key) pairs), in a Linear with a `get_weight`.
A bias is of the same subclass, of a float type. A `ForeignLinear` computes what such a layer
computes, from the same bytes.
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
        # In a tuple, so that they do not become parameters of this module.
        self._source: tuple[Any, Any] = (None, None)
        self._addresses: tuple[int, int] = (0, 0)
        self._patch_groups: list[Any] = []
        self._low_rank = True
        self._by_its_own = False

    def refresh(self) -> bool:
        """Follow the layer's current weight and patches; returns whether it has adapters."""
        module = self.__dict__["module"]
        source = (_held(module, "weight"), _held(module, "bias"))
        # A host that moves a module gives a parameter other memory, not another object.
        addresses = _addresses(*source)
        if addresses != self._addresses or not all(map(is_, source, self._source)):
            self._source, self._addresses = source, addresses
            self._take()
        self._read_patches(source[0])
        # More than low rank, or packed otherwise than at first: the layer's own code does it.
        self._by_its_own = self.weight is None or not self._low_rank
        return self.adapters is not None

    def fits(self) -> bool:
        """Whether the layer's weight is packed as it was at first."""
        form = (self.qtype, self.out_features, self.in_features)
        return _packed_form(self.__dict__["module"]) == form

    def _take(self) -> None:
        self.weight = self.bias = None
        if self.fits():
            weight, bias = self._source
            self.weight = _plain(weight)
            self.bias = None if bias is None else _plain(bias)

    def _read_patches(self, weight: Any) -> None:
        groups = [group for group, _ in getattr(weight, "patches", ())]
        if len(groups) == len(self._patch_groups) and all(map(is_, groups, self._patch_groups)):
            return
        self._patch_groups = groups
        patches = [patch for group in groups for patch in group]
        terms = low_rank_terms(patches, (self.out_features, self.in_features))
        self._low_rank = terms is not None
        self.adapters = Adapters(terms) if terms else None

    def let_go(self) -> None:
        """Keep no weight between runs: the host may move the model away."""
        self._source = (None, None)
        self.weight = self.bias = None

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
    return [ForeignLinear(module, state) for module in foreign_modules(denoiser)]


def foreign_modules(denoiser: nn.Module) -> list[Any]:
    """The packed Linear layers of another pack, in module order."""
    return [module for module in denoiser.modules() if _packed_form(module) is not None]


def _packed_form(module: Any) -> tuple[int, int, int] | None:
    """Type, rows and columns of another pack's packed Linear; `None` for any other module."""
    weight = getattr(module, "weight", None)
    shape = getattr(weight, "tensor_shape", None)
    qtype = getattr(weight, "tensor_type", None)
    if not isinstance(weight, Tensor) or shape is None or qtype is None:
        return None
    if not callable(getattr(module, "get_weight", None)) or not hasattr(module, "in_features"):
        return None
    row = BY_ID.get(int(qtype))
    if row is None or len(shape) != 2 or isinstance(module, QuantLinear):
        return None
    rows, cols = map(int, shape)
    bias = getattr(module, "bias", None)
    if bias is not None and not _is_plain_bias(_plain(bias), rows):
        return None
    packed = _plain(weight)
    if (
        packed.dtype != torch.uint8
        or not packed.is_contiguous()
        or packed.numel() != row.packed_bytes(rows, cols)
        or packed.data_ptr() % 2
    ):
        return None
    return int(qtype), rows, cols


def _is_plain_bias(bias: Tensor, rows: int) -> bool:
    return bias.is_floating_point() and bias.shape == (rows,)


def _held(module: Any, name: str) -> Any:
    # Asked for every layer at every call: an attribute of a module costs a microsecond.
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def _addresses(weight: Any, bias: Any) -> tuple[int, int]:
    with torch._C.DisableTorchFunctionSubclass():
        return (
            weight.data_ptr() if isinstance(weight, Tensor) else 0,
            bias.data_ptr() if isinstance(bias, Tensor) else 0,
        )


def _plain(tensor: Tensor) -> Tensor:
    """`tensor` without its subclass, on the same storage."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.as_subclass(tensor, Tensor).detach()
