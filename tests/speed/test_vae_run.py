"""One call of a VAE in a tier: figures a call, and the way back to the plain call."""

import pytest
import torch
from speed_tier.speed import REPORTS, Switch, TieredVae, resolve_tier, vae_request
from speed_tier.speed.apply import Call
from speed_tier.speed.flags import FLAGS
from speed_tier.speed.optimizations import VAE_OPTIMIZATIONS
from speed_tier.speed.optimizations.base import HostFacts
from speed_tier.speed.patching import Patch, active_patches
from speed_tier.speed.report import State
from speed_tier.speed.tiers import VAE_FEATURES, Tier
from speed_tier.tests.speed import tiny, tiny_vae
from speed_tier.tests.speed.process import full_state
from speed_tier.tests.speed.runs import Fake


@pytest.fixture(autouse=True)
def book(monkeypatch):
    monkeypatch.setattr(REPORTS, "_runs", type(REPORTS._runs)(maxlen=64))
    return REPORTS


class Session:
    """A run of a tiny VAE, made of optimizations that do what a test tells them."""

    def __init__(self, *rows, tier="max", operation="vae decode", vae=None, switches=None):
        self.vae = tiny_vae.kl() if vae is None else vae
        request = vae_request(
            resolve_tier(tier, is_gguf=False), switches or {}, rows or VAE_OPTIMIZATIONS
        )
        self.tiered = TieredVae(request)
        report = self.tiered.new_report()
        report.operation = operation
        self.run = self.tiered.begin(report, tiny.CPU)

    def call(self, invoke, vae=None, **host):
        facts = HostFacts(**host)
        call = Call(vae or self.vae, tiny.CPU, torch.float32, (1, 4, 8, 12), 0, facts)
        return self.run.call(call, lambda options: invoke())

    def finish(self, outcome="done", error=""):
        return self.run.close(outcome, error)


def replaced(vae, forward, log=None):
    """An optimization that puts `forward` in place of the decoder's, with a flag held."""
    handle = {
        "patches": [Patch(vae.decoder, "forward", forward)],
        "flags": {"cudnn.benchmark": True},
    }
    return Fake("channels_last", [] if log is None else log, handle=handle)


def decode_of(vae, z):
    def decode():
        with torch.no_grad():
            return vae.decode(z)

    return decode


def test_every_row_is_planned_and_max_only_adds():
    names = {row.name for row in VAE_OPTIMIZATIONS}
    assert VAE_FEATURES[Tier.MAX] == names
    assert VAE_FEATURES[Tier.DEFAULT] == names - {"tf32", "vae_compile"}
    assert VAE_FEATURES[Tier.OFF] == frozenset()


def test_a_run_files_its_figures(book):
    session = Session(Fake("channels_last", []), tier="default")
    session.call(lambda: torch.zeros(1))
    session.call(lambda: torch.zeros(1))
    report = session.finish()
    assert book.runs()[0] is report
    assert (report.operation, report.steps, report.evaluations) == ("vae decode", 2, 2)
    assert report.model.family == "kl_vae"
    assert report.engaged() == ["channels_last"]
    assert report.timing.vae_decode_s == pytest.approx(sum(report.timing.steps_s))
    assert report.timing.step_marks == ["", ""]
    text = report.to_text()
    assert text.startswith("Speed Tier VAE, decode: default (asked: default, as asked), done")
    assert "calls of the VAE (s): " in text and "steady step" not in text


def test_another_vae_is_let_through_and_named():
    session = Session()
    assert session.call(lambda: "as it was", vae=tiny.toy()) == "as it was"
    report = session.finish()
    assert {f.name for f in report.features} == VAE_FEATURES[Tier.MAX]
    assert all("not the VAE of" in f.reason for f in report.features)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("cudnn")])
def test_a_call_that_fails_with_features_in_place_is_made_as_off(error):
    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    off = decode_of(vae, z)()

    def fails(x):
        raise error

    before, seen, log, righted = full_state(), [], [], []
    session = Session(replaced(vae, fails, log), tier="default", vae=vae)

    def decode():
        seen.append((active_patches(), torch.backends.cudnn.benchmark))
        return decode_of(vae, z)()

    assert torch.equal(session.call(decode, after_out_of_memory=righted.append), off)
    assert torch.equal(session.call(decode), off)
    assert righted == [vae] * isinstance(error, torch.OutOfMemoryError)
    # Once with the feature, then as off, to the end of the run.
    assert seen == [(1, True), (0, False), (0, False)]
    assert log.count("enter channels_last") == log.count("leave channels_last") == 1
    assert log[-1] == "remove channels_last"
    report = session.finish()
    assert report.feature("channels_last").state is State.FELL_BACK
    assert type(error).__name__ in report.feature("channels_last").reason
    assert any("made again as off makes it" in note for note in report.notes)
    assert [notice.kind for notice in report.notices] == ["fell_back"]
    assert report.evaluations == 2
    assert full_state() == before


def test_what_fails_in_off_too_is_raised():
    vae = tiny_vae.kl()
    session = Session(replaced(vae, lambda x: x), tier="default", vae=vae)

    def fails():
        raise torch.OutOfMemoryError("no room for this either")

    with pytest.raises(torch.OutOfMemoryError):
        session.call(fails)
    # The host tiles now, through the same run.
    assert session.call(lambda: 3) == 3
    assert session.finish().feature("channels_last").state is State.FELL_BACK
    assert FLAGS.held == ()


def test_a_cancel_is_not_taken_for_a_failure():
    cancel = type("InterruptProcessingException", (Exception,), {})
    vae, calls = tiny_vae.kl(), []
    session = Session(replaced(vae, lambda x: x), tier="default", vae=vae)

    def cancelled():
        calls.append(1)
        raise cancel

    with pytest.raises(cancel):
        session.call(cancelled)
    assert calls == [1]
    session.finish("interrupted")
    assert active_patches() == 0 and FLAGS.held == ()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_picture_that_is_not_finite_is_made_as_off(bad, dtype):
    vae, z = tiny_vae.kl().to(dtype), tiny_vae.latent("kl").to(dtype)
    off = decode_of(vae, z)()

    def breaks(x):
        out = type(vae.decoder).forward(vae.decoder, x)
        out[0, 0, 3, 3] = bad
        return out

    session = Session(replaced(vae, breaks), tier="default", vae=vae)
    assert torch.equal(session.call(decode_of(vae, z)), off)
    report = session.finish()
    assert report.feature("channels_last").reason == "the result was not finite"


def test_what_is_not_finite_in_off_is_handed_on():
    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    vae.decoder.conv_out.bias.fill_(float("nan"))
    session = Session(Fake("channels_last", []), tier="default", vae=vae)
    assert session.call(decode_of(vae, z)).isnan().all()
    assert session.finish().outcome == "done"


def test_the_plain_call_is_not_made_twice():
    vae, calls = tiny_vae.kl(), []
    session = Session(Fake("channels_last", [], reason="does not pay"), tier="default", vae=vae)

    def broken():
        calls.append(1)
        return torch.full((1,), float("nan"))

    assert session.call(broken).isnan().all()
    session.finish()
    assert calls == [1]


def test_as_engaged_has_what_is_installed_until_then():
    vae, seen = tiny_vae.kl(), []

    class Looks(Fake):
        def install(self, context):
            with session.run.as_engaged(vae):
                seen.append(("forward" in vars(vae.decoder), context.engaged))
            return super().install(context)

    dropped = Fake("tf32", [], handle={"not_used": "does not pay"})
    rows = (dropped, replaced(vae, lambda x: x), Looks("vae_compile", []))
    session = Session(*rows, vae=vae)
    session.call(lambda: torch.zeros(1))
    session.finish()
    assert seen == [(True, ("channels_last",))]
    assert "forward" not in vars(vae.decoder)


def test_speed_against_off_wants_two_off_calls(book):
    vae = tiny_vae.kl()

    def one(tier, call_s):
        session = Session(Fake("channels_last", []), tier=tier, vae=vae)
        session.call(lambda: torch.zeros(1))
        session.run.clock.steps_s = lambda only_passed=False: [call_s]
        return session.finish()

    one("off", 9.0)
    assert one("default", 1.0).speedup_against_off is None
    one("off", 2.0)
    assert one("default", 1.0).speedup_against_off == pytest.approx(2.0)
    other = Session(Fake("channels_last", []), tier="default", vae=vae, operation="vae encode")
    other.call(lambda: torch.zeros(1))
    assert other.finish().speedup_against_off is None


def test_a_switched_on_feature_is_forced():
    contexts = []
    rows = (Fake("channels_last", [], contexts=contexts),)
    session = Session(*rows, tier="off", switches={"channels_last": Switch.ON})
    session.call(lambda: torch.zeros(1))
    session.finish()
    assert [context.forced for context in contexts] == [True]
