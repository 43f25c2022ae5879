"""Sizes that are prepared before the first step: which, how often, and what is said of them."""

import pytest
import torch
from speed_tier.speed import Call
from speed_tier.speed.optimizations.base import HostFacts
from speed_tier.speed.warm_up import MOST, Size, WarmUp, parse_sizes
from speed_tier.tests.speed import runs, tiny

SIZES = (Size(64, 128), Size(96, 96), Size(512, 512))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("", ()),
        ("  ", ()),
        ("1024x1024", (Size(1024, 1024),)),
        ("1024x1024, 832x1216", (Size(1024, 1024), Size(832, 1216))),
        ("832X1216;512*768\n64x64", (Size(832, 1216), Size(512, 768), Size(64, 64))),
        ("64x64, 64x64", (Size(64, 64),)),
    ],
)
def test_sizes_in_a_text(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "word", ["1024", "1024x", "x", "1000x1024", "48x64", "0x0", "-64x64", "9999999x64", "8208x64"]
)
def test_what_is_no_size_is_named(word):
    with pytest.raises(ValueError, match="warm_up_sizes needs sizes in pixels") as raised:
        parse_sizes(f"64x64, {word}")
    assert repr(word) in str(raised.value)


def test_too_many_sizes():
    with pytest.raises(ValueError, match=f"takes {MOST} sizes at most; found {MOST + 1}"):
        parse_sizes(" ".join(f"64x{64 + 16 * n}" for n in range(MOST + 1)))


@pytest.mark.parametrize("shape", [(2, 16, 64, 64), (1, 16, 1, 64, 64)])
def test_latents_of_a_size_leave_the_samplers_numbers_alone(shape):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    latents = Size(96, 128).latent_like(torch.zeros(shape, dtype=torch.bfloat16))
    assert latents.shape == (*shape[:-2], 16, 12)
    assert latents.dtype == torch.bfloat16
    assert 0.8 < float(latents.float().std()) < 1.2
    assert torch.equal(torch.rand(3), expected)


class Sampler:
    """Calls of one run, with what was called for each size."""

    def __init__(self, sizes=SIZES, host=None, run=None, warm_up=None):
        self.log = []
        self.session = runs.Session(runs.Fake("tf32", self.log)) if run is None else run
        self.warm_up = WarmUp(sizes) if warm_up is None else warm_up
        self.host = host or HostFacts()
        self.seen = []
        self.raises = {}

    def at(self, x):
        call = Call(self.session.model, tiny.CPU, torch.float32, tuple(x.shape), 5, self.host)

        def invoke(options):
            sides = tuple(x.shape[-2:])
            self.seen.append(sides)
            if sides in self.raises:
                raise self.raises[sides]
            return x

        return call, invoke

    def call(self, height=64, width=64, batch=1, hindrance=""):
        x = torch.zeros(batch, 16, 1, height, width)
        call, invoke = self.at(x)
        self.warm_up.prepare(self.session.run, call, x, lambda: hindrance, self.at)
        return self.session.run.call(call, invoke)


def test_each_size_is_called_before_the_first_call_but_for_its_own():
    sampler = Sampler()
    sampler.call()
    assert sampler.seen == [(16, 8)] * 3 + [(12, 12)] * 3 + [(64, 64)]
    sampler.call()
    assert sampler.seen[7:] == [(64, 64)]
    report = sampler.session.finish()
    assert report.evaluations == 2
    assert report.latent_shape == [1, 16, 1, 64, 64]
    (note,) = report.notes
    assert note.startswith("prepared before the first step: 64x128 (0.")
    assert ", 96x96 (0." in note
    phases = [data for kind, data in sampler.session.events if kind == "phase"]
    assert phases == [
        *[{"phase": "preparing", "size": "64x128", "index": 1, "count": 2}] * 3,
        *[{"phase": "preparing", "size": "96x96", "index": 2, "count": 2}] * 3,
        {"phase": "sampling"},
    ]


def test_everything_is_in_place_for_a_preparing_call():
    sampler = Sampler(sizes=(Size(64, 64),))
    sampler.call()
    sampler.session.finish()
    assert sampler.log[:2] == ["check tf32", "install tf32"]
    assert sampler.log.count("enter tf32") == 4


def test_a_later_run_prepares_nothing_until_the_model_was_unloaded():
    first = Sampler()
    first.call()
    later = Sampler(warm_up=first.warm_up, run=first.session)
    later.call()
    assert later.seen == [(64, 64)]
    later.call(batch=2)
    assert later.seen[1:4] == [(16, 8)] * 3
    later.warm_up.forget()
    later.call()
    assert len(later.seen) == 1 + 7 + 7


@pytest.mark.parametrize("more", [{"sizes": ()}, {"sizes": (Size(512, 512),)}])
def test_nothing_to_prepare(more):
    sampler = Sampler(**more)
    sampler.call()
    assert sampler.seen == [(64, 64)]
    assert sampler.session.finish().notes == []


@pytest.mark.parametrize(
    ("hindrance", "host"),
    [
        ("a ControlNet is applied", HostFacts()),
        ("", HostFacts(participant="a wrapper of another node takes part in every call (x)")),
    ],
)
def test_a_call_that_is_bound_to_its_size_says_so_once(hindrance, host):
    sampler = Sampler(host=host)
    sampler.call(hindrance=hindrance)
    sampler.call(hindrance=hindrance)
    assert sampler.seen == [(64, 64)] * 2
    reason = hindrance or host.participant
    assert sampler.session.finish().notes == [f"no size was prepared: {reason}"]


def test_a_size_without_room_is_left_out():
    sampler = Sampler(sizes=(Size(64, 128),), host=HostFacts(spare_bytes=lambda: -(3 << 29)))
    sampler.call()
    assert sampler.seen == [(64, 64)]
    (note,) = sampler.session.finish().notes
    assert note.endswith("64x128 (left out: 1.5 GiB short of memory)")


def test_out_of_memory_leaves_a_size_out_and_the_run_goes_on():
    put_right = []
    sampler = Sampler(host=HostFacts(after_out_of_memory=put_right.append))
    sampler.raises[16, 8] = torch.OutOfMemoryError("CUDA out of memory")
    sampler.call()
    assert sampler.seen == [(16, 8)] + [(12, 12)] * 3 + [(64, 64)]
    assert put_right == [sampler.session.model]
    (note,) = sampler.session.finish().notes
    assert "64x128 (left out: out of memory), 96x96 (0." in note


def test_another_error_is_the_runs():
    sampler = Sampler()
    sampler.raises[16, 8] = RuntimeError("planted")
    with pytest.raises(RuntimeError, match="planted"):
        sampler.call()
    assert sampler.log.count("enter tf32") == sampler.log.count("leave tf32") == 1
