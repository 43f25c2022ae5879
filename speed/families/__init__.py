"""The model families the engine knows. A new family is a file and a row here."""

from __future__ import annotations

from typing import Final

from torch import nn

from .base import Family
from .qwen_image import QWEN_IMAGE
from .z_image import Z_IMAGE

FAMILIES: Final[tuple[Family, ...]] = (Z_IMAGE, QWEN_IMAGE)


def detect_family(denoiser: nn.Module) -> tuple[Family, str] | None:
    """The family and stack of a denoiser by its structure, or None."""
    for family in FAMILIES:
        if stack := family.stack(denoiser):
            return family, stack
    return None


def not_ours(denoiser: object) -> str:
    """The sentence for a model of another family."""
    return f"not a Z-Image or Qwen-Image transformer; found {type(denoiser).__name__}"
