"""What a comparison says of two runs' reports."""

import json

import pytest
import torch
from speed_tier.speed.comparison import Comparison
from speed_tier.speed.metrics import difference
from speed_tier.speed.report import FeatureOutcome, Report, State, Timing

OFF = torch.linspace(-1, 1, 64)


def report(tier, first_s, steady_s, steps=4, load_s=0.5, engaged=("tf32",), extra_s=0.0, **more):
    steps_s = [first_s, *[steady_s] * (steps - 1)]
    timing = Timing(
        load_s=load_s,
        first_step_s=first_s,
        first_step_tax_s=first_s - steady_s if steps > 1 else None,
        steps_s=steps_s,
        steady_step_s=steady_s if steps > 1 else None,
        total_s=load_s + sum(steps_s) + extra_s,
    )
    features = [FeatureOutcome(name, State.ENGAGED) for name in engaged]
    return Report(tier, tier, "as asked", timing=timing, steps=steps, features=features, **more)


def comparison(runs, off=None, other=None, **more):
    off = off or report("off", 0.3, 0.2, engaged=())
    other = OFF + 0.001 if other is None else other
    found = difference(OFF, other)
    same = [difference(other, other)] * (len(runs) - 1)
    return Comparison("max", "4 steps", off, runs, found, same, **more)


def test_speed_is_the_last_runs_and_the_tax_is_the_first_ones():
    runs = [report("max", 6.0, 0.15), report("max", 0.1, 0.1, load_s=0.0)]
    found = comparison(runs)
    assert found.speedup == pytest.approx(2.0)
    assert found.first_run_tax_s == pytest.approx(6.45 - 0.4)  # without the loading of either
    assert found.payback_images == 16  # 6.05 s at 0.1 s a step and 4 steps an image
    lines = found.to_text().splitlines()
    assert lines[0] == "max against off: 4 steps"
    assert lines[1].startswith("latents: PSNR 66.0 dB (peak 2, the range of off), relative error")
    assert lines[2] == "speed: 2.00x off's, 0.2000 -> 0.1000 s/it, steady"
    assert lines[3] == "off: 0.90 s and 0.50 s of loading, first step 0.30 s, steady 0.2000 s/it"
    assert lines[4].startswith("max, run 1: 6.45 s and 0.50 s of loading, first step 6.00 s")
    assert lines[5].endswith("; latents against run 1: identical, byte for byte")
    assert lines[6] == (
        "first-run tax of max: 6.05 s (run 1 less run 2, loading left out), "
        "paid back by 16 images like this"
    )
    assert lines[7] == "engaged: tf32"
    assert lines[-1].startswith("measured 20")


def test_one_run_has_the_tax_of_its_first_step():
    found = comparison([report("max", 1.1, 0.1)])
    assert found.first_run_tax_s == pytest.approx(1.0)
    assert found.payback_images == 3
    text = found.to_text()
    assert "first-run tax of max: 1.00 s (first step less a steady one), paid back by 3" in text
    assert "max: 1.40 s and" in text
    assert "run 1" not in text


def test_a_slower_tier_is_never_paid_back():
    found = comparison([report("max", 2.0, 0.4)])
    assert found.speedup == pytest.approx(0.5)
    assert found.payback_images is None
    assert "speed: 0.50x off's" in found.to_text()
    assert "paid back" not in found.to_text()


def test_where_nothing_engaged_there_is_no_speed_to_compare():
    found = comparison([report("max", 0.3, 0.1, engaged=())])
    assert (found.speedup, found.payback_images) == (None, None)
    text = found.to_text()
    assert "speed: nothing engaged, so both are the same path; 0.2000 and 0.1000 s/it" in text
    assert "x off's" not in text


def test_no_tax_worth_a_word_has_no_payback():
    runs = [report("max", 0.11, 0.1), report("max", 0.1, 0.1)]
    assert comparison(runs).payback_images is None
    # A later run that happened to be slower is no negative tax.
    assert comparison(runs[::-1]).first_run_tax_s == 0.0


def test_one_step_has_no_steady_time():
    found = comparison([report("max", 1.0, 0.0, steps=1)], off=report("off", 1.0, 0.0, steps=1))
    assert (found.speedup, found.first_run_tax_s, found.payback_images) == (None, None, None)
    text = found.to_text()
    assert "speed: not measured, a steady time needs two steps or more" in text
    assert "first-run tax: not measured" in text
    assert "s/it" not in text


def test_no_step_at_all():
    found = Comparison("max", "4 steps", None, [], difference(OFF, OFF))
    assert found.to_text().splitlines() == [
        "max against off: 4 steps",
        "latents: identical, byte for byte",
        "speed: not measured, no step was sampled (denoise 0)",
        "first-run tax: not measured",
    ]
    assert json.loads(json.dumps(found.to_dict()))["off"] is None


def test_what_was_said_in_the_run_is_said_here():
    run = report("max", 1.0, 0.1, notes=["max loaded a static copy"])
    run.features = [FeatureOutcome("regional_compile", State.FELL_BACK, reason="compile failed")]
    run.model.note = "not a Z-Image"
    run.peak_bytes = 3 << 30
    text = comparison([run]).to_text()
    assert "engaged: nothing; Speed Tier Report says why" in text
    assert "  regional_compile fell back: compile failed" in text
    assert "note: not a Z-Image" in text
    assert "note: max loaded a static copy" in text
    assert "peak 3.00 GiB" in text


def test_images_are_given_in_levels_of_a_file():
    image = torch.rand(1, 4, 4, 3, generator=torch.Generator().manual_seed(0))
    moved = image.clone()
    moved[0, 0, 0, 0] += 2 / 255
    found = comparison(
        [report("max", 1.0, 0.1)], images=difference(image, moved, 1.0), picture="decoded, x10"
    )
    text = found.to_text()
    assert "images: PSNR" in text
    assert "; the largest is 2 of the 255 levels of a file" in text
    assert "picture: decoded, x10" in text
    found.images = difference(image, image, 1.0)
    assert "images: identical, byte for byte\n" in found.to_text()


def test_the_data_holds_no_number_that_json_has_not():
    lost = torch.full((64,), float("nan"))
    found = comparison([report("max", 1.0, 0.1)], other=lost)
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["latents"]["not_finite"] == [0, 64]
    assert data["latents"]["psnr_db"] is None
    assert [run["tier"]["resolved"] for run in data["runs"]] == ["max"]
    assert "no figures: no value is finite in both" in found.to_text()
