"""Packed layers that another loader made, told by their structure.

ComfyUI-GGUF keeps a weight as a uint8 tensor subclass with `tensor_type` (GGUF type id),
`tensor_shape` (logical) and `patches` ((host patches, key) pairs), in a Linear with a `get_weight`.
A bias is of the same subclass, of a float type. diffusers has `quant_type` and `quant_shape`, no
patches, and a Linear with a `compute_dtype`. A `ForeignLinear` computes what such a layer
computes, from the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..kernels import BY_ID
from .adapters import Adapters, low_rank_terms
from .linear import QuantLinear, QuantState

# How a weight says its type and its logical shape: ComfyUI-GGUF's, and diffusers'.
_STATEMENTS: Final = (("tensor_type", "tensor_shape"), ("quant_type", "quant_shape"))
# A weight, a bias, and where they lie.
_NOTHING: Final = (None, None, 0, 0)


class ForeignLinear(QuantLinear):
    """Stands in for another pack's packed Linear while a tiered call runs.

    Attributes:
        module: the other pack's layer; its weight stays where it is.
    """

    weight: Tensor | None  # type: ignore[assignment]
    bias: Tensor | None  # type: ignore[assignment]

    def __init__(self, module: Any, state: QuantState) -> None:
        qtype, (rows, cols) = stated_type(module.weight)
        super().__init__(int(cols), int(rows))
        # Not as a submodule: it belongs to the other pack's model.
        self.__dict__["module"] = module
        self.state = state
        self.qtype = int(qtype)
        # In a tuple, so that they do not become parameters of this module.
        self._source: tuple[Any, ...] = _NOTHING
        self._patch_groups: list[Any] = []
        self._low_rank = True
        self._by_its_own = False

    def refresh(self) -> bool:
        """Follow the layer's current weight and patches; returns whether it has adapters."""
        # Run for every layer at every call. Nothing is assigned that has not changed: an
        # assignment on a module costs several microseconds.
        module = self.__dict__["module"]
        weight, bias = _held(module, "weight"), _held(module, "bias")
        source = self._source
        if (
            weight is not source[0]
            or bias is not source[1]
            # A host that moves a module gives a parameter other memory, not another object.
            or (weight is not None and weight.data_ptr() != source[2])
            or (bias is not None and bias.data_ptr() != source[3])
        ):
            self._take(weight, bias)
        groups = getattr(weight, "patches", ())
        if groups or self._patch_groups:
            self._read_patches([group for group, _ in groups])
        return self.adapters is not None

    def fits(self) -> bool:
        """Whether the layer's weight is packed as it was at first."""
        form = (self.qtype, self.out_features, self.in_features)
        return _packed_form(self.__dict__["module"]) == form

    def _take(self, weight: Any, bias: Any) -> None:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (weight, bias)]
        self._source = (weight, bias, *addresses)
        self.weight = self.bias = None
        if self.fits():
            self.weight = _plain(weight)
            self.bias = None if bias is None else _plain(bias)
        self._choose()

    def _read_patches(self, groups: list[Any]) -> None:
        if len(groups) == len(self._patch_groups) and all(map(is_, groups, self._patch_groups)):
            return
        self._patch_groups = groups
        patches = [patch for group in groups for patch in group]
        terms = low_rank_terms(patches, (self.out_features, self.in_features))
        self._low_rank = terms is not None
        self.adapters = Adapters(terms) if terms else None
        self._choose()

    def _choose(self) -> None:
        # More than low rank, or packed otherwise than at first: the layer's own code does it.
        self._by_its_own = self.weight is None or not self._low_rank

    def let_go(self) -> None:
        """Keep no weight between runs: the host may move the model away."""
        self._source = _NOTHING
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
    found = (module for module in denoiser.modules() if _packed_form(module) is not None)
    return [ForeignLinear(module, state) for module in found]


def typed_weights(denoiser: nn.Module) -> list[tuple[Any, ...]]:
    """Module, type and shape of every weight that says its type: what `foreign_layers` goes by.

    A cheap look, for asking whether anything has changed.
    """
    found: list[tuple[Any, ...]] = []
    for module in denoiser.modules():
        weight = module._parameters.get("weight")
        if (stated := stated_type(weight)) is not None:
            found.append((module, *stated))
    return found


def refresh_all(layers: Iterable[ForeignLinear]) -> bool:
    """Let every layer follow its module; returns whether one has adapters."""
    with torch._C.DisableTorchFunctionSubclass():
        adapted = [layer.refresh() for layer in layers]  # every one: any() would stop
    return any(adapted)


def stated_type(weight: Any) -> Any:
    """Type and logical shape, as a weight states them; `None` for a weight that does not."""
    for kind, size in _STATEMENTS:
        qtype, shape = getattr(weight, kind, None), getattr(weight, size, None)
        if qtype is not None and shape is not None:
            return qtype, shape
    return None


def _packed_form(module: Any) -> tuple[int, int, int] | None:
    """Type, rows and columns of another pack's packed Linear; `None` for any other module."""
    weight = getattr(module, "weight", None)
    stated = stated_type(weight)
    if not isinstance(weight, Tensor) or stated is None or not hasattr(module, "in_features"):
        return None
    if not callable(getattr(module, "get_weight", None)) and not hasattr(module, "compute_dtype"):
        return None
    qtype, shape = stated
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
    parameters = module._parameters  # an attribute of a module takes a microsecond
    return parameters[name] if name in parameters else getattr(module, name)


def _plain(tensor: Tensor) -> Tensor:
    """`tensor` without its subclass, on the same storage."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.as_subclass(tensor, Tensor).detach()
