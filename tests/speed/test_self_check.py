"""The first call beside the untiered path, who is blamed, and the watch over later calls."""

import pytest
import torch
from speed_tier.speed import Call, Switch, TieredModel, TierRequest, apply, resolve_tier
from speed_tier.speed.engagement import Engagement
from speed_tier.speed.errors import NotFiniteError
from speed_tier.speed.flags import FLAGS, TF32, snapshot
from speed_tier.speed.optimizations.base import Handle, HostFacts
from speed_tier.speed.patching import Patch, active_patches
from speed_tier.speed.report import CompileFacts, State
from speed_tier.speed.self_check import (
    SelfCheck,
    known_of,
)
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.faults import LATER, Fault
from speed_tier.tests.speed.runs import Fake

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WHOLE = "the whole forward"


@pytest.fixture(autouse=True)
def toy_is_a_family(monkeypatch):
    known = {tiny.Toy: (tiny.TOY, "comfyui")}
    monkeypatch.setattr(apply, "detect_family", lambda model, _: known.get(type(model)))


class Session:
    """Runs of one tier on a toy; every call notes what the denoiser was given and gave."""

    def __init__(self, *optimizations, dtype=torch.float32, model=None, check=True, blocks=3):
        switches = {row.name: Switch.ON for row in optimizations}
        request = TierRequest(resolve_tier("max", is_gguf=False), switches, optimizations, check)
        self.model = tiny.toy(blocks).to(dtype) if model is None else model
        self.dtype = dtype
        self.tiered = TieredModel(request)
        self.invoked = 0
        self.host = HostFacts()
        self.open()

    def open(self):
        self.run = self.tiered.begin(self.tiered.new_report(), tiny.CPU)

    def call(self, x, weights=None):
        def invoke(options):
            self.invoked += 1
            return tiny.plain(self.model, x)

        shape = (x.shape[0], 16, 1, 2, x.shape[1])
        call = Call(self.model, tiny.CPU, self.dtype, shape, 5, self.host, weights=weights)
        return self.run.call(call, invoke)

    def input(self, **more):
        return tiny.toy_input(**more).to(self.dtype)

    def finish(self):
        report = self.run.close("done")
        assert active_patches() == 0
        assert FLAGS.held == ()
        return report


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_signature_is_compared_once(dtype):
    session = Session(Fault("gguf_dequant"), dtype=dtype)
    x = session.input()
    expected = tiny.plain(session.model, x)
    assert torch.equal(session.call(x), expected)
    assert session.invoked == 2
    assert torch.equal(session.call(x), expected)
    assert session.invoked == 3
    session.call(session.input(tokens=12))
    assert session.invoked == 5
    session.call(x, weights="a LoRA")
    assert session.invoked == 7
    facts = session.finish().check
    assert (facts.calls, facts.blocks, facts.block_error, facts.output_error) == (3, 9, 0.0, 0.0)
    assert facts.seconds > 0
    session.open()  # what is known of a model outlives the run, and its unload
    session.tiered.release(session.model)
    session.call(x)
    assert session.invoked == 8
    assert session.finish().check.calls == 0


class MeasuredOnce(Fake):
    """Found not to pay where it is measured, and known from then on."""

    def check(self, context):
        return "does not pay" if "install tf32" in self.log else None


def test_what_turned_out_not_to_pay_is_no_reason_to_compare_again():
    measured = MeasuredOnce("tf32", [], handle={"not_used": "does not pay"})
    session = Session(measured, Fault("gguf_dequant"))
    session.call(session.input())
    assert session.finish().check.calls == 1
    session.open()
    session.call(session.input())
    assert session.finish().check.calls == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [0, 1, 4, 6])
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("kind", ["scaled", "noise", "NaN"])
def test_what_is_at_fault_is_found_and_dropped(kind, place, block, dtype):
    rows = [Fault(name) for name in "abcd"]
    rows[place] = Fault("abcd"[place], kind, block)
    session = Session(*rows, dtype=dtype, blocks=7)
    x = session.input()
    expected = tiny.plain(session.model, x)
    for _ in range(3):
        assert torch.equal(session.call(x), expected)
    report = session.finish()
    at_fault = "abcd"[place]
    assert report.engaged() == [name for name in "abcd" if name != at_fault]
    outcome = report.feature(at_fault)
    assert outcome.state is State.FELL_BACK
    assert outcome.reason.startswith(f"dropped by the self-check: blocks.{block} ")
    assert [notice.kind for notice in report.notices] == ["fell_back"]
    before = session.invoked
    session.open()
    assert torch.equal(session.call(x), expected)
    assert session.invoked == before + 1  # the rest was found right
    report = session.finish()
    assert report.feature(at_fault).state is State.SKIPPED
    assert report.notices == []


class NoRoom(Fault):
    """Runs out of memory in every call of its block but the first."""

    def _spoiled(self, output):
        if self.calls[self.kind] > 1:
            raise torch.OutOfMemoryError("no room")
        return output * 1.5


def test_no_memory_to_find_out_who_it_was_drops_everything():
    session = Session(Fault("a"), NoRoom("b", "scaled", 0))
    recovered = []
    session.host = HostFacts(after_out_of_memory=recovered.append)
    x = session.input()
    for _ in range(2):
        assert torch.equal(session.call(x), tiny.plain(session.model, x))
    report = session.finish()
    assert recovered == [session.model]
    assert report.engaged() == []
    assert "not enough memory to find out by which feature" in report.feature("a").reason


class OnlyWithout(Fault):
    """Steps aside while another feature is engaged."""

    def check(self, context):
        return "not beside a" if "a" in context.engaged else None


def test_what_engages_only_after_a_drop_is_compared_as_well():
    session = Session(Fault("a", "scaled", 0), Fault("b"), OnlyWithout("c", "NaN", 1))
    x = session.input()
    for _ in range(2):
        assert torch.equal(session.call(x), tiny.plain(session.model, x))
    assert session.finish().engaged() == ["b"]


class Compiles(Fault):
    """Says that each of its calls compiles for a second."""

    def install(self, context):
        handle = super().install(context)
        handle.compile_facts = lambda: CompileFacts(seconds=float(self.calls[self.kind]))
        return handle


def test_what_was_compiled_on_the_way_is_no_cost_of_the_check():
    session = Session(Compiles("a", "none", 0))
    session.call(session.input())
    report = session.finish()
    assert report.compile.seconds == 2
    assert report.check.seconds == 0


class Cuts(Fault):
    """Gives a block's output without its last column, on which the next block would fail."""

    def _spoiled(self, output):
        return output[..., :-1]


def test_an_output_of_another_shape_is_a_fault_as_well():
    session = Session(Fault("a"), Cuts("b", "none", 0))
    x = session.input()
    for _ in range(2):
        assert torch.equal(session.call(x), tiny.plain(session.model, x))
    report = session.finish()
    assert report.engaged() == ["a"]
    assert "blocks.0, of another shape," in report.feature("b").reason


def test_two_at_fault_are_both_found():
    rows = [Fault("a"), Fault("b", "scaled", 1), Fault("c"), Fault("d", "NaN", 2), Fault("e")]
    session = Session(*rows)
    x = session.input()
    assert torch.equal(session.call(x), tiny.plain(session.model, x))
    assert session.finish().engaged() == ["a", "c", "e"]


class Upcasts(tiny.ToyBlock):
    """Leaves fp16's range in between, in fp32, as hosts do where a model needs it."""

    wide = torch.float32

    def forward(self, x, options):
        loud = self.mlp(x).to(self.wide) * 1e6
        return x + (loud / 1e6).to(x.dtype)


class StaysInFp16(Fault):
    def install(self, context):
        (block, *_) = context.denoiser.blocks
        narrow = type("Narrow", (Upcasts,), {"wide": torch.float16})
        stand_in = narrow.__new__(narrow)
        vars(stand_in).update(vars(block))
        return Handle(patches=[Patch(block, "forward", stand_in.forward)])


def test_an_upcast_of_the_host_that_is_lost_is_missed():
    model = tiny.Toy(Upcasts(), Upcasts()).eval().half()
    session = Session(Fault("a"), StaysInFp16("b"), dtype=torch.float16, model=model)
    x = session.input()
    expected = tiny.plain(model, x)
    assert expected.isfinite().all()
    assert (model.blocks[0].mlp(x).float() * 1e6).abs().max() > 65504
    assert torch.equal(session.call(x), expected)
    report = session.finish()
    assert report.engaged() == ["a"]
    assert "values that are not finite" in report.feature("b").reason


def test_a_size_that_goes_wrong_is_caught_when_it_comes():
    session = Session(Fault("a"), Fault("b", "NaN at one size", 1, width=12))
    good, bad = session.input(), session.input(tokens=12)
    session.call(good)
    assert session.run.report.features == []
    assert torch.equal(session.call(bad), tiny.plain(session.model, bad))
    report = session.finish()
    assert report.engaged() == ["a"]
    assert "values that are not finite, off has none" in report.feature("b").reason


def test_what_does_not_repeat_is_noted_and_then_trusted_no_longer():
    session = Session(Fault("a"), Fault("b", "once", 0))
    x = session.input()
    expected = tiny.plain(session.model, x)
    assert torch.equal(session.call(x), expected)
    assert known_of(session.model).dropped == {}
    session.tiered.request.optimizations[1].calls.clear()
    assert torch.equal(session.call(x), expected)
    report = session.finish()
    assert [note.partition(";")[2] for note in report.check.notes] == [
        " not when it was computed again"
    ] * 2
    assert report.engaged() == []
    assert set(known_of(session.model).dropped) == {"a", "b"}


def test_the_untiered_call_has_no_option_and_no_flag_of_the_tier():
    seen = []

    class Options(Fake):
        def install(self, context):
            patched = context.denoiser.blocks[0].attention.to_q
            self.log.append(patched)
            return Handle(flags={"matmul.tf32": TF32}, options={"ours": 1})

    session = Session(Options("flagged", []))
    x = session.input()
    watch = session.model.blocks[0].register_forward_pre_hook(
        lambda *_: seen.append(snapshot()["matmul.tf32"].is_tf32)
    )
    given = []

    def invoke(options):
        given.append(dict(options))
        return tiny.plain(session.model, x)

    session.run.call(Call(session.model, tiny.CPU, torch.float32, (1, 16, 2, 8)), invoke)
    assert given == [{}, {"ours": 1}]
    assert seen == [False, True]
    watch.remove()
    assert snapshot()["matmul.tf32"].is_tf32
    session.finish()
    assert not snapshot()["matmul.tf32"].is_tf32


class Flagged(Fault):
    """Needs a flag, and notes what its block finds."""

    def install(self, context):
        handle = super().install(context)
        handle.flags = {"matmul.tf32": TF32}
        return handle

    def _spoiled(self, output):
        self.calls[snapshot()["matmul.tf32"].is_tf32] += 1
        return output


def test_blocks_find_the_flags_of_the_tier_in_the_tiered_call():
    flagged = Flagged("flagged", "none", 1)
    session = Session(flagged)
    session.call(session.input())
    session.finish()
    assert flagged.calls == {"none": 2, True: 2}  # beside off's block, and in the whole call


def test_blocks_get_the_options_of_the_tier_only_in_the_tiered_call():
    seen = []

    class Asks(tiny.ToyBlock):
        def forward(self, x, transformer_options):
            seen.append(transformer_options.get("ours"))
            return super().forward(x, {})

    class Holder(tiny.Toy):
        def forward(self, x, options):
            for block in self.blocks:
                x = block(x, transformer_options=options)
            return x

    model = Holder(Asks(), Asks()).eval()
    row = Fake("a", [], handle={"options": {"ours": 1}})
    check = SelfCheck(lambda *_: None, lambda *_: None)
    engagement = Engagement(None)
    engagement.engaged(row, row.install(None))
    engagement.seal()
    call = Call(model, tiny.CPU, torch.float32, (1, 16, 2, 8))
    x = tiny.toy_input()
    check.compare(call, tiny.TOY, engagement, lambda extra: tiny.plain(model, x, {**extra}))
    assert seen == [None, 1, None, 1, 1, 1]


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (HostFacts(participant="a wrapper takes part"), "a wrapper takes part"),
        (HostFacts(compiled_by="another node"), "another node compiles this model"),
    ],
)
def test_what_may_count_calls_or_trace_them_is_not_called_twice(host, said):
    session = Session(Fault("a"))
    session.host = host
    session.call(session.input())
    assert session.invoked == 1
    facts = session.finish().check
    assert (facts.calls, facts.unchecked) == (0, said)


def test_switched_off_nothing_is_compared():
    session = Session(Fault("a", "scaled", 0), check=False)
    x = session.input()
    assert not torch.equal(session.call(x), tiny.plain(session.model, x))
    assert session.invoked == 1
    assert session.finish().check.calls == 0


def test_the_environment_switches_it_off(monkeypatch):
    monkeypatch.setenv("SPEED_TIER_DISABLE", "self_check")
    session = Session(Fault("a", "scaled", 0))
    session.call(session.input())
    report = session.finish()
    assert (session.invoked, report.notes) == (1, [])


def test_no_memory_for_both_ways_leaves_the_tier():
    session = Session(Fault("a"))
    x = session.input()
    forwards = []

    def invoke(options):
        forwards.append(1)
        if len(forwards) == 1:
            raise torch.OutOfMemoryError("no room")
        return tiny.plain(session.model, x)

    call = Call(session.model, tiny.CPU, torch.float32, (1, 16, 2, 8))
    assert torch.equal(session.run.call(call, invoke), tiny.plain(session.model, x))
    report = session.finish()
    assert report.check.unchecked == "not enough memory to run both ways"
    assert report.engaged() == ["a"]


def test_an_exception_in_the_comparison_leaves_nothing_behind():
    class Raises(Fault):
        def _spoiled(self, output):
            raise KeyboardInterrupt

    session = Session(Raises("a"))
    with pytest.raises(KeyboardInterrupt):
        session.call(session.input())
    assert active_patches() == 0
    session.finish()


def test_another_packs_block_is_compared_as_it_is():
    session = Session(Fault("a"))
    block = session.model.blocks[1]
    original = type(block).forward
    block.forward = lambda *args, **kwargs: original(block, *args, **kwargs) * 3
    x = session.input()
    assert torch.equal(session.call(x), tiny.plain(session.model, x))
    assert session.finish().engaged() == ["a"]


def test_what_off_gives_as_well_is_nobodys_fault():
    session = Session(Fault("a"))
    session.model.blocks[1].norm.weight.data.fill_(float("nan"))
    x = session.input()
    assert session.call(x).isnan().all()
    session.run.mark_step(1, 2)  # does not ask for a second try
    assert not session.run.ended_broken()
    report = session.finish()
    assert report.engaged() == ["a"]
    assert report.check.restarts == 0


@pytest.mark.parametrize("kind", ["NaN later", "NaN once"])
def test_a_later_step_that_is_not_finite_starts_the_run_again(kind):
    session = Session(Fault("a"), Fault("b", kind, 0))
    x = session.input()
    expected = tiny.plain(session.model, x)

    def steps():
        session.run.can_begin_again = True
        outputs = []
        for step in range(LATER + 2):
            outputs.append(session.call(x))
            session.run.mark_step(step + 1, LATER + 2)
        return outputs

    with pytest.raises(NotFiniteError):
        steps()
    session.run.start_again()
    assert all(torch.equal(output, expected) for output in steps())
    report = session.finish()
    assert report.check.restarts == 1
    assert report.check.calls > LATER
    assert len(report.timing.steps_s) == LATER + 2
    gone = [] if kind == "NaN once" else ["b"]
    assert report.engaged() == [name for name in "ab" if name not in gone]


def test_where_nothing_can_be_compared_the_second_try_is_off():
    session = Session(Fault("a"), Fault("b", "NaN", 0))
    session.host = HostFacts(participant="another node")
    x = session.input()
    assert session.call(x).isnan().all()
    assert session.run.ended_broken()
    session.run.start_again()
    assert torch.equal(session.call(x), tiny.plain(session.model, x))
    assert not session.run.ended_broken()
    report = session.finish()
    assert report.engaged() == []
    assert "another node" in report.feature("a").reason
