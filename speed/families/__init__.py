"""The model families the engine knows, and their VAEs. A new family is a file and a row here."""

from __future__ import annotations

from typing import Final

from torch import nn

from .base import Family
from .qwen_image import QWEN_IMAGE
from .vae import KL_VAE, WAN_VAE
from .z_image import Z_IMAGE

FAMILIES: Final[tuple[Family, ...]] = (Z_IMAGE, QWEN_IMAGE)
VAE_FAMILIES: Final[tuple[Family, ...]] = (KL_VAE, WAN_VAE)


def detect_family(
    denoiser: nn.Module, families: tuple[Family, ...] = FAMILIES
) -> tuple[Family, str] | None:
    """The family and stack of a model by its structure, or None."""
    for family in families:
        if stack := family.stack(denoiser):
            return family, stack
    return None


def not_ours(denoiser: object, families: tuple[Family, ...] = FAMILIES) -> str:
    """The sentence for a model of another family."""
    found = type(denoiser).__name__
    if families is VAE_FAMILIES:
        return f"not the VAE of Z-Image or Qwen-Image; found {found}"
    return f"not a Z-Image or Qwen-Image transformer; found {found}"
