"""What the verification says of its rows: each kind of loss is a problem, and nothing else is."""

import types

import pytest
import torch
from speed_tier.bench import exact, verify

GOOD = [
    {"runner": "fp32", "finite": True},
    {"runner": "off", "finite": True, "forward_error": 0.01},
    {
        "runner": "max",
        "finite": True,
        "identical": False,
        "within": True,
        "forward_error": 0.0105,
        "off_forward_error": 0.01,
    },
    {"runner": "off after max", "identical": True, "words": "identical, byte for byte"},
]


def rows(index=None, **change):
    base = {"family": "z_image", "format": "bf16", "width": 64}
    changed = [{**base, **row} for row in GOOD]
    if index is not None:
        changed[index] |= change
    return changed


def test_good_rows_are_no_problem():
    assert verify.problems(rows()) == []


@pytest.mark.parametrize(
    ("index", "change", "said"),
    [
        (0, {"failed": "OutOfMemoryError()"}, "fp32: OutOfMemoryError()"),
        (1, {"finite": False}, "off: values that are not finite"),
        (2, {"within": False}, "max: error 0.0105 against fp32, off's own is 0.01"),
        (3, {"identical": False, "words": "PSNR 90"}, "off after max: differs from off before it"),
    ],
)
def test_each_loss_is_said(index, change, said):
    (problem,) = verify.problems(rows(index, **change))
    assert problem.startswith("z_image bf16 64 ")
    assert said in problem


def test_a_part_that_fails_leaves_the_others():
    def fail():
        raise RuntimeError("no room")

    ran = []
    case = types.SimpleNamespace(
        size=64,
        options=types.SimpleNamespace(tiers=["default", "max"]),
        run_exact=fail,
        run_off=lambda: {"finite": True},
        run_tier=lambda tier: fail() if tier == "default" else {"identical": False},
        run_off_again=lambda: {"identical": True},
    )
    verify.verify(case, ran.append, deadline=float("inf"))
    names = ["fp32", "off", "default", "off after default", "max", "off after max"]
    assert [row["runner"] for row in ran] == names
    assert [row["runner"] for row in ran if "failed" in row] == ["fp32", "default"]
    ran.clear()
    verify.verify(case, ran.append, deadline=0.0)
    assert [row["failed"] for row in ran] == ["out of time"] * 6


def test_the_reference_leaves_no_cast_behind():
    class Layer(torch.nn.Linear):
        comfy_cast_weights = False

    layers = torch.nn.Sequential(Layer(2, 2), torch.nn.ReLU(), Layer(2, 2))
    layers[2].comfy_cast_weights = True  # as the host sets it for weights off the card
    model = types.SimpleNamespace(manual_cast_dtype=None, diffusion_model=layers)
    with pytest.raises(KeyError), exact.in_fp32(types.SimpleNamespace(model=model)):
        assert [layers[0].comfy_cast_weights, layers[2].comfy_cast_weights] == [True, True]
        assert model.manual_cast_dtype is torch.float32
        raise KeyError
    assert "comfy_cast_weights" not in vars(layers[0])
    assert vars(layers[2])["comfy_cast_weights"] is True
    assert model.manual_cast_dtype is None
