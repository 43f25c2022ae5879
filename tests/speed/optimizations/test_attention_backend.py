"""The attention override and the choice of a backend."""

import contextlib
import re

import pytest
import torch
import torch.nn.functional as F
from speed_tier.speed import probe
from speed_tier.speed.env import Capabilities, torch_version
from speed_tier.speed.optimizations import attention_backend
from speed_tier.speed.optimizations.attention_backend import AttentionBackend, make_override
from speed_tier.speed.optimizations.base import HostFacts
from speed_tier.speed.probe import Figures
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.process import full_state
from torch.nn.attention import SDPBackend

CARD = Capabilities("cuda", "a card", False, (9, 0), torch_version())
BACKENDS = ["cudnn", "flash", "efficient"]


class Attention:
    """The host's attention function: plain SDPA on (B, H, N, D), with a log of its calls."""

    def __init__(self, name="attention_pytorch"):
        self.__name__ = name
        self.calls = []

    def __call__(self, q, k, v, heads, mask=None, *args, **kwargs):
        self.calls.append((mask, args, kwargs))
        return "the host's own"


def qkv(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 7, 16, generator=generator).to(dtype) for _ in range(3)]


def context(**more):
    given = {"capabilities": CARD, "dtype": torch.bfloat16, **more}
    return tiny.context(tiny.toy(), **given)


@pytest.fixture(autouse=True)
def nothing_known():
    probe.forget()
    yield
    probe.forget()


class Card:
    """Figures in place of a measurement on a card; a backend without one takes no shape."""

    def __init__(self, times, host_ms):
        self.times, self.host_ms = times, host_ms
        self.asked = []

    def choose(self, key, folder, plain, other, device):
        name = next(name for name in BACKENDS if f"attention {name} " in key)
        self.asked.append((name, key))
        figures = Figures(self.host_ms, self.times[name], spent_s=0.25)
        probe.remember(key, folder, figures)
        return figures

    def kernel(self, backends):
        (name,) = (n for n, b in attention_backend._CANDIDATES.items() if [b] == backends)
        if name not in self.times:
            raise RuntimeError("No available kernel. Aborting execution.")
        return contextlib.nullcontext()


@pytest.fixture
def timed(monkeypatch):
    def put(times, host_ms):
        card = Card(times, host_ms)
        monkeypatch.setattr(attention_backend.probe, "choose", card.choose)
        monkeypatch.setattr(attention_backend, "sdpa_kernel", card.kernel)
        return card

    return put


def refusal(**more):
    """Why it does not engage, in `check` or once it has measured."""
    optimization, ctx = AttentionBackend(), context(**more)
    return optimization.check(ctx) or optimization.install(ctx).not_used or None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", BACKENDS)
def test_the_override_equals_sdpa(first, dtype):
    q, k, v = qkv(dtype)
    func = Attention()
    expected = F.scaled_dot_product_attention(q, k, v)
    before = full_state()
    out = make_override(first)(func, q, k, v, 4, skip_reshape=True)
    assert func.calls == []
    assert out.shape == (2, 7, 64)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        out, expected.transpose(1, 2).reshape(2, 7, 64), rtol=tolerance, atol=tolerance
    )
    apart = make_override(first)(func, q, k, v, 4, skip_reshape=True, skip_output_reshape=True)
    torch.testing.assert_close(apart, expected, rtol=tolerance, atol=tolerance)
    assert full_state() == before, "the backend is chosen inside the call only"


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(7, 7),), {"skip_reshape": True}),
        ((None, "precision"), {"skip_reshape": True}),
        ((), {}),
        ((), {"skip_reshape": False}),
        ((), {"skip_reshape": True, "scale": 0.5}),
        ((), {"skip_reshape": True, "enable_gqa": True}),
    ],
    ids=["mask", "more arguments", "not split in heads", "no heads asked", "scale", "grouped"],
)
def test_what_the_override_does_not_know_goes_to_the_host(args, kwargs):
    q, k, v = qkv()
    func = Attention()
    assert make_override("flash")(func, q, k, v, 4, *args, **kwargs) == "the host's own"
    ((mask, rest, given),) = func.calls
    assert mask is (args[0] if args else None)
    assert (rest, given) == (args[1:], kwargs)


def test_another_attention_function_stays():
    func = Attention("attention_sage")
    out = make_override("flash")(func, *qkv(), 4, skip_reshape=True)
    assert out == "the host's own"


def test_one_function_object_a_backend():
    """Compiled blocks guard on its identity; a new one would recompile every run."""
    assert make_override("flash") is make_override("flash")
    assert make_override("flash") is not make_override("cudnn")


def test_declines_on_the_cpu_even_when_forced():
    for forced in (False, True):
        reason = AttentionBackend().check(tiny.context(tiny.toy(), forced=forced))
        assert reason == "fused attention backends need an NVIDIA card; found cpu"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            {"dtype": torch.float32},
            "fused attention backends need bf16 or fp16; found torch.float32",
        ),
        (
            {"host": HostFacts(attention_in_use="the host runs attention_sage; it stays")},
            "the host runs attention_sage; it stays",
        ),
        (
            {"host": HostFacts(compiled_by="a torch.compile node")},
            "a torch.compile node compiles this model; its attention stays",
        ),
        (
            {"capabilities": Capabilities("cuda", "MI300X", True, None, torch_version())},
            "fused attention backends need an NVIDIA card; found cuda",
        ),
    ],
    ids=["dtype", "attention in use", "compiled by another", "rocm"],
)
def test_declines_in_words(more, reason):
    assert AttentionBackend().check(context(**more)) == reason


def test_the_fastest_backend_is_taken_with_its_figures(timed):
    timed({"cudnn": 0.47, "flash": 0.98, "efficient": 1.6}, host_ms=0.97)
    figures = "cudnn 0.47 ms, flash 0.98 ms, efficient 1.60 ms, host 0.97 ms"
    for source in ("measured now in 0.75 s", "measured earlier on this card"):
        assert AttentionBackend().check(context()) is None
        handle = AttentionBackend().install(context())
        assert handle.note == f"cudnn ({figures}; {source})"
        assert handle.options == {"optimized_attention_override": make_override("cudnn")}
        assert (dict(handle.flags), list(handle.patches)) == ({}, [])


def test_declines_where_the_host_is_as_fast(timed):
    card = timed({"cudnn": 0.97, "flash": 0.98}, host_ms=0.98)
    said = "the host's own choice is the fastest here (cudnn 0.97 ms, flash 0.98 ms, host 0.98 ms; "
    assert refusal() == f"{said}measured now in 0.50 s)"
    assert AttentionBackend().check(context()) == f"{said}measured earlier on this card)"
    assert len(card.asked) == 2
    assert refusal(forced=True) is None


@pytest.mark.parametrize("forced", [False, True])
def test_declines_where_no_backend_takes_the_shape(timed, forced):
    timed({}, host_ms=1.0)
    assert refusal(forced=forced) == "no fused attention backend takes this shape on this card"


def test_another_process_measures_nothing_anew(timed, tmp_path):
    host = HostFacts(state_folder=tmp_path)
    card = timed({"cudnn": 0.5, "flash": 1.0, "efficient": 2.0}, host_ms=1.0)
    first = AttentionBackend().install(context(host=host))
    probe.forget()
    assert AttentionBackend().check(context(host=host)) is None
    again = AttentionBackend().install(context(host=host))
    assert len(card.asked) == 3
    assert again.options == first.options
    assert "measured earlier" in again.note
    AttentionBackend().install(context(host=host, dtype=torch.float16))
    assert len(card.asked) == 6
    for number, version in enumerate(("ComfyUI 1", "ComfyUI 2"), 3):
        newer = HostFacts(state_folder=tmp_path, attention=Attention(), version=version)
        AttentionBackend().install(context(host=newer))
        assert len(card.asked) == 3 * number


def test_out_of_memory_is_no_refusal(monkeypatch):
    def kernel(backends):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention_backend, "sdpa_kernel", kernel)
    with pytest.raises(torch.OutOfMemoryError):
        AttentionBackend().install(context())


def test_on_diffusers_the_order_is_set_around_the_call(timed, monkeypatch):
    timed({"efficient": 0.5, "flash": 1.0}, host_ms=1.0)
    handle = AttentionBackend().install(context(stack="diffusers"))
    monkeypatch.undo()
    assert handle.order[0] is SDPBackend.EFFICIENT_ATTENTION
    assert SDPBackend.MATH in handle.order
    before = full_state()
    q, k, v = qkv()
    with handle.scope():
        inside = F.scaled_dot_product_attention(q, k, v)
    assert full_state() == before
    torch.testing.assert_close(inside, F.scaled_dot_product_attention(q, k, v))


def test_a_backend_that_refuses_is_left_out_of_a_real_measurement():
    handle = AttentionBackend().install(context(dtype=torch.float32, forced=True))
    said = handle.note or handle.not_used
    assert "cudnn" not in said  # there is none on the CPU
    assert re.search(r"flash \d+\.\d\d ms, host \d+\.\d\d ms; measured now in \d\.\d\d s", said)


def test_the_measured_shape_is_the_joint_sequence_in_buckets(timed):
    card = timed({"flash": 1.0}, host_ms=2.0)
    AttentionBackend().install(context(image_tokens=4096, text_tokens=100, batch=2))
    ((_, key),) = card.asked
    assert f"| torch.bfloat16 | 2x2x4096x{tiny.WIDTH // 2}" in key
