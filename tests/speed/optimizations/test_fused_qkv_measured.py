"""q, k and v over one weight only where that measures faster, and what is known of it."""

import pytest
import torch
from speed_tier.speed import probe
from speed_tier.speed.optimizations import fused_qkv
from speed_tier.speed.optimizations.base import HostFacts
from speed_tier.speed.optimizations.fused_qkv import FusedQkv
from speed_tier.speed.probe import Figures
from speed_tier.tests.speed import tiny

FUSED = FusedQkv()


def measured(monkeypatch, apart, together):
    figures = Figures(apart, together, spent_s=0.25)
    monkeypatch.setattr(fused_qkv, "_measured", lambda *_: figures)


def test_it_engages_only_where_it_measures_faster(monkeypatch):
    model = tiny.toy()
    measured(monkeypatch, 1.0, 0.99)
    figures = "image stream 1.000 ms apart, 0.990 ms fused; measured now in 0.25 s"
    assert FUSED.check(tiny.context(model)) == f"does not measure faster here ({figures})"
    measured(monkeypatch, 1.5, 1.0)
    assert "0.990 ms fused" in FUSED.check(tiny.context(model)), "decided once for a model"
    model = tiny.toy()
    assert FUSED.check(tiny.context(model)) is None
    measured(monkeypatch, 1.0, 1.0)
    assert FUSED.check(tiny.context(model, image_tokens=9999)) is None
    handle = FUSED.install(tiny.context(model))
    assert handle.note == (
        "3 of 3 groups, no extra bytes "
        "(image stream 1.500 ms apart, 1.000 ms fused; measured earlier on this card)"
    )
    handle.remove()


def test_only_the_stream_that_wins_is_fused(monkeypatch):
    from speed_tier.speed.families.qwen_image import QWEN_IMAGE

    by_tokens = {1024: Figures(2.0, 1.0), 256: Figures(1.0, 1.0)}
    monkeypatch.setattr(fused_qkv, "_measured", lambda *a: by_tokens[a[-1]])
    context = tiny.context(tiny.qwen_image(), family=QWEN_IMAGE, image_tokens=1024, text_tokens=20)
    assert FUSED.check(context) is None
    handle = FUSED.install(context)
    assert handle.note.startswith("2 of 4 groups, no extra bytes (image stream 2.000 ms apart")
    assert "text stream 1.000 ms apart" in handle.note
    handle.remove()
    FUSED.release(context.denoiser)


def test_the_measurement_runs_for_real_and_is_kept(tmp_path):
    context = tiny.context(tiny.toy(), host=HostFacts(state_folder=tmp_path))
    probe.forget()
    first = fused_qkv._measured(context, torch.float32, (8, 8, 8), 8, 16)
    assert min(first.plain_ms, first.other_ms, first.spent_s) > 0
    probe.forget()  # as another process
    again = fused_qkv._measured(context, torch.float32, (8, 8, 8), 8, 16)
    assert (again.plain_ms, again.other_ms, again.spent_s) == (
        pytest.approx(first.plain_ms, abs=1e-4),
        pytest.approx(first.other_ms, abs=1e-4),
        0.0,
    )
    other = fused_qkv._measured(context, torch.float32, (8, 8, 8), 8, 32)
    assert other.spent_s > 0
    probe.forget()


def test_figures_in_tf32_are_other_figures(tmp_path):
    host = HostFacts(state_folder=tmp_path)
    probe.forget()
    for engaged in ((), ("tf32",)):
        context = tiny.context(tiny.toy(), host=host, engaged=engaged)
        assert fused_qkv._measured(context, torch.float32, (8, 8, 8), 8, 16).spent_s > 0
    probe.forget()
