"""A Linear whose weight stays packed as the file has it, dequantised at every call.

Nothing here knows a host: `QuantLinear` takes the place of `nn.Linear` in any module, and is the
base of the host's own class (`hosts/comfy_quant.py`).
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Final

import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from torch import Tensor, nn

from ..errors import GGUFFileError
from ..kernels import check_packed, dequantize
from .adapters import Adapters
from .load import QuantTensorSpec


class QuantState:
    """How the packed layers of one model work now; all of them share one.

    Attributes:
        fast: dequantise by the path that `kernels.dispatch` chose; else by the eager reference.
            A tier sets it around each call of the denoiser.
        adapted: some layer has adapters. For the whole model, so that compiled code knows two
            variants of a block and not one for each set of LoRA targets.
        hooked: weights whose adapters a scheduled LoRA has replaced for the moment.
        notes: what the loader found, for the report.
    """

    def __init__(self, notes: tuple[str, ...] = ()) -> None:
        self.fast = False
        self.adapted = False
        self.hooked: set[str] = set()
        self.notes = notes


class QuantLinear(nn.Module):
    """`x @ weight.T + bias` with a packed weight.

    Attributes:
        weight: `(rows, bytes_per_row) uint8`, so that moving and counting it is moving and counting
            the stored bytes.
        bias: `(rows,)` or `None`.
        qtype: GGUF type id.
        state: shared by the model's packed layers.
        adapters: LoRA and the like on this weight, or `None`.
        dense: the dequantised weight where `gguf.cache` keeps it, or `None`.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int) -> None:
        nn.Module.__init__(self)  # not super(): a host's Linear may come next, with a weight
        self.in_features = in_features
        self.out_features = out_features
        self.weight = None
        self.bias = None
        self.qtype: int | None = None
        self.state = QuantState()
        self.adapters: Adapters | None = None
        self.dense: Tensor | None = None
        self._in_file = False
        self._take_slot()

    def _take_slot(self) -> None:
        # A tensor, because compiled code guards on a number's value but not on a tensor's: all
        # blocks of a kind share one artefact, and each layer still finds its own adapters.
        number = next(_numbers)
        # On the CPU even where a model is built on the meta device: the op reads it.
        self._slot = torch.tensor(number, dtype=torch.int64, device="cpu")
        _linears[number] = self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["dense"] = None  # it was that of another weight

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._take_slot()  # a copy has adapters of its own

    def pack(self, spec: QuantTensorSpec, state: QuantState) -> None:
        """Take a packed weight.

        Raises:
            GGUFFileError: its shape is not the layer's.
            KernelConstraintError: its bytes do not fit its shape.
        """
        if spec.shape != (self.out_features, self.in_features):
            raise GGUFFileError(
                f"a layer needs a weight of {self.out_features} x {self.in_features}; found "
                f"{spec.shape[0]} x {spec.shape[1]}. The file is damaged or of another model."
            )
        check_packed(spec.packed, spec.qtype, *spec.shape, torch.float32)
        self.weight = nn.Parameter(spec.packed, requires_grad=False)
        self.qtype = spec.qtype
        self.state = state
        self._in_file = True

    def leave_file(self) -> None:
        """Copy a weight that is still a view of the mapped file into memory of its own."""
        if self._in_file and self.weight is not None and self.weight.device.type == "cpu":
            self.weight.data = self.weight.data.clone()
        self._in_file = False

    @property
    def quant_signature(self) -> int | None:
        """What makes this layer another kind than one of equal byte shape: Q4_K and Q4_0 are."""
        return self.qtype

    def dense_weight(self, dtype: torch.dtype, packed: Tensor | None = None) -> Tensor:
        """The weight without adapters, `(out_features, in_features)` of `dtype`.

        Never the cached one or the stored bytes: a caller may change what it gets.
        """
        packed = self.weight if packed is None else packed
        assert packed is not None
        dense = self._dense_or_view(dtype, packed)
        return dense.clone() if dtype is self._stored_dtype else dense

    @property
    def _stored_dtype(self) -> torch.dtype | None:
        return None if self.qtype is None else _FLOAT_VIEWS.get(self.qtype)

    def _dense_or_view(self, dtype: torch.dtype, packed: Tensor) -> Tensor:
        assert self.qtype is not None
        if dtype is self._stored_dtype:
            return packed.view(dtype).view(self.out_features, self.in_features)
        path = None if self.state.fast else "reference"
        return dequantize(packed, self.qtype, self.out_features, self.in_features, dtype, path)

    def _weight_to_read(self, dtype: torch.dtype, packed: Tensor) -> Tensor:
        if self.dense is not None and self.state.fast and self.dense.dtype is dtype:
            return self.dense
        return self._dense_or_view(dtype, packed)

    def forward(self, input: Tensor) -> Tensor:
        assert self.weight is not None
        packed: Tensor = self.weight
        if packed.device != input.device:
            packed = packed.to(input.device, non_blocking=True)
        bias = None if self.bias is None else self.bias.to(input.device, input.dtype)
        return self.product(input, packed, bias)

    def product(self, input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output from a weight and a bias that are where the input is."""
        state = self.state
        if not state.adapted:
            dtype = input.dtype
            if state.fast and self.dense is None and self.qtype not in _FLOAT_VIEWS:
                # What the other comes to, without its questions: the path that counts.
                assert self.qtype is not None
                dense = dequantize(packed, self.qtype, self.out_features, self.in_features, dtype)
            else:
                dense = self._weight_to_read(dtype, packed)
            return F.linear(input, dense, bias)
        if torch.compiler.is_compiling():
            assert self.qtype is not None
            return torch.ops.speed_tier.adapted_linear(
                input, packed, bias, self._slot, self.out_features
            )
        return self.adapted_product(input, packed, bias)

    def adapted_product(self, input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        """`product` with what `adapters` says, if this layer has any."""
        adapters = self.adapters
        if adapters is not None and adapters.rewrite is not None:
            dense = adapters.rewrite(self.dense_weight(torch.float32, packed))
            return F.linear(input, dense.to(input.dtype), bias)
        output = F.linear(input, self._weight_to_read(input.dtype, packed), bias)
        if adapters is not None:
            adapters.add_to(output, input)
        return output


# Stored types whose bytes are already what is asked for.
_FLOAT_VIEWS: Final = {
    int(GGMLQuantizationType.BF16): torch.bfloat16,
    int(GGMLQuantizationType.F16): torch.float16,
    int(GGMLQuantizationType.F32): torch.float32,
}
_numbers: Final = itertools.count()
_linears: Final[weakref.WeakValueDictionary[int, QuantLinear]] = weakref.WeakValueDictionary()

_library = torch.library.Library("speed_tier", "FRAGMENT")
_library.define(
    "adapted_linear(Tensor input, Tensor packed, Tensor? bias, Tensor slot, SymInt rows) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _adapted_linear(
    input: Tensor, packed: Tensor, bias: Tensor | None, slot: Tensor, rows: int
) -> Tensor:
    linear = _linears[int(slot)]  # alive: it is running
    return linear.adapted_product(input, packed, bias)


def _adapted_linear_fake(
    input: Tensor, packed: Tensor, bias: Tensor | None, slot: Tensor, rows: int
) -> Tensor:
    return input.new_empty((*input.shape[:-1], rows))


_library.impl("adapted_linear", _adapted_linear, "CompositeExplicitAutograd")
torch.library.register_fake("speed_tier::adapted_linear", _adapted_linear_fake, lib=_library)
