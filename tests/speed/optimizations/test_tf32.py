"""TF32: where it engages, what it sets, why it declines."""

import dataclasses

import pytest
import torch
from speed_tier.speed.env import Capabilities, torch_version
from speed_tier.speed.optimizations.base import Fidelity
from speed_tier.speed.optimizations.tf32 import Tf32
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.process import full_state


def card(capability, is_rocm=False):
    return Capabilities("cuda", "a card", is_rocm, capability, torch_version())


def context(**more):
    return tiny.context(tiny.toy(), **more)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
def test_engages_from_compute_capability_8(capability):
    assert Tf32().check(context(capabilities=card(capability))) is None


@pytest.mark.parametrize(
    ("capabilities", "reason"),
    [
        (card((7, 5)), "TF32 needs compute capability 8.0 or newer; found 7.5"),
        (card(None, is_rocm=True), "TF32 needs an NVIDIA card; found cuda (a card)"),
        (
            Capabilities("mps", "arm64", False, None, torch_version()),
            "TF32 needs an NVIDIA card; found mps (arm64)",
        ),
    ],
)
def test_declines_in_words(capabilities, reason):
    assert Tf32().check(context(capabilities=capabilities)) == reason


def test_can_be_forced_anywhere():
    assert Tf32().check(context()) is not None
    assert Tf32().check(context(forced=True)) is None


def test_both_switches_change_for_the_run_and_come_back(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    before = full_state()
    with tiny.engaged(Tf32(), on=tiny.toy(), forced=True):
        during = full_state()
    assert full_state() == before
    for name in ("matmul.allow_tf32", "cudnn.allow_tf32"):
        assert (before[name], during[name]) == (False, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_note_says_what_is_touched(dtype):
    note = Tf32().install(context(dtype=dtype)).note
    assert ("only its fp32 parts change" in note) is (dtype != torch.float32)


def test_it_rounds_and_keeps_nothing():
    assert Tf32.fidelity is Fidelity.ROUNDING
    assert dataclasses.fields(Tf32()) == ()
    assert Tf32().release(tiny.toy()) is None
