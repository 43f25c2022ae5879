"""Speed Tier VAE: puts a tier between a VAE loader and the nodes that decode or encode."""

from __future__ import annotations

from typing import Any, ClassVar

from ..speed import resolve_tier, vae_request
from . import routes
from .speed_tier import TIERS

_TIER_TOOLTIP = (
    "off: the host's own path, bit for bit. default: a memory format, where it measures faster "
    "on this card. max: compiled norms and TF32 as well; rounds differently."
)


class SpeedTierVAE:
    """One dropdown. Replaces a Speed Tier VAE before it; the VAE that comes in stays as it is."""

    CATEGORY = "speed tier"
    DESCRIPTION = "Decode and encode with Z-Image's or Qwen-Image's VAE in a speed tier."
    RETURN_TYPES = ("VAE",)
    FUNCTION = "apply"
    SEARCH_ALIASES: ClassVar = ["compile vae", "channels last", "vae speed"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "vae": ("VAE", {"tooltip": "From any loader."}),
                "tier": (list(TIERS), {"default": "default", "tooltip": _TIER_TOOLTIP}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def apply(self, vae: Any, tier: str, unique_id: str | None = None) -> tuple[Any]:
        from ..speed.hosts import comfy_vae

        request = vae_request(resolve_tier(tier, is_gguf=False))
        opener = routes.opener_for(str(unique_id or ""), routes.page_server())
        return (comfy_vae.tier_vae(vae, request, opener),)
