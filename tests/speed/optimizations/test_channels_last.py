"""Channels-last: the same picture and strides outside, no weight touched, kept only if faster."""

import contextlib
from dataclasses import replace

import pytest
import torch
from speed_tier.speed import probe
from speed_tier.speed.optimizations.channels_last import ChannelsLast, format_for, in_format
from speed_tier.speed.patching import PatchSet, active_patches
from speed_tier.tests.speed import tiny_vae
from speed_tier.tests.speed.tiny import relative_error
from torch import nn

KINDS = ("kl", "wan")


@pytest.fixture(autouse=True)
def nothing_remembered():
    probe.forget()
    yield
    probe.forget()


@contextlib.contextmanager
def installed(kind, vae, z, **more):
    given = tiny_vae.context(kind, vae, z, **{"forced": True, **more})
    assert ChannelsLast().check(given) is None
    handle = ChannelsLast().install(given)
    with torch.no_grad(), handle.scope(), PatchSet(handle.patches):
        yield handle
    handle.remove()


@pytest.fixture
def cudnn_like(monkeypatch):
    """3-D convolutions that keep the format, as cudnn's do and those of a CPU do not."""
    plain = nn.Conv3d._conv_forward

    def convolve(self, x, weight, bias, *args, **kwargs):
        out = plain(self, x, weight, bias, *args, **kwargs)
        known = any(_suggests(t) for t in (x, weight))
        return out.contiguous(memory_format=torch.channels_last_3d) if known else out

    monkeypatch.setattr(nn.Conv3d, "_conv_forward", convolve)


def _suggests(tensor):
    """Whether torch takes the strides for channels-last; of several readings it has one."""
    probe = torch.empty_like(tensor, memory_format=torch.preserve_format)
    fresh = torch.nn.functional.pad(probe, (0, 1))  # pad asks the same question
    return fresh.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_result_with_the_strides_of_off(kind):
    vae, z = tiny_vae.MAKERS[kind](), tiny_vae.latent(kind)
    picture = torch.rand(1, 3, *([1] if kind == "wan" else []), 64, 96)
    for what, given, call in (("vae decode", z, "decode"), ("vae encode", picture, "encode")):
        trial = tiny_vae.trial_of(vae, z, what=what)
        with torch.no_grad():
            off = getattr(vae, call)(given)
        with installed(kind, vae, z, trial=trial):
            got = getattr(vae, call)(given)
        assert relative_error(got, off) < 1e-5
        assert (got.stride(), got.dtype) == (off.stride(), off.dtype)
        assert active_patches() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_convolution_gets_another_format(kind, cudnn_like):
    vae, z = tiny_vae.MAKERS[kind](), tiny_vae.latent(kind)
    seen = []
    for module in vae.decoder.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            module.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    with installed(kind, vae, z) as handle:
        vae.decode(z)
    assert len(seen) > 5
    for x in seen:
        assert x.is_contiguous(memory_format=format_for(x.ndim))
    assert handle.note == f"all {len(seen)} inputs of convolutions came channels-last"


def test_a_part_that_goes_back_to_the_plain_format_is_counted():
    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    norm = vae.decoder.mid.block_1.norm1
    norm.register_forward_hook(lambda m, a, out: out.contiguous())
    with installed("kl", vae, z) as handle:
        vae.decode(z)
    assert handle.note.startswith("1 of 12 inputs of convolutions came in the plain format")


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_not_touched(kind):
    vae, z = tiny_vae.MAKERS[kind](), tiny_vae.latent(kind)
    before = {n: (p.data_ptr(), p.stride(), p._version) for n, p in vae.named_parameters()}
    with installed(kind, vae, z):
        vae.decode(z)
        during = {n: (p.data_ptr(), p.stride(), p._version) for n, p in vae.named_parameters()}
    assert during == before


@pytest.mark.parametrize("cast", [False, True])
def test_a_weight_that_is_patched_at_the_call_is_used_as_it_comes(cast):
    class Cast(nn.Conv2d):
        def forward(self, x):
            return self._conv_forward(x, self.weight * 2, self.bias)

    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    doubled = Cast(4, 2 * tiny_vae.WIDTH, 3, padding=1)
    doubled.load_state_dict(vae.decoder.conv_in.state_dict())
    doubled.comfy_cast_weights = cast
    vae.decoder.conv_in = doubled.requires_grad_(False)
    with torch.no_grad():
        off = vae.decode(z)
    with installed("kl", vae, z) as handle:
        assert relative_error(vae.decode(z), off) < 1e-5
    assert handle.note.startswith("all 12 inputs")


def test_another_packs_convolution_stays_in_charge():
    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    conv = vae.decoder.conv_out

    def circular(x, weight, bias):
        return nn.functional.conv2d(nn.functional.pad(x, (1, 1, 1, 1), "circular"), weight, bias)

    conv._conv_forward = circular
    with torch.no_grad():
        off = vae.decode(z)
    with installed("kl", vae, z):
        assert relative_error(vae.decode(z), off) < 1e-5
    assert conv._conv_forward is circular


@pytest.mark.parametrize("shape", [(1, 8, 4, 4), (1, 8, 1, 1), (8, 1, 3, 3), (2, 4, 1, 5, 1)])
def test_strides_that_torch_knows_the_format_by(shape):
    memory_format = format_for(len(shape))
    tensor = torch.randn(shape)
    got = in_format(tensor, memory_format)
    assert torch.equal(got, tensor)
    assert got.is_contiguous(memory_format=memory_format)
    assert got.stride() == torch.empty(shape, memory_format=memory_format).stride()


def test_what_makes_it_step_aside():
    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    check = ChannelsLast().check
    assert "not measured" in check(tiny_vae.context("kl", vae))
    assert "compiles this VAE" in check(tiny_vae.context("kl", vae, z, compiled_by="a node"))
    small = tiny_vae.context("kl", vae, z, spare_bytes=lambda: 10)
    assert "the copies of the weights need" in check(small)
    vae.decoder.forward = vae.decoder.forward.__func__.__get__(vae.encoder)
    assert "another pack" in check(tiny_vae.context("kl", vae, z))


@pytest.mark.parametrize(("first", "second", "stays"), [(10.0, 5.0, True), (5.0, 5.0, False)])
def test_figures_of_an_earlier_process_decide(tmp_path, monkeypatch, first, second, stays):
    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    monkeypatch.setattr(probe, "measure", lambda *a, **k: probe.Figures(first, second, "", 0.5))
    given = tiny_vae.context("kl", vae, z, state_folder=tmp_path)
    handle = ChannelsLast().install(given)
    assert bool(handle.patches) is stays
    assert (handle.not_used == "") is stays
    probe.forget()  # another process

    def never(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(probe, "measure", never)
    reason = ChannelsLast().check(given)
    assert (reason is None) is stays
    if stays:
        assert "5.00 ms with it, 10.00 without (measured earlier" in (
            ChannelsLast().install(given).note
        )
    else:
        assert reason.startswith("does not pay here: 5.00 ms with it, 5.00 without")
    other = tiny_vae.context("kl", vae, z, state_folder=tmp_path, dtype=torch.bfloat16)
    assert ChannelsLast().check(other) is None, "another dtype is another measurement"


def test_memory_that_runs_out_while_measuring_is_remembered():
    vae, z, tried = tiny_vae.kl(), tiny_vae.latent("kl"), []

    def decode(height, width):
        tried.append((height, width))
        raise torch.OutOfMemoryError("no room")

    given = tiny_vae.context("kl", vae, z, trial=replace(tiny_vae.trial_of(vae, z), run=decode))
    assert ChannelsLast().check(given) is None
    handle = ChannelsLast().install(given)
    handle.remove()
    assert handle.not_used == "not enough memory to measure it"
    assert handle.patches == ()
    calls = len(tried)
    assert ChannelsLast().check(given) == "not enough memory to measure it"
    assert len(tried) == calls > 0
