"""One sampler setting through ComfyUI's own KSampler, in one tier after another.

The host's sampling function is called, not written again: noise, mask, empty latents, progress,
previews and cancel are its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..apply import TierRequest
from ..report import Report
from .comfy import Opener, tier_clone


@dataclass(frozen=True)
class Setting:
    """What the host's KSampler takes beside a model."""

    seed: int
    steps: int
    cfg: float
    sampler_name: str
    scheduler: str
    positive: Any
    negative: Any
    latent: Mapping[str, Any]
    denoise: float

    def words(self) -> str:
        """What two settings differ in that a person chose."""
        part = "" if self.denoise == 1 else f", denoise {self.denoise:g}"
        return (
            f"{self.steps} steps, {self.sampler_name}, {self.scheduler}, cfg {self.cfg:g}{part}, "
            f"seed {self.seed}"
        )


def sampler_names() -> tuple[list[str], list[str]]:
    """Samplers and schedulers of the host, those of other packs included."""
    import comfy.samplers

    return comfy.samplers.KSampler.SAMPLERS, comfy.samplers.KSampler.SCHEDULERS


def sample_in_tier(
    model: Any, request: TierRequest, setting: Setting, opener: Opener, times: int = 1
) -> tuple[list[dict[str, Any]], list[Report]]:
    """Run a setting in a tier, whatever tier `model` carries.

    Args:
        times: How often, each from the same noise.

    Returns:
        The latents of every run, and the reports of those that sampled a step.

    Raises:
        ValueError: The latent is not one tensor.
    """
    import comfy.model_management

    if getattr(setting.latent["samples"], "is_nested", False):
        raise ValueError(
            "Speed Tier Compare needs a latent of one tensor; found several in one (sound and "
            "picture). Use two samplers, each behind a Speed Tier."
        )
    reports: list[Report] = []

    def open_and_keep(report: Report) -> Any:
        reports.append(report)
        return opener(report)

    clone = tier_clone(model, request, open_and_keep)
    latents = []
    for _ in range(times):
        # A cancel that came after the last step of the run before.
        comfy.model_management.throw_exception_if_processing_interrupted()
        latents.append(_ksampler(clone, setting))
    return latents, reports


def _ksampler(model: Any, setting: Setting) -> dict[str, Any]:
    # By name: the host's module, not the pack's own folder beside this one.
    host_nodes: Any = importlib.import_module("nodes")
    (latent,) = host_nodes.common_ksampler(
        model,
        setting.seed,
        setting.steps,
        setting.cfg,
        setting.sampler_name,
        setting.scheduler,
        setting.positive,
        setting.negative,
        dict(setting.latent),
        denoise=setting.denoise,
    )
    return latent


def decode(vae: Any, latent: Mapping[str, Any]) -> torch.Tensor:
    """Pictures of a latent, (B, H, W, 3), as the host's VAE Decode gives them."""
    import comfy.model_management

    comfy.model_management.throw_exception_if_processing_interrupted()
    images = vae.decode(latent["samples"])
    return images.flatten(0, -4) if images.ndim > 4 else images
