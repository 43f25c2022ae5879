"""Tiers and the one table that says what each of them plans, for transformers and for VAEs.

off is the host's own path. default is faster without waiting. max adds what costs one short
compile or touches numbers. What is planned here may still be skipped, with a reason, where a
model, a card or another pack does not allow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Tier(str, Enum):
    """The three choices of the dropdown."""

    OFF = "off"
    DEFAULT = "default"
    MAX = "max"


class Switch(str, Enum):
    """What a person who measures can say of one feature."""

    AUTO = "auto"
    ON = "on"  # engage even where auto would step aside because no gain is expected
    OFF = "off"


_DEFAULT_FEATURES: Final = (
    "attention_backend",
    "cudnn_benchmark",
    "eager_patches",
    "gguf_dequant",
    "graph_capture",
)
# Planned in no tier: only where the Advanced node says "on".
ADVANCED_ONLY: Final = ("dequant_cache",)
_MAX_ONLY_FEATURES: Final = ("tf32", "fused_qkv", "regional_compile")

_VAE_DEFAULT_FEATURES: Final = ("cudnn_benchmark", "channels_last")
_VAE_MAX_ONLY_FEATURES: Final = ("tf32", "vae_compile")

FeatureTable = Mapping[Tier, frozenset[str]]

TIER_FEATURES: Final[FeatureTable] = {
    Tier.OFF: frozenset(),
    Tier.DEFAULT: frozenset(_DEFAULT_FEATURES),
    Tier.MAX: frozenset(_DEFAULT_FEATURES + _MAX_ONLY_FEATURES),
}
VAE_FEATURES: Final[FeatureTable] = {
    Tier.OFF: frozenset(),
    Tier.DEFAULT: frozenset(_VAE_DEFAULT_FEATURES),
    Tier.MAX: frozenset(_VAE_DEFAULT_FEATURES + _VAE_MAX_ONLY_FEATURES),
}


@dataclass(frozen=True)
class ResolvedTier:
    """A tier as asked for and as it will be run.

    Attributes:
        asked: What the caller said, "" where nothing was said.
        tier: What will run.
        reason: Why, in words for the report.
    """

    asked: str
    tier: Tier
    reason: str


def resolve_tier(asked: str | None, is_gguf: bool) -> ResolvedTier:
    """Turn what was asked into the tier that runs.

    Args:
        asked: "off", "default", "max", or None where the caller left the tier unset.
        is_gguf: Whether the model's weights are GGUF-quantised.

    Raises:
        ValueError: `asked` names no tier.
    """
    if asked is None:
        if is_gguf:
            return ResolvedTier("", Tier.DEFAULT, "no tier was asked for and the model is GGUF")
        return ResolvedTier("", Tier.OFF, "no tier was asked for and the model is dense")
    try:
        tier = Tier(asked)
    except ValueError:
        names = ", ".join(tier.value for tier in Tier)
        raise ValueError(f"Speed Tier needs one of {names}; found {asked!r}.") from None
    return ResolvedTier(tier.value, tier, "as asked")


def planned_features(
    tier: Tier,
    switches: dict[str, Switch] | None = None,
    table: FeatureTable = TIER_FEATURES,
) -> frozenset[str]:
    """Names planned for `tier`, after the per-feature switches of the Advanced node."""
    names = set(table[tier])
    for name, switch in (switches or {}).items():
        if switch is Switch.ON:
            names.add(name)
        elif switch is Switch.OFF:
            names.discard(name)
    return frozenset(names)
