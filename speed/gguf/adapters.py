"""LoRA and its relatives on weights that stay packed.

A low-rank term is added to the layer's product, so the weight itself is never touched: changing a
strength or taking a LoRA away needs no reload and leaves nothing behind. Everything else (LoKr,
LoHa, DoRA, full differences) rewrites the dequantised weight at every call, through the host's own
calculation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("speed_tier.gguf")


@dataclass(frozen=True)
class LowRankTerm:
    """`scale * up @ down`, added to rows `start : start + len(up)` of a weight.

    Attributes:
        up: `(term_rows, rank)`.
        down: `(rank, cols)`.
        scale: strength times alpha over rank.
        start: first row of the weight that it changes.
    """

    up: Tensor
    down: Tensor
    scale: float
    start: int = 0

    @property
    def rows(self) -> tuple[int, int]:
        return self.start, self.start + self.up.shape[0]


@dataclass(frozen=True)
class _Slice:
    """Terms on the same rows, side by side: `up` is `(term_rows, ranks)`."""

    rows: tuple[int, int]
    ranks: tuple[int, int]
    up: Tensor


class Adapters:
    """What is put on one packed weight.

    Attributes:
        terms: low-rank terms; empty where `rewrite` does it all.
        rewrite: the dequantised `(rows, cols) float32` weight, which it may change, to the weight
            with every patch on it. `None` where `terms` does it all.
    """

    def __init__(
        self,
        terms: Sequence[LowRankTerm] = (),
        rewrite: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if terms and rewrite is not None:
            raise ValueError("Adapters takes low-rank terms or a rewrite; found both.")
        self.terms = tuple(terms)
        self.rewrite = rewrite
        self._factors: tuple[tuple[torch.device, torch.dtype], Tensor, list[_Slice]] | None = None

    @property
    def n_bytes(self) -> int:
        """Device memory of the factors in a 2-byte dtype."""
        return sum(2 * (term.up.numel() + term.down.numel()) for term in self.terms)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add every term's product to `out`, in place.

        Args:
            out: `(..., rows)`, contiguous.
            x: `(..., cols)`, dtype and device of `out`.
        """
        if not self.terms:
            return
        down, slices = self._placed(out.device, out.dtype)
        hidden = x.reshape(-1, x.shape[-1]) @ down.t()
        flat = out.view(-1, out.shape[-1])
        for part in slices:
            flat[:, slice(*part.rows)].addmm_(hidden[:, slice(*part.ranks)], part.up.t())

    def merge_into(self, dense: Tensor) -> Tensor:
        """A dequantised weight, `(rows, cols) float32`, with everything on it. May change it."""
        if self.rewrite is not None:
            return self.rewrite(dense)
        for term in self.terms:
            up, down = (t.to(dense.device, torch.float32) for t in (term.up, term.down))
            dense[slice(*term.rows)].addmm_(up, down, alpha=term.scale)
        return dense

    def _placed(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, list[_Slice]]:
        """The factors where and as they are needed; built once."""
        key = (device, dtype)
        if self._factors is None or self._factors[0] != key:
            self._factors = (key, *_join(self.terms, device, dtype))
        return self._factors[1], self._factors[2]


def _join(
    terms: Iterable[LowRankTerm], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, list[_Slice]]:
    """One `down` for all terms, and an `up` for each range of rows."""
    by_rows: dict[tuple[int, int], list[LowRankTerm]] = {}
    for term in terms:
        by_rows.setdefault(term.rows, []).append(term)
    downs: list[Tensor] = []
    slices: list[_Slice] = []
    first = 0
    for rows, alike in by_rows.items():
        # Scaled in fp32, rounded once.
        ups = [term.up.to(device, torch.float32) * term.scale for term in alike]
        up = torch.cat(ups, dim=1).to(dtype)
        downs += [term.down.to(device, dtype) for term in alike]
        slices.append(_Slice(rows, (first, first + up.shape[1]), up))
        first += up.shape[1]
    return torch.cat(downs), slices


def low_rank_terms(
    patches: Iterable[Sequence[Any]], shape: tuple[int, int]
) -> list[LowRankTerm] | None:
    """The host's patches on one weight as low-rank terms.

    Args:
        patches: the host's tuples (strength, adapter, strength of the model, offset, function).
        shape: `(rows, cols)` of the weight.

    Returns:
        The terms, or `None` where one patch is more than an addition of low rank: then the host
        has to calculate them all, in their order. A LoRA of a model of another width gives no
        term: the host drops it too, but would try it anew, and complain, at every call.
    """
    terms: list[LowRankTerm] = []
    misfits = []
    for strength, adapter, model_strength, offset, function in patches:
        found = _term(float(strength), adapter, offset, shape)
        if found is None or function is not None or model_strength != 1.0:
            return None
        if isinstance(found, LowRankTerm):
            terms.append(found)
        else:
            misfits.append(found)
    for misfit in misfits:
        log.warning("%s; left out. Use a LoRA made for this model.", misfit)
    return terms


def _term(
    strength: float, adapter: Any, offset: Any, shape: tuple[int, int]
) -> LowRankTerm | str | None:
    """The term, what does not fit, or `None` for what the host has to calculate."""
    # The host's plain LoRA: (up, down, alpha, mid, dora_scale, reshape); told by its name, since
    # nothing here imports the host.
    if getattr(adapter, "name", None) != "lora":
        return None
    weights: Sequence[Any] = getattr(adapter, "weights", ())
    if len(weights) < 5 or any(extra is not None for extra in weights[3:]):
        return None
    up, down, alpha = weights[0], weights[1], weights[2]
    if up.dim() < 2 or down.dim() < 2:
        return None  # the host says what does not fit
    up, down = up.flatten(1), down.flatten(1)
    rank = down.shape[0]
    start, rows = 0, shape[0]
    if offset is not None:
        dimension, start, rows = offset
        if dimension != 0:
            return None
    if start + rows > shape[0]:
        return None
    cols = down.shape[1]
    if up.shape[1] != rank or up.shape[0] * cols != rows * shape[1]:
        return (
            f"a LoRA of {tuple(up.shape)} x {tuple(down.shape)} does not fit a weight of "
            f"{rows} x {shape[1]}"
        )
    if cols != shape[1]:
        return None  # the host reshapes the product
    scale = strength * (float(alpha) / rank if alpha is not None else 1.0)
    return LowRankTerm(up, down, scale, int(start))
