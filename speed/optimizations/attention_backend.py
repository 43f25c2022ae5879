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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import probe
from ..errors import is_out_of_memory
from ..probe import Figures
from .base import Context, Fidelity, Handle

_CANDIDATES: Final = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
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
        figures = {name: self._known(context, name) for name in _CANDIDATES}
        known = {name: found for name, found in figures.items() if found is not None}
        return self._why_not(context, known) if len(known) == len(figures) else None

    def install(self, context: Context) -> Handle:
        figures = {name: self._measured(context, name) for name in _CANDIDATES}
        if reason := self._why_not(context, figures):
            return Handle(not_used=reason)
        best = _best(figures)
        note = f"{best} ({_text(figures)})"
        if context.stack == "diffusers":
            return _DiffusersHandle(note=note, order=list(_ordered(best)))
        return Handle(options={"optimized_attention_override": make_override(best)}, note=note)

    def release(self, denoiser: nn.Module) -> None:
        """Nothing is kept between runs."""

    def _why_not(self, context: Context, figures: Mapping[str, Figures]) -> str | None:
        if all(found.problem for found in figures.values()):
            return "no fused attention backend takes this shape on this card"
        if not context.forced and not figures[_best(figures)].wins:
            return f"the host's own choice is the fastest here ({_text(figures)})"
        return None

    def _known(self, context: Context, name: str) -> Figures | None:
        return probe.known(self._key(context, name), context.host.state_folder)

    def _measured(self, context: Context, name: str) -> Figures:
        """The host's attention and one backend, on random inputs of the model's shape."""
        key, folder = self._key(context, name), context.host.state_folder
        if (found := probe.known(key, folder)) is not None:
            return found
        q, k, v = _random_qkv(context.device, context.dtype, *self._shape(context))
        theirs = context.host.attention or F.scaled_dot_product_attention

        def fused() -> torch.Tensor:
            with sdpa_kernel([_CANDIDATES[name]]):
                return F.scaled_dot_product_attention(q, k, v)

        try:
            fused()
        except RuntimeError as error:  # torch: "No available kernel"
            if is_out_of_memory(error):
                raise
            refused = Figures(problem="takes no such shape")
            probe.remember(key, folder, refused)
            return refused
        return probe.choose(key, folder, lambda: theirs(q, k, v), fused, context.device)

    def _shape(self, context: Context) -> tuple[int, int, int, int]:
        """Batch, heads, tokens and width of a head, the joint sequence in buckets."""
        shape = context.family.attention(context.denoiser)
        tokens = context.image_tokens + context.text_tokens
        tokens = max(_BUCKET, round(tokens / _BUCKET) * _BUCKET)
        return context.batch, shape.heads, tokens, shape.head_dim

    def _key(self, context: Context, name: str) -> str:
        theirs = context.host.version if context.host.attention else "torch"
        shape = "x".join(map(str, self._shape(context)))
        return probe.key(context.device, f"attention {name} against {theirs}", context.dtype, shape)


def _best(figures: Mapping[str, Figures]) -> str:
    """The backend that gains most, each against the host's time beside it."""
    takes = {name: found for name, found in figures.items() if not found.problem}
    return max(takes, key=lambda name: takes[name].plain_ms / takes[name].other_ms)


def _text(figures: Mapping[str, Figures]) -> str:
    takes = {name: found for name, found in figures.items() if not found.problem}
    ranked = sorted(takes.items(), key=lambda item: item[1].other_ms)
    parts = [f"{name} {found.other_ms:.2f} ms" for name, found in ranked]
    host_ms = takes[_best(figures)].plain_ms
    spent_s = sum(found.spent_s for found in takes.values())
    return ", ".join([*parts, f"host {host_ms:.2f} ms"]) + f"; {Figures(spent_s=spent_s).source()}"
