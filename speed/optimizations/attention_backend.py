"""The fastest scaled-dot-product attention backend of this card, by measurement.

Changes: which fused kernel computes attention without a mask (cudnn, flash or memory-efficient).
Faster because: on one H200 at 4.2k tokens cudnn takes 0.47 ms, flash 0.98, efficient 1.6.
Fidelity: rounding (the kernels sum in different orders).
Process-wide: nothing; the backend is chosen inside each attention call.
Declines: without an NVIDIA card, where another attention is in use, where the host's is fastest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..timing import median_ms
from .base import Context, Fidelity, Handle

_CANDIDATES: Final = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_MIN_GAIN: Final = 1.03  # below this the two are the same within the noise of a short measurement
_BUCKET: Final = 512  # tokens; the ranking of the backends does not turn on less


@functools.lru_cache(maxsize=8)
def _ordered(first: str) -> tuple[SDPBackend, ...]:
    rest = [backend for name, backend in _CANDIDATES.items() if name != first]
    return (_CANDIDATES[first], *rest, SDPBackend.MATH)


@functools.lru_cache(maxsize=8)
def make_override(first: str) -> Callable[..., torch.Tensor]:
    """An attention override for the host's transformer_options that tries `first` first.

    One function object per backend for the whole process: compiled blocks guard on its identity.
    """
    order = list(_ordered(first))

    def speed_tier_attention(
        func: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        plain = (
            mask is None
            and not args
            and kwargs.get("skip_reshape", False)
            and not kwargs.get("enable_gqa", False)
            and kwargs.get("scale") is None
            and func.__name__ == "attention_pytorch"
        )
        if not plain:
            return func(q, k, v, heads, mask, *args, **kwargs)
        with sdpa_kernel(order, set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v)
        if kwargs.get("skip_output_reshape", False):
            return out
        return out.transpose(1, 2).reshape(out.shape[0], -1, heads * out.shape[-1])

    return speed_tier_attention


@functools.lru_cache(maxsize=64)
def _measure(
    device: torch.device, dtype: torch.dtype, batch: int, heads: int, tokens: int, head_dim: int
) -> dict[str, float]:
    """Median milliseconds by backend; a backend that refuses these inputs is left out."""
    q, k, v = _random_qkv(device, dtype, batch, heads, tokens, head_dim)
    times = {}
    for name, backend in _CANDIDATES.items():
        try:
            with sdpa_kernel([backend]):
                times[name] = median_ms(lambda: F.scaled_dot_product_attention(q, k, v), device)
        except RuntimeError:  # torch: "No available kernel"
            continue
    return times


def _random_qkv(
    device: torch.device, dtype: torch.dtype, batch: int, heads: int, tokens: int, head_dim: int
) -> tuple[torch.Tensor, ...]:
    # The memory layout the blocks produce: heads inside tokens.
    return tuple(
        torch.randn(batch, tokens, heads, head_dim, device=device, dtype=dtype).movedim(1, 2)
        for _ in range(3)
    )


@dataclass
class _DiffusersHandle(Handle):
    """diffusers calls SDPA directly, so the order is set around the whole denoiser call."""

    order: list[SDPBackend] = field(default_factory=list)

    def scope(self) -> contextlib.AbstractContextManager[object]:
        return sdpa_kernel(self.order, set_priority=True)


@dataclass(frozen=True)
class AttentionBackend:
    name: ClassVar[str] = "attention_backend"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING

    def check(self, context: Context) -> str | None:
        if context.host.attention_in_use:
            return context.host.attention_in_use
        if context.host.compiled_by:
            return f"{context.host.compiled_by} compiles this model; its attention stays"
        if not context.capabilities.is_nvidia:
            found = context.capabilities
            return f"fused attention backends need an NVIDIA card; found {found.device_type}"
        if context.dtype not in (torch.bfloat16, torch.float16):
            return f"fused attention backends need bf16 or fp16; found {context.dtype}"
        times, host_ms = self._times(context)
        if not times:
            return "no fused attention backend takes this shape on this card"
        if context.forced:
            return None
        best = min(times, key=lambda name: times[name])
        if host_ms < times[best] * _MIN_GAIN:
            return f"the host's own choice is the fastest here ({_figures(times, host_ms)})"
        return None

    def install(self, context: Context) -> Handle:
        times, host_ms = self._times(context)
        best = min(times, key=lambda name: times[name])
        note = f"{best} ({_figures(times, host_ms)})"
        if context.stack == "diffusers":
            return _DiffusersHandle(note=note, order=list(_ordered(best)))
        return Handle(options={"optimized_attention_override": make_override(best)}, note=note)

    def release(self, denoiser: nn.Module) -> None:
        """Nothing is kept between runs."""

    def _times(self, context: Context) -> tuple[dict[str, float], float]:
        shape = context.family.attention(context.denoiser)
        tokens = context.image_tokens + context.text_tokens
        tokens = max(_BUCKET, round(tokens / _BUCKET) * _BUCKET)
        args = (context.device, context.dtype, context.batch, shape.heads, tokens, shape.head_dim)
        return _measure(*args), _measure_host(context.host.attention, *args)


@functools.lru_cache(maxsize=64)
def _measure_host(
    attention: Callable[..., torch.Tensor] | None,
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    heads: int,
    tokens: int,
    head_dim: int,
) -> float:
    q, k, v = _random_qkv(device, dtype, batch, heads, tokens, head_dim)
    run = attention or F.scaled_dot_product_attention
    return median_ms(lambda: run(q, k, v), device)


def _figures(times: dict[str, float], host_ms: float) -> str:
    parts = [f"{name} {ms:.2f} ms" for name, ms in sorted(times.items(), key=lambda item: item[1])]
    return ", ".join([*parts, f"host {host_ms:.2f} ms"])
