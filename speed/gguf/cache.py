"""Packed layers that also keep their dequantised weight, where memory is to spare.

A cached layer costs what a dense one costs. The cache is bounded, planned anew at the start of
every run, and dropped when the host wants memory or unloads the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from ..kernels import dequantize
from .linear import QuantLinear

_NUMBER = re.compile(r"\.\d+\.")


def plan_cache(
    layers: Mapping[str, QuantLinear], dtype: torch.dtype, budget_bytes: int
) -> list[QuantLinear]:
    """Layers whose dense weights fit the budget, the largest first.

    The same layer of every block comes before the next one of any block: compiled code knows a
    block with and without a cached weight, and this keeps the number of mixtures at two a kind.

    Args:
        layers: by name; those of a model's blocks differ in one number.
        dtype: of the dense weights.
    """

    def rank(name: str) -> tuple[int, str]:
        layer = layers[name]
        return -layer.in_features * layer.out_features, _NUMBER.sub(".*.", name)

    chosen, left = [], budget_bytes
    for name in sorted(layers, key=rank):  # stable: within a rank, block order
        needed = dense_bytes(layers[name], dtype)
        if needed > left:
            break
        left -= needed
        chosen.append(layers[name])
    return chosen


def fill_cache(
    layers: Iterable[QuantLinear], chosen: Iterable[QuantLinear], dtype: torch.dtype
) -> int:
    """Keep the dense weights of `chosen` and of no other layer; returns their bytes."""
    wanted = set(map(id, chosen))
    total = 0
    for layer in layers:
        if id(layer) not in wanted or layer.weight is None:
            layer.dense = None
            continue
        if layer.dense is None or layer.dense.dtype != dtype or _moved(layer):
            layer.dense = None  # first: the new one may need its place
            assert layer.qtype is not None
            layer.dense = dequantize(
                layer.weight, layer.qtype, layer.out_features, layer.in_features, dtype
            )
        total += dense_bytes(layer, dtype)
    return total


def drop_cache(layers: Iterable[QuantLinear]) -> int:
    """Forget every dense weight; returns the bytes given back."""
    freed = cached_bytes(layers := list(layers))
    for layer in layers:
        layer.dense = None
    return freed


def cached_bytes(layers: Iterable[QuantLinear]) -> int:
    return sum(layer.dense.nbytes for layer in layers if layer.dense is not None)


def dense_bytes(layer: QuantLinear, dtype: torch.dtype) -> int:
    return layer.in_features * layer.out_features * dtype.itemsize


def _moved(layer: QuantLinear) -> bool:
    assert layer.dense is not None and layer.weight is not None
    return layer.dense.device != layer.weight.device
