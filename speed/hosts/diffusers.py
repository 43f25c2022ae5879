"""A tier on a bare diffusers transformer.

    handle = apply_tier(pipe.transformer, "max")
    ...
    report = handle.finish_run()
    handle.remove()

The transformer's `forward` is wrapped on the instance; nothing of diffusers is imported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..apply import Call, Run, TieredModel, TierRequest
from ..errors import UnsupportedModelError
from ..families import detect_family, not_ours
from ..gguf.foreign import typed_weights
from ..gguf.linear import QuantLinear
from ..optimizations import OPTIMIZATIONS
from ..optimizations.base import HostFacts, Optimization
from ..patching import Patch, PatchSet, is_replaced
from ..report import Report
from ..tiers import Switch, resolve_tier


def apply_tier(
    transformer: nn.Module,
    tier: str | None = None,
    switches: Mapping[str, Switch] | None = None,
    optimizations: tuple[Optimization, ...] = OPTIMIZATIONS,
    self_check: bool = True,
) -> TierHandle:
    """Engage a tier on a diffusers `ZImageTransformer2DModel` or `QwenImageTransformer2DModel`.

    Args:
        transformer: The module; its weights are where they will compute.
        tier: "off", "default" or "max"; unset, "default" for GGUF weights and "off" for others.
        switches: Per-feature choices, by feature name.
        self_check: Compare the first forward of every size with the untiered one.

    Raises:
        UnsupportedModelError: The module is of another family.
        ValueError: `tier` names no tier.
    """
    if detect_family(transformer) is None:
        raise UnsupportedModelError(f"Speed Tier: {not_ours(transformer)}.")
    ours = any(isinstance(module, QuantLinear) for module in transformer.modules())
    is_gguf = ours or bool(typed_weights(transformer))  # or by diffusers' own loader
    request = TierRequest(resolve_tier(tier, is_gguf), switches or {}, optimizations, self_check)
    return TierHandle(transformer, TieredModel(request))


class TierHandle:
    """A tier in place on one transformer, until `remove`."""

    def __init__(self, transformer: nn.Module, tiered: TieredModel) -> None:
        self._transformer = transformer
        self._tiered = tiered
        self._run: Run | None = None
        self._calls_original = transformer.forward

        @functools.wraps(self._calls_original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(*args, **kwargs)

        self._patches = PatchSet([Patch(transformer, "forward", forward)])
        self._patches.__enter__()
        self._removed = False

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        call = _describe_call(self._transformer, args, kwargs)
        if self._run is None:
            self._run = self._tiered.begin(self._tiered.new_report(), call.device)
            self._run.mark_loaded()
        try:
            return self._run.call(call, lambda options: self._calls_original(*args, **kwargs))
        except BaseException as error:
            run, self._run = self._run, None
            run.close("failed", f"{type(error).__name__}: {error}")
            raise

    def finish_run(self) -> Report | None:
        """End the run that the first forward opened: flags back, report filed."""
        run, self._run = self._run, None
        return run.close("done") if run is not None else None

    def remove(self) -> None:
        """Put the transformer and the process back as they were. Idempotent."""
        if self._removed:
            return
        self._removed = True
        self.finish_run()
        self._patches.__exit__()
        self._tiered.release(self._transformer)


def _describe_call(transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    bound = inspect.signature(type(transformer).forward).bind_partial(transformer, *args, **kwargs)
    given = bound.arguments
    if "hidden_states" in given:  # Qwen-Image: packed tokens (B, N, 64)
        hidden = given["hidden_states"]
        shape = (hidden.shape[0], hidden.shape[2], hidden.shape[1] * 2, 2)
        text = given.get("encoder_hidden_states")
        text_tokens = int(text.shape[1]) if isinstance(text, torch.Tensor) else 0
    else:  # Z-Image: a list of (C, F, H, W) and a list of (L, D)
        images, captions = given["x"], given.get("cap_feats") or []
        # Omni: one list a batch entry, of condition images and then the target.
        hidden = images[0][-1] if isinstance(images[0], list) else images[0]
        shape = (len(images), *hidden.shape)
        lengths = [
            sum(
                int(part.shape[0]) for part in (caption if isinstance(caption, list) else [caption])
            )
            for caption in captions
        ]
        text_tokens = max(lengths, default=0)
    facts = HostFacts(participant=_participant(transformer))
    return Call(transformer, hidden.device, hidden.dtype, tuple(shape), text_tokens, facts)


def _participant(transformer: nn.Module) -> str:
    """Who keeps state in the blocks (diffusers' own caches do) and may not be called twice."""
    detected = detect_family(transformer)
    blocks = detected[0].repeated_blocks(transformer) if detected is not None else []
    for block in blocks:
        if is_replaced(block.module, "forward") or hasattr(block.module, "_diffusers_hook"):
            return f"{block.path} has a forward hook or another forward"
    return ""
