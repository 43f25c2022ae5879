"""The engine. Imports neither ComfyUI nor diffusers, starts no CUDA, loads no Triton."""

from __future__ import annotations

from .apply import Call, Run, TieredModel, TierRequest, configured
from .compile_cache import clear as clear_compile_cache
from .report import REPORTS, Report
from .tiers import Switch, Tier, resolve_tier

__all__ = [
    "REPORTS",
    "Call",
    "Report",
    "Run",
    "Switch",
    "Tier",
    "TierRequest",
    "TieredModel",
    "clear_compile_cache",
    "configured",
    "resolve_tier",
]
