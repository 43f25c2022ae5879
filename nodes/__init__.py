"""The node classes, by the ids that stay forever."""

from __future__ import annotations

from typing import Final

from .report import SpeedTierReport
from .speed_tier import SpeedTier, SpeedTierAdvanced

NODE_CLASS_MAPPINGS: Final = {
    "SpeedTier": SpeedTier,
    "SpeedTierAdvanced": SpeedTierAdvanced,
    "SpeedTierReport": SpeedTierReport,
}
NODE_DISPLAY_NAME_MAPPINGS: Final = {
    "SpeedTier": "Speed Tier",
    "SpeedTierAdvanced": "Speed Tier (Advanced)",
    "SpeedTierReport": "Speed Tier Report",
}
