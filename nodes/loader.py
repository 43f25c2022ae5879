"""Load Diffusion Model (Speed Tier): safetensors and GGUF in one node, with the tier dropdown."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Final

from .speed_tier import TIERS, apply_tier

# The host's list of `diffusion_models` leaves .gguf out, and only some GGUF packs add a list of
# their own; ours watches the same folders.
_GGUF_KEY: Final = "speed_tier_gguf"
_KEYS: Final = ("diffusion_models", "unet_gguf", _GGUF_KEY)
_WEIGHT_DTYPES: Final = ("default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2")


class SpeedTierLoader:
    """One node in place of two packs. A Speed Tier node after it replaces its tier."""

    CATEGORY = "speed tier"
    DESCRIPTION = "Load Z-Image or Qwen-Image from safetensors or GGUF, in a speed tier."
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    SEARCH_ALIASES: ClassVar = ["gguf", "unet", "load diffusion model"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        from .speed_tier import SpeedTier

        dtype_tooltip = "For safetensors, as in Load Diffusion Model. GGUF keeps its own types."
        return {
            "required": {
                "model_name": (
                    list_models(),
                    {"tooltip": "From models/diffusion_models and models/unet, GGUF included."},
                ),
                "tier": SpeedTier.INPUT_TYPES()["required"]["tier"],
                "weight_dtype": (
                    list(_WEIGHT_DTYPES),
                    {"default": "default", "tooltip": dtype_tooltip, "advanced": True},
                ),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def load(
        self,
        model_name: str,
        tier: str,
        weight_dtype: str = "default",
        unique_id: str | None = None,
    ) -> tuple[Any]:
        from ..speed.hosts import comfy_loader

        if tier not in TIERS:  # before minutes of loading
            raise ValueError(f"Speed Tier needs one of {', '.join(TIERS)}; found {tier!r}.")
        model = comfy_loader.load_model(_path(model_name), weight_dtype)
        is_gguf = model_name.lower().endswith(".gguf")
        return (apply_tier(model, tier, {}, unique_id, is_gguf),)


def list_models() -> list[str]:
    """Names of every diffusion model file, GGUF among them, sorted as the host sorts."""
    import folder_paths

    folders = folder_paths.folder_names_and_paths
    # The host's own list object: folders that are added to it later count as well.
    folders.setdefault(_GGUF_KEY, (folders["diffusion_models"][0], {".gguf"}))
    names: set[str] = set()
    for key in _KEYS:
        if key in folders:
            names.update(folder_paths.get_filename_list(key))
    return sorted(names, key=str.lower)


def _path(model_name: str) -> str:
    import folder_paths

    for key in _KEYS:
        if key in folder_paths.folder_names_and_paths:
            path = folder_paths.get_full_path(key, model_name)
            if path is not None and os.path.isfile(path):
                return str(path)
    raise FileNotFoundError(
        f"Load Diffusion Model (Speed Tier) needs a file of models/diffusion_models; "
        f"{model_name!r} is not there any more. Refresh the page and choose another."
    )
