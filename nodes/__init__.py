"""The node classes, by the ids that stay forever."""

from __future__ import annotations

from typing import Final

from .compare import SpeedTierCompare
from .loader import SpeedTierLoader
from .report import SpeedTierReport
from .speed_tier import SpeedTier, SpeedTierAdvanced
from .speed_tier_vae import SpeedTierVAE

NODE_CLASS_MAPPINGS: Final = {
    "SpeedTier": SpeedTier,
    "SpeedTierAdvanced": SpeedTierAdvanced,
    "SpeedTierLoader": SpeedTierLoader,
    "SpeedTierReport": SpeedTierReport,
    "SpeedTierCompare": SpeedTierCompare,
    "SpeedTierVAE": SpeedTierVAE,
}
NODE_DISPLAY_NAME_MAPPINGS: Final = {
    "SpeedTier": "Speed Tier",
    "SpeedTierAdvanced": "Speed Tier (Advanced)",
    "SpeedTierLoader": "Load Diffusion Model (Speed Tier)",
    "SpeedTierReport": "Speed Tier Report",
    "SpeedTierCompare": "Speed Tier Compare",
    "SpeedTierVAE": "Speed Tier VAE",
}
