"""The engine. Imports neither ComfyUI nor diffusers, starts no CUDA, loads no Triton."""

from __future__ import annotations

from .apply import Call, Run, TieredModel, TierRequest, configured
from .compile_cache import clear as clear_compile_cache
from .report import REPORTS, SAMPLING, Report
from .tiers import Switch, Tier, resolve_tier
from .vae_run import TieredVae, vae_request

__all__ = [
    "REPORTS",
    "SAMPLING",
    "Call",
    "Report",
    "Run",
    "Switch",
    "Tier",
    "TierRequest",
    "TieredModel",
    "TieredVae",
    "clear_compile_cache",
    "configured",
    "resolve_tier",
    "vae_request",
]
