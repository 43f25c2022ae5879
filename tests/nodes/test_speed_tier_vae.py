"""Speed Tier VAE: its inputs, and what it hands to the engine."""

import pytest
from speed_tier.nodes.speed_tier_vae import SpeedTierVAE
from speed_tier.speed.families import VAE_FAMILIES
from speed_tier.speed.hosts import comfy_vae
from speed_tier.speed.optimizations import VAE_OPTIMIZATIONS
from speed_tier.speed.report import Report
from speed_tier.tests.nodes.conftest import graph


@pytest.fixture
def asked(monkeypatch, host):
    asked = []

    def tier_vae(vae, request, opener):
        asked.append((vae, request, opener))
        return "a copy"

    monkeypatch.setattr(comfy_vae, "tier_vae", tier_vae)
    return asked


def test_inputs_and_outputs_stay():
    required = SpeedTierVAE.INPUT_TYPES()["required"]
    assert list(required) == ["vae", "tier"]
    assert required["vae"][0] == "VAE" and SpeedTierVAE.RETURN_TYPES == ("VAE",)
    choices, options = required["tier"]
    assert choices == ["off", "default", "max"] and options["default"] == "default"


@pytest.mark.parametrize("tier", ["off", "default", "max"])
def test_the_node_asks_for_its_tier(asked, tier):
    assert SpeedTierVAE().apply("a vae", tier, "9") == ("a copy",)
    ((vae, request, _),) = asked
    assert (vae, request.resolved.tier.value) == ("a vae", tier)
    assert (request.optimizations, request.families) == (VAE_OPTIMIZATIONS, VAE_FAMILIES)
    assert request.is_off is (tier == "off")


def test_an_unknown_tier_lists_the_three(asked):
    with pytest.raises(ValueError, match="off, default, max; found 'turbo'"):
        SpeedTierVAE().apply("a vae", "turbo")
    assert asked == []


def test_a_run_knows_the_node_and_what_called_it(asked, host):
    SpeedTierVAE().apply("a vae", "max", "9")
    report = Report("max", "max", "as asked", operation="vae decode")
    host.execute("p1", "5", graph())
    asked[0][2](report)("phase", {"phase": "loading"})
    assert (report.node_id, report.sampler_node_id) == ("9", "5")
    assert host.sent[0][1]["operation"] == "vae decode"
