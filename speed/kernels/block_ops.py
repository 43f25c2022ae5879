"""The pointwise parts of a transformer block, one kernel each, in place of one a torch operation.

| function | computes |
|---|---|
| `norm_modulate` | norm(x) * weight * (1 + scale) + shift |
| `gated_add` | x + gate * norm(y) * weight |
| `qk_norm_rope` | rotary embedding of RMS-normed q and k, written where attention reads them |
| `swiglu` | silu(a) * b |

Everything is computed in fp32 from the stored values and rounded once. The norms are LayerNorm
without weights (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019); the rotary embedding is
RoFormer's (Su et al. 2021) in real arithmetic, on neighbouring pairs; SwiGLU is Shazeer's (2020).
`block_ops_reference` has the same functions in torch.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are in capitals, as everywhere in Triton
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .raw import RawKernel


@triton.jit
def _normed(x, cols, eps, LAYER: tl.constexpr, column):
    """A row in fp32, normed; `column` masks what is not part of it."""
    if LAYER:
        x = tl.where(column < cols, x - tl.sum(x) / cols, 0.0)
    return x / tl.sqrt(tl.sum(x * x) / cols + eps)


@triton.jit(do_not_specialize=["cols", "tokens", "scale_stride", "shift_stride"])
def _norm_modulate_kernel(
    x_ptr, weight_ptr, scale_ptr, shift_ptr, out_ptr,
    cols, tokens, scale_stride, shift_stride, eps,
    LAYER: tl.constexpr, WEIGHT: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) + tl.program_id(1).to(tl.int64) * tokens
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < cols
    x = tl.load(x_ptr + row * cols + column, mask=mask, other=0.0).to(tl.float32)
    x = _normed(x, cols, eps, LAYER, column)
    if WEIGHT:
        x *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if SCALE:
        at = batch * scale_stride + column
        x *= 1.0 + tl.load(scale_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if SHIFT:
        at = batch * shift_stride + column
        x += tl.load(shift_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * cols + column, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["cols", "tokens", "gate_stride", "y_stride"])
def _gated_add_kernel(
    x_ptr, y_ptr, weight_ptr, gate_ptr, out_ptr,
    cols, tokens, gate_stride, y_stride, eps,
    NORM: tl.constexpr, GATE: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    row = token + batch * tokens
    column = tl.arange(0, BLOCK)
    mask = column < cols
    y = tl.load(y_ptr + batch * y_stride + token * cols + column, mask=mask, other=0.0)
    y = y.to(tl.float32)
    if NORM:
        y = _normed(y, cols, eps, False, column)
        y *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if GATE:
        gate = tl.load(gate_ptr + batch * gate_stride + column, mask=mask, other=0.0)
        gate = gate.to(tl.float32)
        if TANH:
            gate = 2.0 / (1.0 + tl.exp(-2.0 * gate)) - 1.0
        y *= gate
    x = tl.load(x_ptr + row * cols + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * cols + column, (x + y).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotated(x, turn, weight, eps, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Heads `(HEADS, DIM)` normed, weighted and turned by `(1, DIM / 2, 2, 2)` matrices."""
    x = x / tl.sqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
    x = tl.reshape(x * weight[None, :], (HEADS, DIM // 2, 2))
    even, odd = tl.split(x)
    cos, minus_sin, sin, cos_too = turn
    out = tl.join(
        even * cos[None, :] + odd * minus_sin[None, :], even * sin[None, :] + odd * cos_too[None, :]
    )
    return tl.reshape(out, (HEADS, DIM))


@triton.jit(
    do_not_specialize=[
        "heads", "in_batch", "in_token", "tokens_out", "first", "turn_batch", "turn_token",
    ]
)  # fmt: skip
def _qk_norm_rope_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, turn_ptr, q_out_ptr, k_out_ptr, v_out_ptr,
    heads, in_batch, in_token, tokens_out, first, turn_batch, turn_token, eps,
    COPY_V: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, DIM)
    mask = head < heads
    at = batch * in_batch + token * in_token + head * DIM + dim[None, :]
    to = (batch * tokens_out + first + token) * heads * DIM + head * DIM + dim[None, :]
    if COPY_V:
        tl.store(v_out_ptr + to, tl.load(v_ptr + at, mask=mask), mask=mask)
    pair = tl.arange(0, DIM // 2) * 4
    turns = turn_ptr + batch * turn_batch + (first + token) * turn_token + pair
    turn = (
        tl.load(turns).to(tl.float32),
        tl.load(turns + 1).to(tl.float32),
        tl.load(turns + 2).to(tl.float32),
        tl.load(turns + 3).to(tl.float32),
    )
    weight = tl.load(q_weight_ptr + dim).to(tl.float32)
    q = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    q = _rotated(q, turn, weight, eps, HEADS, DIM)
    tl.store(q_out_ptr + to, q.to(q_out_ptr.dtype.element_ty), mask=mask)
    weight = tl.load(k_weight_ptr + dim).to(tl.float32)
    k = tl.load(k_ptr + at, mask=mask, other=0.0).to(tl.float32)
    k = _rotated(k, turn, weight, eps, HEADS, DIM)
    tl.store(k_out_ptr + to, k.to(k_out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _swiglu_kernel(a_ptr, b_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    a = tl.load(a_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=mask, other=0.0).to(tl.float32)
    out = a / (1.0 + tl.exp(-a)) * b
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


_SWIGLU_BLOCK = 2048
NORM_MODULATE = RawKernel(_norm_modulate_kernel, num_warps=4)
GATED_ADD = RawKernel(_gated_add_kernel, num_warps=4)
QK_NORM_ROPE = RawKernel(_qk_norm_rope_kernel, num_warps=4)
SWIGLU = RawKernel(_swiglu_kernel, num_warps=4)


def norm_modulate(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    layer_norm: bool,
) -> Tensor:
    """`norm(x) * weight * (1 + scale) + shift`; what is None is left out.

    Args:
        x: `(batch, tokens, cols)`, contiguous.
        weight: `(cols,)`.
        scale, shift: `(batch, cols)`, columns next to each other.
        layer_norm: take the mean away first.
    """
    batch, tokens, cols = x.shape
    out = torch.empty_like(x)
    absent = x  # a pointer that is not read
    NORM_MODULATE(
        (tokens, batch),
        (
            x,
            absent if weight is None else weight,
            absent if scale is None else scale,
            absent if shift is None else shift,
            out,
        ),
        (cols, tokens, _stride(scale), _stride(shift), eps),
        {
            "LAYER": layer_norm,
            "WEIGHT": weight is not None,
            "SCALE": scale is not None,
            "SHIFT": shift is not None,
            "BLOCK": _power_of_two(cols),
        },
    )
    return out


def gated_add(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    tanh: bool,
) -> Tensor:
    """`x + gate * rms_norm(y) * weight`; without a weight there is no norm.

    Args:
        x: `(batch, tokens, cols)`, contiguous.
        y: the same shape; tokens next to each other, the batch anywhere.
        gate: `(batch, cols)`, or None for 1.
        weight: `(cols,)`, or None for no norm.
        tanh: of the gate.
    """
    batch, tokens, cols = x.shape
    out = torch.empty_like(x)
    GATED_ADD(
        (tokens, batch),
        (x, y, x if weight is None else weight, x if gate is None else gate, out),
        (cols, tokens, _stride(gate), y.stride(0), eps),
        {
            "NORM": weight is not None,
            "GATE": gate is not None,
            "TANH": tanh,
            "BLOCK": _power_of_two(cols),
        },
    )
    return out


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    turns: Tensor,
    out: tuple[Tensor, Tensor, Tensor | None],
    first: int,
    eps: float,
) -> None:
    """RMS-norm the heads of q and k, turn them, write them from token `first` on; copy v.

    Args:
        q, k, v: `(batch, tokens, heads * head_dim)`; read where they are if they have equal
            strides and columns next to each other. v None = not copied.
        q_weight, k_weight: `(head_dim,)`.
        turns: `(batch or 1, all tokens, 1, head_dim / 2, 2, 2)`, the host's rotary table.
        out: each `(batch, all tokens, heads, head_dim)`, contiguous.
        first: token of `out` and `turns` that the first one of q becomes.
    """
    batch, tokens, width = q.shape
    _, tokens_out, heads, dim = out[0].shape
    assert width == heads * dim
    strides = q.stride()
    if strides[2] != 1 or k.stride() != strides or (v is not None and v.stride() != strides):
        q, k = q.contiguous(), k.contiguous()
        v = None if v is None else v.contiguous()
    QK_NORM_ROPE(
        (tokens, batch),
        (
            q,
            k,
            q if v is None else v,
            q_weight,
            k_weight,
            turns,
            out[0],
            out[1],
            out[0] if out[2] is None else out[2],
        ),
        (
            heads,
            q.stride(0),
            q.stride(1),
            tokens_out,
            first,
            turns.stride(0) if turns.shape[0] > 1 else 0,
            turns.stride(1),
            eps,
        ),
        {"COPY_V": v is not None, "HEADS": _power_of_two(heads), "DIM": dim},
    )


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """`silu(a) * b` of two contiguous tensors of one shape."""
    out = torch.empty_like(a)
    count = a.numel()
    SWIGLU(
        ((count + _SWIGLU_BLOCK - 1) // _SWIGLU_BLOCK, 1),
        (a, b, out),
        (count,),
        {"BLOCK": _SWIGLU_BLOCK},
    )
    return out


def _stride(vector: Tensor | None) -> int:
    return 0 if vector is None or vector.shape[0] == 1 else vector.stride(0)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
