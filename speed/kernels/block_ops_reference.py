"""`block_ops` in torch: the oracle of its tests. Computes in the dtype it is given."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_modulate(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    layer_norm: bool,
) -> Tensor:
    """See `block_ops.norm_modulate`."""
    if layer_norm:
        x = x - x.mean(-1, keepdim=True)
    out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight
    if scale is not None:
        out = out * (1 + scale[:, None])
    return out if shift is None else out + shift[:, None]


def gated_add(
    x: Tensor, y: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, tanh: bool
) -> Tensor:
    """See `block_ops.gated_add`."""
    if weight is not None:
        y = norm_modulate(y, weight, None, None, eps, layer_norm=False)
    if gate is not None:
        y = (gate.tanh() if tanh else gate)[:, None] * y
    return x + y


def norm_rope(x: Tensor, weight: Tensor, turns: Tensor, eps: float) -> Tensor:
    """One of q and k: `(batch, tokens, heads, head_dim)`, with the rows of `turns` for them."""
    x = norm_modulate(x, weight, None, None, eps, layer_norm=False)
    pairs = x.unflatten(-1, (-1, 1, 2))
    return (turns[..., 0] * pairs[..., 0] + turns[..., 1] * pairs[..., 1]).flatten(-2)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """See `block_ops.swiglu`."""
    return F.silu(a) * b
