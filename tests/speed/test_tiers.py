"""The tier table, and the one function that resolves a tier."""

import pytest
from speed_tier.speed.optimizations import OPTIMIZATIONS
from speed_tier.speed.tiers import (
    ADVANCED_ONLY,
    TIER_FEATURES,
    Switch,
    Tier,
    planned_features,
    resolve_tier,
)

NAMES = [optimization.name for optimization in OPTIMIZATIONS]

# design.md: backend flags, eager patches, GGUF dequant, fused QKV, regional
# compile, graph capture. A row that is not there yet keeps its place.
INSTALL_ORDER = [
    "tf32",
    "cudnn_benchmark",
    "attention_backend",
    "eager_patches",
    "gguf_dequant",
    "dequant_cache",
    "fused_qkv",
    "regional_compile",
    "graph_capture",
]


def test_the_dropdown_has_exactly_three_choices():
    assert [tier.value for tier in Tier] == ["off", "default", "max"]


def test_max_is_a_strict_superset_of_default_and_off_is_empty():
    assert TIER_FEATURES[Tier.OFF] == frozenset()
    assert TIER_FEATURES[Tier.DEFAULT] < TIER_FEATURES[Tier.MAX]
    assert {"tf32", "fused_qkv", "regional_compile"} <= (
        TIER_FEATURES[Tier.MAX] - TIER_FEATURES[Tier.DEFAULT]
    )


def test_nothing_in_default_waits_for_a_compile_or_lossy_numbers():
    assert not {"regional_compile", "tf32", "fused_qkv"} & TIER_FEATURES[Tier.DEFAULT]


def test_every_planned_feature_exists_and_every_feature_is_planned():
    planned = set().union(*TIER_FEATURES.values())
    assert planned | set(ADVANCED_ONLY) == set(NAMES)
    assert not planned & set(ADVANCED_ONLY)
    assert len(NAMES) == len(set(NAMES))


def test_install_order():
    assert [name for name in INSTALL_ORDER if name in NAMES] == NAMES


@pytest.mark.parametrize("is_gguf", [False, True])
@pytest.mark.parametrize("asked", ["off", "default", "max"])
def test_an_explicit_tier_is_always_honoured(asked, is_gguf):
    resolved = resolve_tier(asked, is_gguf)
    assert (resolved.asked, resolved.tier.value, resolved.reason) == (asked, asked, "as asked")


@pytest.mark.parametrize(
    ("is_gguf", "tier", "word"), [(True, "default", "GGUF"), (False, "off", "dense")]
)
def test_an_unset_tier_follows_the_weights(is_gguf, tier, word):
    resolved = resolve_tier(None, is_gguf)
    assert (resolved.asked, resolved.tier.value) == ("", tier)
    assert word in resolved.reason


@pytest.mark.parametrize("asked", ["", "Max", "MAX ", "fast", "off,max", 3])
def test_an_unknown_tier_lists_the_three(asked):
    with pytest.raises(ValueError, match=r"needs one of off, default, max; found") as raised:
        resolve_tier(asked, is_gguf=False)
    assert repr(asked) in str(raised.value)


def test_switches_add_and_take_away():
    assert planned_features(Tier.MAX) == TIER_FEATURES[Tier.MAX]
    assert planned_features(Tier.MAX, {"tf32": Switch.OFF}) == TIER_FEATURES[Tier.MAX] - {"tf32"}
    assert planned_features(Tier.OFF, {"tf32": Switch.ON}) == {"tf32"}
    every = dict.fromkeys(NAMES, Switch.AUTO)
    assert planned_features(Tier.DEFAULT, every) == TIER_FEATURES[Tier.DEFAULT]
    assert planned_features(Tier.OFF, {"tf32": Switch.OFF}) == frozenset()
