"""Speed Tier Compare: what it asks of the host, and what it hands on."""

import json

import pytest
import torch
from speed_tier.nodes import compare
from speed_tier.nodes.compare import SpeedTierCompare
from speed_tier.speed import Report, Tier

SETTING = {
    "seed": 5,
    "steps": 4,
    "cfg": 1.5,
    "sampler_name": "euler",
    "scheduler": "simple",
    "positive": "a cat",
    "negative": "a dog",
    "latent_image": {"samples": torch.zeros(1, 4, 2, 2), "noise_mask": "a mask"},
    "denoise": 0.5,
}
GAPS = {"off": 0.0, "default": 1e-2, "max": 2e-2}


@pytest.fixture
def asked(monkeypatch, host):
    """What was sampled, in order; every tier is a fixed distance from off, each repeat the same."""
    asked = []

    def sample_in_tier(model, request, setting, opener, times=1):
        tier = request.resolved.tier.value
        asked.append((model, tier, setting, times))
        samples = torch.linspace(0, 1, 16).reshape(1, 4, 2, 2)
        samples[..., 0, 0] += GAPS[tier]
        reports = [Report(tier, tier, "as asked", outcome="done") for _ in range(times)]
        for report in reports:
            opener(report)
            asked.append(report)
        return [{"samples": samples.clone(), "tier": tier} for _ in range(times)], reports

    def decode(vae, latent):
        assert vae == "a vae"
        return torch.full((1, 16, 16, 3), 0.5) + GAPS[latent["tier"]] / 2

    monkeypatch.setattr(compare.comfy_compare, "sample_in_tier", sample_in_tier)
    monkeypatch.setattr(compare.comfy_compare, "decode", decode)
    return asked


def run(tier="max", **more):
    made = SpeedTierCompare().compare("a model", tier, **{**SETTING, **more}, unique_id="7")
    off, tiered, picture, text = made["result"]
    assert made["ui"]["text"] == [text]
    return off, tiered, picture, text, json.loads(made["ui"]["json"][0])


def test_off_comes_first_and_the_tier_with_its_repeats(asked):
    run("max", repeats=2)
    sampled = [entry for entry in asked if isinstance(entry, tuple)]
    assert [(model, tier, times) for model, tier, _, times in sampled] == [
        ("a model", "off", 1),
        ("a model", "max", 3),
    ]
    for _, _, setting, _ in sampled:
        assert (setting.seed, setting.steps, setting.cfg) == (5, 4, 1.5)
        assert (setting.sampler_name, setting.scheduler) == ("euler", "simple")
        assert (setting.positive, setting.negative) == ("a cat", "a dog")
        assert setting.latent is SETTING["latent_image"]
        assert setting.denoise == 0.5
    reports = [entry for entry in asked if isinstance(entry, Report)]
    assert [report.node_id for report in reports] == ["7"] * 4


def test_it_hands_on_both_latents_and_the_figures_of_both(asked):
    off, tiered, _, text, data = run("max")
    assert (off["tier"], tiered["tier"]) == ("off", "max")
    assert data["latents"]["max_error"] == pytest.approx(0.02, rel=1e-5)
    assert data["images"] is None
    assert text.startswith(
        "max against off: 4 steps, euler, simple, cfg 1.5, denoise 0.5, seed 5\nlatents: PSNR "
    )
    assert len(data["repeats"]) == 1
    assert data["repeats"][0]["identical"]


def test_the_picture_of_latents(asked):
    _, _, picture, text, data = run("max", amplify=20.0)
    assert picture.shape == (1, 16, 16, 3)
    # Every channel differs by 0.02 in one of four places; the range of off is 1.
    torch.testing.assert_close(picture[0, :8, :8], torch.full((8, 8, 3), 0.4))
    assert picture[0, 8:].max() == picture[0, :, 8:].max() == 0
    assert data["picture"] == (
        "|max - off| of latents, mean over the channels in units of the range of off, times 20; "
        "brightest 0.40 of 1"
    )
    assert f"picture: {data['picture']}" in text


def test_with_a_vae_the_picture_is_of_the_decoded_ones(asked):
    _, _, picture, text, data = run("default", vae="a vae", amplify=400.0)
    assert picture.shape == (1, 16, 16, 3)
    torch.testing.assert_close(picture, torch.ones(1, 16, 16, 3))
    assert data["images"]["peak"] == 1.0
    assert data["images"]["max_error"] == pytest.approx(0.005, rel=1e-4)
    assert "images: PSNR 46.0 dB (peak 1)" in text
    assert "picture: |default - off| of decoded pictures, times 400; brightest 1.00" in text
    assert "100.0% of it at the limit" in text


def test_off_against_off_is_the_control(asked):
    _, _, picture, text, data = run("off", repeats=0)
    assert data["latents"]["identical"]
    assert "latents: identical, byte for byte" in text
    assert picture.max() == 0
    assert [entry[1] for entry in asked if isinstance(entry, tuple)] == ["off", "off"]


def test_the_inputs_are_ksamplers_and_these(monkeypatch):
    names = (["euler"], ["simple"])
    monkeypatch.setattr(compare.comfy_compare, "sampler_names", lambda: names)
    inputs = SpeedTierCompare.INPUT_TYPES()
    assert list(inputs["required"]) == [
        *("model", "tier", "seed", "steps", "cfg", "sampler_name", "scheduler"),
        *("positive", "negative", "latent_image", "denoise", "repeats", "amplify"),
    ]
    assert list(inputs["optional"]) == ["vae"]
    choices, options = inputs["required"]["tier"]
    assert sorted(choices) == sorted(tier.value for tier in Tier)
    assert options["default"] == "default"
    assert inputs["required"]["seed"][1]["control_after_generate"] is True
    assert inputs["required"]["sampler_name"][0] == ["euler"]
    assert inputs["required"]["scheduler"][0] == ["simple"]
    assert SpeedTierCompare.RETURN_TYPES == ("LATENT", "LATENT", "IMAGE", "STRING")
