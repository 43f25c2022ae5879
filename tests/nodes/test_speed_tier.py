"""The two tier nodes: their inputs, and what they hand to the engine."""

import pytest
from speed_tier import nodes
from speed_tier.nodes import speed_tier
from speed_tier.nodes.speed_tier import FEATURE_TOOLTIPS, SpeedTier, SpeedTierAdvanced
from speed_tier.speed import Switch, Tier
from speed_tier.speed.optimizations import OPTIMIZATIONS
from speed_tier.speed.warm_up import Size
from speed_tier.tests.nodes.conftest import graph


@pytest.fixture
def cloned(monkeypatch, host):
    asked = []

    def tier_clone(model, request, opener):
        asked.append((model, request, opener))
        return "a clone"

    monkeypatch.setattr(speed_tier.comfy, "tier_clone", tier_clone)
    return asked


def test_ids_and_names_stay():
    assert list(nodes.NODE_CLASS_MAPPINGS) == [
        "SpeedTier",
        "SpeedTierAdvanced",
        "SpeedTierLoader",
        "SpeedTierReport",
        "SpeedTierCompare",
        "SpeedTierVAE",
    ]
    assert set(nodes.NODE_DISPLAY_NAME_MAPPINGS) == set(nodes.NODE_CLASS_MAPPINGS)
    assert list(SpeedTier.INPUT_TYPES()["required"]) == ["model", "tier"]


@pytest.mark.parametrize("node", [SpeedTier, SpeedTierAdvanced])
def test_the_dropdown_has_exactly_the_three(node):
    choices, options = node.INPUT_TYPES()["required"]["tier"]
    assert choices == ["off", "default", "max"]
    assert options["default"] == "default"
    for tier in Tier:
        assert f"{tier.value}:" in options["tooltip"]


def test_advanced_has_a_switch_for_every_feature_after_the_tier():
    required = SpeedTierAdvanced.INPUT_TYPES()["required"]
    names = [row.name for row in OPTIMIZATIONS]
    assert list(required)[:2] == ["model", "tier"]
    assert set(list(required)[2:]) == set(names) == set(FEATURE_TOOLTIPS)
    for name in names:
        choices, options = required[name]
        assert choices == ["auto", "on", "off"]
        assert options["default"] == "auto"
        assert len(options["tooltip"]) > 20


@pytest.mark.parametrize("tier", ["off", "default", "max"])
def test_the_node_asks_for_its_tier(cloned, tier):
    assert SpeedTier().apply("a model", tier, "9") == ("a clone",)
    ((model, request, _),) = cloned
    assert model == "a model"
    assert (request.resolved.tier.value, request.resolved.reason) == (tier, "as asked")
    assert request.switches == {}


def test_advanced_hands_its_switches_on(cloned):
    SpeedTierAdvanced().apply("a model", "off", "9", tf32="on", fused_qkv="off")
    request = cloned[0][1]
    assert request.switches == {"tf32": Switch.ON, "fused_qkv": Switch.OFF}
    assert not request.is_off
    SpeedTierAdvanced().apply("a model", "off", "9", tf32="auto")
    assert cloned[1][1].is_off


def test_advanced_hands_the_cache_its_budget(cloned):
    budget, options = SpeedTierAdvanced.INPUT_TYPES()["optional"]["dequant_cache_gib"]
    assert (budget, options["min"]) == ("FLOAT", 0.0)
    SpeedTierAdvanced().apply("a model", "default", "9", dequant_cache="on", dequant_cache_gib=1.5)
    SpeedTierAdvanced().apply("a model", "default", "9")
    budgets = []
    for _, request, _ in cloned:
        table = {row.name: row for row in request.optimizations}
        assert list(table) == [row.name for row in OPTIMIZATIONS]
        budgets.append(table["dequant_cache"].config.budget_gib)
    assert budgets == [1.5, options["default"]]
    assert cloned[0][1].switches == {"dequant_cache": Switch.ON}


def test_an_unknown_tier_lists_the_three(cloned):
    with pytest.raises(ValueError, match="off, default, max; found 'turbo'"):
        SpeedTier().apply("a model", "turbo")
    assert cloned == []


def test_the_opener_knows_the_node(cloned, host):
    from speed_tier.speed.report import Report

    SpeedTier().apply("a model", "max", "9")
    report = Report("max", "max", "as asked")
    host.execute("p1", "4", graph())
    publish = cloned[0][2](report)
    publish("phase", {})
    assert report.node_id == "9"
    assert len(host.sent) == 1


def test_the_self_check_is_on_and_can_be_switched_off(cloned):
    kind, options = SpeedTierAdvanced.INPUT_TYPES()["optional"]["self_check"]
    assert (kind, options["default"]) == ("BOOLEAN", True)
    SpeedTierAdvanced().apply("a model", "default", "9")
    SpeedTierAdvanced().apply("a model", "default", "9", self_check=False)
    assert [request.self_check for _, request, _ in cloned] == [True, False]


def test_sizes_to_prepare_are_handed_on(cloned):
    kind, options = SpeedTierAdvanced.INPUT_TYPES()["optional"]["warm_up_sizes"]
    assert (kind, options["default"]) == ("STRING", "")
    for given in ({}, {"warm_up_sizes": None}, {"warm_up_sizes": "832x1216, 64x64"}):
        SpeedTierAdvanced().apply("a model", "default", "9", **given)
    assert [request.warm_up for _, request, _ in cloned] == [
        (),
        (),
        (Size(832, 1216), Size(64, 64)),
    ]


@pytest.mark.parametrize("text", ["", None, "64x64"])
def test_sizes_are_looked_at_before_anything_is_loaded(text):
    assert SpeedTierAdvanced.VALIDATE_INPUTS(warm_up_sizes=text) is True


def test_what_is_no_size_is_refused_in_words():
    said = SpeedTierAdvanced.VALIDATE_INPUTS(warm_up_sizes="1000x1024")
    assert "multiples of 16" in said and "'1000x1024'" in said
