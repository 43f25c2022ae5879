"""The attention override and the choice of a backend."""

import pytest
import torch
import torch.nn.functional as F
from speed_tier.speed.env import Capabilities, torch_version
from speed_tier.speed.optimizations import attention_backend
from speed_tier.speed.optimizations.attention_backend import AttentionBackend, make_override
from speed_tier.speed.optimizations.base import HostFacts
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


@pytest.fixture
def timed(monkeypatch):
    """Put figures in place of a measurement on a card."""

    def put(times, host_ms):
        monkeypatch.setattr(attention_backend, "_measure", lambda *_: times)
        monkeypatch.setattr(attention_backend, "_measure_host", lambda *_: host_ms)

    return put


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
    assert AttentionBackend().check(context()) is None
    handle = AttentionBackend().install(context())
    assert handle.note == "cudnn (cudnn 0.47 ms, flash 0.98 ms, efficient 1.60 ms, host 0.97 ms)"
    assert handle.options == {"optimized_attention_override": make_override("cudnn")}
    assert (dict(handle.flags), list(handle.patches)) == ({}, [])


def test_declines_where_the_host_is_as_fast(timed):
    timed({"cudnn": 0.97, "flash": 0.98}, host_ms=0.98)
    assert AttentionBackend().check(context()) == (
        "the host's own choice is the fastest here (cudnn 0.97 ms, flash 0.98 ms, host 0.98 ms)"
    )
    assert AttentionBackend().check(context(forced=True)) is None


@pytest.mark.parametrize("forced", [False, True])
def test_declines_where_no_backend_takes_the_shape(timed, forced):
    timed({}, host_ms=1.0)
    reason = AttentionBackend().check(context(forced=forced))
    assert reason == "no fused attention backend takes this shape on this card"


def test_on_diffusers_the_order_is_set_around_the_call(timed):
    timed({"efficient": 0.5, "flash": 1.0}, host_ms=1.0)
    handle = AttentionBackend().install(context(stack="diffusers"))
    assert handle.order[0] is SDPBackend.EFFICIENT_ATTENTION
    assert SDPBackend.MATH in handle.order
    before = full_state()
    q, k, v = qkv()
    with handle.scope():
        inside = F.scaled_dot_product_attention(q, k, v)
    assert full_state() == before
    torch.testing.assert_close(inside, F.scaled_dot_product_attention(q, k, v))


def test_a_backend_that_refuses_is_left_out_of_the_measurement():
    times = attention_backend._measure(tiny.CPU, torch.float32, 1, 2, 16, 8)
    assert "cudnn" not in times  # there is none on the CPU
    assert all(ms > 0 for ms in times.values())


def test_the_measured_shape_is_the_joint_sequence_in_buckets(monkeypatch):
    asked = []
    monkeypatch.setattr(attention_backend, "_measure", lambda *a: asked.append(a) or {"flash": 1.0})
    monkeypatch.setattr(attention_backend, "_measure_host", lambda *_: 2.0)
    AttentionBackend().check(context(image_tokens=4096, text_tokens=100, batch=2))
    assert asked[0][2:] == (2, 2, 4096, tiny.WIDTH // 2)
