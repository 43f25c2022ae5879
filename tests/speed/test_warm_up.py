"""Sizes that are prepared before the first step: which, how often, and what is said of them."""

from dataclasses import dataclass

import pytest
import torch
from speed_tier.speed import Call
from speed_tier.speed.optimizations.base import HostFacts
from speed_tier.speed.warm_up import MOST, Size, parse_sizes, prepare
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
        ("1024 x 832, 64 * 64", (Size(1024, 832), Size(64, 64))),
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


def test_a_long_word_is_not_repeated_whole():
    with pytest.raises(ValueError) as raised:
        parse_sizes("9" * 200_000)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize("value", [None, 1024, [1024]])
def test_what_comes_over_a_link_may_be_no_text(value):
    with pytest.raises(ValueError, match=f"needs a text; found {type(value).__name__}"):
        parse_sizes(value)


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


@dataclass
class Settling(runs.FakeHandle):
    """Sets something up in the first calls of every size."""

    left: int = 0

    @property
    def settling(self):
        return self.left > 0


class Sampler:
    """Runs of one model, with the sizes that were called."""

    def __init__(self, sizes=SIZES, host=None, **fake):
        self.log = []
        self.fake = runs.Fake("tf32", self.log, **fake)
        self.model = tiny.qwen_image(layers=1)
        self.sizes, self.host = sizes, host or HostFacts()
        self.seen, self.raises = [], {}
        self.new_run()

    def new_run(self):
        self.session = runs.Session(self.fake, model=self.model)
        self.seen.clear()

    def at(self, x):
        call = Call(self.model, tiny.CPU, torch.float32, tuple(x.shape), 5, self.host)

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
        output = self.session.run.call(call, invoke)
        prepare(self.sizes, self.session.run, call, x, lambda: hindrance, self.at)
        return output

    def run(self, **call):
        """Two calls; the notes of the run."""
        self.new_run()
        for _ in range(2):
            self.call(**call)
        return self.session.finish().notes


def test_each_size_is_called_after_the_first_call_but_for_its_own():
    sampler = Sampler()
    sampler.call()
    sampler.call()
    assert sampler.seen == [(64, 64), (16, 8), (12, 12), (64, 64)]
    report = sampler.session.finish()
    assert report.evaluations == 2
    assert report.latent_shape == [1, 16, 1, 64, 64]
    (note,) = report.notes
    assert note.startswith("prepared in the first step: 64x128 (0.")
    assert ", 96x96 (0." in note
    phases = [data for kind, data in sampler.session.events if kind == "phase"]
    assert phases == [
        {"phase": "preparing", "size": "64x128", "index": 1, "count": 2},
        {"phase": "preparing", "size": "96x96", "index": 2, "count": 2},
        {"phase": "sampling"},
    ]


def test_everything_is_in_place_for_a_preparing_call():
    sampler = Sampler(sizes=(Size(64, 64),))
    sampler.run()
    assert sampler.log[:2] == ["check tf32", "install tf32"]
    assert sampler.log.count("enter tf32") == 3


@pytest.mark.parametrize(("calls", "expected"), [(0, 1), (3, 3), (99, 6)])
def test_a_size_is_called_until_nothing_more_is_set_up(calls, expected):
    handle = Settling(left=calls)

    class Counting(Sampler):
        def at(self, x):
            call, invoke = super().at(x)

            def counted(options):
                if x.shape[-1] != 64:
                    handle.left -= 1
                return invoke(options)

            return call, counted

    sampler = Counting(sizes=(Size(64, 128),))
    sampler.session.run.through(*sampler.at(torch.zeros(1, 16, 1, 64, 64)))
    (engagement,) = sampler.session.run._engagements.values()
    engagement.handles["tf32"] = handle
    sampler.call()
    assert sampler.seen.count((16, 8)) == expected


def test_a_later_run_prepares_what_is_new():
    sampler = Sampler()
    sampler.run()
    assert sampler.run() == []
    assert sampler.seen == [(64, 64)] * 2
    sampler.run(batch=2)
    assert sampler.seen == [(64, 64), (16, 8), (12, 12), (64, 64)]
    sampler.sizes = (*SIZES, Size(64, 64))
    assert "64x64 (0." in sampler.run()[0]
    assert sampler.seen == [(64, 64), (8, 8), (64, 64)]
    sampler.run(height=16, width=8)  # now another's turn to be the run's own
    assert sampler.seen == [(16, 8), (64, 64), (16, 8)]
    other = runs.Fake("fused_qkv", sampler.log)
    sampler.session = runs.Session(sampler.fake, other, model=sampler.model)
    sampler.seen.clear()
    sampler.call()
    assert len(sampler.seen) == 4


@pytest.mark.parametrize("sizes", [(), (Size(512, 512),)])
def test_nothing_to_prepare(sizes):
    sampler = Sampler(sizes=sizes)
    assert sampler.run() == []
    assert sampler.seen == [(64, 64)] * 2


@pytest.mark.parametrize("fake", [{"reason": "no card"}, {"handle": {"not_used": "does not pay"}}])
def test_nothing_is_prepared_where_nothing_engages(fake):
    sampler = Sampler(**fake)
    assert sampler.run() == []
    assert sampler.seen == [(64, 64)] * 2


def test_another_packs_model_is_left_alone():
    sampler = Sampler()
    sampler.model = torch.nn.Linear(2, 2)
    assert sampler.run() == []
    assert sampler.seen == [(64, 64)] * 2


@pytest.mark.parametrize(
    ("hindrance", "host"),
    [
        ("a ControlNet is applied", HostFacts()),
        ("", HostFacts(participant="a wrapper of another node takes part in every call (x)")),
    ],
)
def test_a_call_that_is_bound_to_its_size_says_so_in_each_run(hindrance, host):
    sampler = Sampler(host=host)
    reason = hindrance or host.participant
    for _ in range(2):
        assert sampler.run(hindrance=hindrance) == [f"no size was prepared: {reason}"]
        assert sampler.seen == [(64, 64)] * 2
    sampler.host = HostFacts()
    sampler.run()
    assert sampler.seen == [(64, 64), (16, 8), (12, 12), (64, 64)]


def test_a_size_without_room_waits_for_a_run_with_some():
    spare = [-(3 << 29)]
    host = HostFacts(spare_bytes=lambda: spare[0])
    sampler = Sampler(sizes=(Size(64, 128),), host=host)
    (note,) = sampler.run()
    assert note.endswith("64x128 (left out for now: 1.5 GiB short of memory)")
    assert sampler.seen == [(64, 64)] * 2
    spare[0] = 0
    sampler.run()
    assert sampler.seen == [(64, 64), (16, 8), (64, 64)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("cuDNN error:\nCUDNN_STATUS_NOT_SUPPORTED"), "cuDNN error: CUDNN_STATUS"),
    ],
)
def test_a_size_that_fails_is_left_out_and_the_run_goes_on(error, said):
    put_right = []
    sampler = Sampler(host=HostFacts(after_out_of_memory=put_right.append))
    sampler.raises[16, 8] = error
    (note,) = sampler.run()
    assert sampler.seen == [(64, 64), (16, 8), (12, 12), (64, 64)]
    assert put_right == [sampler.model] * ("memory" in said)
    assert f"64x128 (left out: {said}" in note and ", 96x96 (0." in note
    assert sampler.run() == []
    assert sampler.log.count("enter tf32") == sampler.log.count("leave tf32")


class InterruptProcessingException(Exception):  # noqa: N818 - the host's name
    pass


def test_a_cancelled_run_leaves_the_rest_to_the_next():
    sampler = Sampler()
    sampler.raises[12, 12] = InterruptProcessingException()
    with pytest.raises(InterruptProcessingException):
        sampler.call()
    sampler.session.finish("interrupted")
    sampler.raises.clear()
    (note,) = sampler.run()
    assert note.startswith("prepared in the first step: 96x96 (")
    assert sampler.seen == [(64, 64), (12, 12), (64, 64)]
