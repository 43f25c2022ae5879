"""Packed layers with known weights: ours, another pack's by structure, and the host's LoRA."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Q
from speed_tier.speed.families import detect_family
from speed_tier.speed.gguf import QuantTensorSpec
from speed_tier.speed.gguf.linear import QuantLinear, QuantState
from speed_tier.speed.kernels import BY_ID, QUANT_TYPES, dispatch, forget_choices
from speed_tier.speed.kernels.reference import dequantize_reference
from speed_tier.speed.kernels.reference_iq import codebook
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.gguf import packer
from torch import Tensor, nn

BY_NAME = {row.name: row for row in QUANT_TYPES}


def fresh_seed() -> int:
    """Another one every time; a failing test shows it."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return seed


class Random:
    """Random weights and inputs from one seed."""

    def __init__(self, seed: int) -> None:
        self.numpy = np.random.default_rng(seed)
        self.torch = torch.Generator().manual_seed(seed)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.torch).to(dtype)

    def packed(self, name: str, rows: int, cols: int) -> tuple[QuantTensorSpec, Tensor]:
        """A weight as stored, and the gguf package's value of it in float64."""
        qtype = Q[name]
        values = self.numpy.standard_normal((rows, cols), dtype=np.float32) * packer.STD
        stored = packer.encode(values, qtype, self.numpy)
        dense = gguf.quants.dequantize(stored, qtype).reshape(rows, cols)
        spec = QuantTensorSpec(torch.from_numpy(stored), int(qtype), (rows, cols))
        return spec, torch.from_numpy(np.array(dense, dtype=np.float64))

    def layer(
        self,
        name: str,
        rows: int = 24,
        cols: int = 512,
        bias: bool = True,
        state: QuantState | None = None,
    ) -> tuple[QuantLinear, Tensor]:
        """A packed layer with its exact weight."""
        spec, dense = self.packed(name, rows, cols)
        layer = QuantLinear(cols, rows)
        layer.pack(spec, state or QuantState())
        if bias:
            layer.bias = nn.Parameter(self.tensor(rows), requires_grad=False)
        return layer, dense

    def stored_layer(
        self, name: str, rows: int = 24, cols: int = 512, bias: bool = True
    ) -> tuple[StoredLinear, Tensor]:
        """Another pack's packed layer with its exact weight."""
        spec, dense = self.packed(name, rows, cols)
        layer = StoredLinear(cols, rows)
        layer.hold(StoredTensor.of(spec.packed, spec.qtype, spec.shape))
        if bias:
            values = self.tensor(rows)
            layer.bias = as_parameter(StoredTensor.of(values, Q.F32, (rows,)))
        return layer, dense


def swap_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module | None]) -> list[Any]:
    """Replace every Linear for which there is another; returns the new ones, in module order."""
    made = []
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and (new := make(module)) is not None:
            model.set_submodule(path, new)
            made.append(new)
    return made


def exact(x: Tensor, dense: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), dense, None if bias is None else bias.double())


def check_close(got: Tensor, x: Tensor, dense: Tensor, bias: Tensor | None) -> None:
    """A Linear's output against float64, within what its dtype's roundings can add up to."""
    sizes = F.linear(x.double().abs(), dense.abs(), None if bias is None else bias.double().abs())
    # The weight, the sum and the bias are each rounded once; products add up in fp32.
    rounding = 1.5 * torch.finfo(got.dtype).eps + dense.shape[1] * torch.finfo(torch.float32).eps
    wrong = (got.double() - exact(x, dense, bias)).abs() - rounding * sizes
    assert got.shape == (*x.shape[:-1], dense.shape[0])
    assert got.dtype == x.dtype
    assert wrong.max() <= 0, f"{wrong.max():.2e} over the bound"


# ---- the fast path, counted ----


@contextlib.contextmanager
def counted_fast_calls() -> Iterator[Counter[str]]:
    """Weights that go by the chosen path, by type. No choice takes a compile to make."""
    calls: Counter[str] = Counter()
    choose = dispatch._choose

    def choose_counted(row, device):
        launch = choose(row, device)

        def counted(packed, rows, cols, dtype):
            calls[row.name] += 1
            return launch(packed, rows, cols, dtype)

        dispatch._chosen[row.id, dispatch._device_key(device)] = counted
        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_faster_reference", lambda *_: ("reference", "timed"))
        patch.setattr(dispatch, "_choose", choose_counted)
        forget_choices()
        try:
            yield calls
        finally:
            forget_choices()


# ---- another pack's layer ----


class StoredTensor(torch.Tensor):
    """Stored bytes that know their type; `shape` is the weight's, as that pack has it."""

    tensor_type: Any
    tensor_shape: Any
    patches: list[Any]

    @staticmethod
    def of(data: Tensor, qtype: int, shape: Sequence[int]) -> StoredTensor:
        stored = data.as_subclass(StoredTensor)
        stored.tensor_type, stored.tensor_shape = Q(qtype), torch.Size(shape)
        stored.patches = []
        return stored

    def detach(self) -> StoredTensor:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = super().to(*args, **kwargs)
        moved.tensor_type, moved.tensor_shape = self.tensor_type, self.tensor_shape
        moved.patches = list(self.patches)
        return moved

    @property
    def shape(self) -> Any:
        return self.tensor_shape


def as_parameter(stored: StoredTensor) -> nn.Parameter:
    return nn.Parameter(stored, requires_grad=False)


def bytes_of(stored: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return stored.as_subclass(Tensor)


class StoredLinear(nn.Module):
    """Dequantises at every call, patches the result, multiplies."""

    weight: Any
    bias: Any

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = self.bias = None
        self.own_calls: list[int] = []

    def hold(self, stored: StoredTensor, *groups: Sequence[Any]) -> None:
        """Take a weight, as that pack's patcher hands it over."""
        stored.patches = [(group, "key") for group in groups]
        self.weight = as_parameter(stored)

    def get_weight(self, tensor: Any, dtype: torch.dtype) -> Tensor:
        row = BY_ID[int(tensor.tensor_type)]
        if row.plain and bytes_of(tensor).is_floating_point():
            return bytes_of(tensor).to(dtype)
        table = codebook(row.name) if row.has_table else None
        dense = dequantize_reference(
            bytes_of(tensor), row.reference, row.type_size, *tensor.tensor_shape, dtype, table
        )
        return merged(dense, [patch for group, _ in tensor.patches for patch in group])

    def forward(self, x: Tensor) -> Tensor:
        self.own_calls.append(1)
        bias = None if self.bias is None else self.get_weight(self.bias, x.dtype)
        return F.linear(x, self.get_weight(self.weight, x.dtype), bias)


# ---- the host's LoRA ----


@dataclass(eq=False)
class HostAdapter:
    """Shaped like the host's adapters: (up, down, alpha, mid, dora_scale, reshape) for a LoRA."""

    weights: tuple[Any, ...]
    name: str = "lora"


@dataclass(frozen=True)
class Lora:
    """One low-rank change, to be put into the host's form."""

    up: Tensor
    down: Tensor
    alpha: float | None = None
    more: tuple[Any, ...] = (None, None, None)
    name: str = "lora"
    adapter: HostAdapter = field(init=False)

    def __post_init__(self) -> None:
        adapter = HostAdapter((self.up, self.down, self.alpha, *self.more), self.name)
        object.__setattr__(self, "adapter", adapter)

    def patch(
        self,
        strength: float = 1.0,
        model_strength: float = 1.0,
        offset: tuple[int, int, int] | None = None,
        function: Any = None,
    ) -> tuple[Any, ...]:
        """(strength, adapter, strength of the model, offset, function)."""
        return (strength, self.adapter, model_strength, offset, function)


def merged(dense: Tensor, patches: Iterable[Sequence[Any]]) -> Tensor:
    """A weight with LoRA patches on it, one after the other, as the host calculates them."""
    dense = dense.clone()
    for strength, adapter, model_strength, offset, function in patches:
        up, down, alpha = adapter.weights[:3]
        part = dense if offset is None else dense.narrow(*offset)
        part *= model_strength
        scale = strength * (1.0 if alpha is None else alpha / down.shape[0])
        change = scale * (up.to(dense).flatten(1) @ down.to(dense).flatten(1)).reshape(part.shape)
        part += change if function is None else function(change)
    return dense


# ---- models ----

TOY_BLOCKS, TOY_LAYERS = 3, 18  # six Linear a block


def packed_toy(
    rng: Random, name: str = "Q8_0", state: QuantState | None = None
) -> tuple[tiny.Toy, list[QuantLinear]]:
    """The toy with packed layers of ours, and those."""
    model, state = tiny.toy(TOY_BLOCKS), state or QuantState()
    size = (name, tiny.WIDTH, tiny.WIDTH)
    return model, swap_linears(model, lambda old: rng.layer(*size, state=state)[0])


def stored_toy(rng: Random, name: str = "Q8_0") -> tuple[tiny.Toy, list[StoredLinear]]:
    """The toy with another pack's packed layers, and those."""
    model, size = tiny.toy(TOY_BLOCKS), (name, tiny.WIDTH, tiny.WIDTH)
    return model, swap_linears(model, lambda old: rng.stored_layer(*size)[0])


MODELS = {  # of one kind of block each
    "z_image": (lambda: tiny.z_image(refiners=0), tiny.z_image_inputs),
    "qwen_image": (tiny.qwen_image, tiny.qwen_image_inputs),
}


def quantised(name: str, rng: Random, another_packs: bool = False) -> nn.Module:
    """A real tiny transformer with its blocks' Linear weights packed, in two types."""
    model, state = MODELS[name][0](), QuantState()

    def pack(old: nn.Linear) -> nn.Module | None:
        if old.in_features % 32:
            return None
        qtype = "Q4_0" if old.out_features > old.in_features else "Q8_0"
        size = (qtype, old.out_features, old.in_features, old.bias is not None)
        new, _ = rng.stored_layer(*size) if another_packs else rng.layer(*size, state)
        return new

    detected = detect_family(model)
    assert detected is not None
    for block in detected[0].repeated_blocks(model):
        assert swap_linears(block.module, pack)
    return model.requires_grad_(False)
