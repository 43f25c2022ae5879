"""The main path: plan, install in order, wrap every call, undo in reverse, report."""

import json
import threading

import pytest
import torch
from speed_tier.speed import REPORTS, Switch, TieredModel, TierRequest, resolve_tier
from speed_tier.speed.flags import FLAGS, TF32
from speed_tier.speed.optimizations import dynamo
from speed_tier.speed.patching import Patch, active_patches
from speed_tier.speed.report import CompiledKind, CompileFacts, GraphFacts, State
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.process import full_state
from speed_tier.tests.speed.runs import Fake, Session
from torch import nn


@pytest.fixture(autouse=True)
def nothing_leaks(monkeypatch):
    monkeypatch.delenv("SPEED_TIER_DISABLE", raising=False)
    before = full_state()
    yield
    assert full_state() == before
    assert active_patches() == 0
    assert FLAGS.held == ()


def test_installed_in_table_order_and_undone_in_reverse():
    log = []
    session = Session(*(Fake(name, log) for name in "abc"))
    session.call(lambda options: log.append("call"))
    session.call(lambda options: log.append("call"))
    report = session.finish()
    once = ["enter a", "enter b", "enter c", "call", "leave c", "leave b", "leave a"]
    assert log == [
        *("check a", "install a", "check b", "install b", "check c", "install c"),
        *once,
        *once,
        *("remove c", "remove b", "remove a"),
    ]
    assert report.engaged() == ["a", "b", "c"]
    assert report.evaluations == 2


def test_nothing_is_touched_before_the_first_call():
    """The host merges LoRA while it loads; a merge under TF32 would stay in the weights."""
    log, before = [], full_state()
    session = Session(Fake("a", log, handle={"flags": {"matmul.tf32": TF32}}))
    session.run.mark_loaded()
    assert (log, full_state()) == ([], before)
    session.call()
    assert full_state() != before
    session.finish()


def test_patches_flags_and_options_of_every_handle_are_in_place_during_a_call():
    log, seen = [], {}
    model = tiny.qwen_image(layers=1)
    handle = {"patches": [Patch(model.img_in, "forward", lambda x: x)], "options": {"a": 1}}
    session = Session(
        Fake("a", log, handle=handle),
        Fake("b", log, handle={"flags": {"matmul.tf32": TF32}, "options": {"b": 2}}),
        model=model,
    )
    before = full_state()

    def invoke(options):
        seen.update(options=dict(options), patched="forward" in vars(model.img_in))
        seen["flags"] = full_state()

    session.call(invoke)
    assert seen["options"] == {"a": 1, "b": 2}
    assert seen["patched"]
    assert seen["flags"]["matmul.allow_tf32"] is True is not before["matmul.allow_tf32"]
    assert "forward" not in vars(model.img_in), "between calls the module is its own"
    assert full_state()["matmul.allow_tf32"] is True, "between steps flags stay"
    report = session.finish()
    assert full_state() == before
    assert report.flags["before"] == report.flags["after"] != report.flags["during"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"reason": "needs a card; found cpu"}, "needs a card; found cpu"),
        (
            {"check_raises": KeyError("x")},
            "could not engage: KeyError: 'x'",
        ),
        (
            {"install_raises": torch.OutOfMemoryError("no room")},
            "could not engage: OutOfMemoryError: no room",
        ),
        (
            {"check_raises": RuntimeError("at 12:4:\n    x = tl.arange(0, 96)\n" + 300 * "^")},
            "could not engage: RuntimeError: at 12:4: x = tl.arange(0, 96) " + 170 * "^",
        ),
        (
            {"handle": {"flags": {"cudnn.benchmark": True, "no such flag": 1}}},
            "could not engage: KeyError: 'no such flag'",
        ),
    ],
    ids=["declined", "check raises", "install raises", "a long error", "flags refused"],
)
def test_one_that_cannot_engage_is_skipped_with_its_reason_and_leaves_nothing(fault, reason):
    log, before = [], full_state()
    session = Session(Fake("a", log), Fake("bad", log, **fault), Fake("c", log))
    during = session.call(lambda options: full_state())
    assert during == before
    if "handle" in fault:
        assert "remove bad" in log
    report = session.finish()
    assert report.engaged() == ["a", "c"]
    assert (report.feature("bad").state, report.feature("bad").reason) == (State.SKIPPED, reason)
    assert "enter bad" not in log
    assert report.outcome == "done"


@pytest.mark.parametrize("base", [Exception, BaseException])
def test_an_interrupt_while_installing_comes_out_and_what_was_in_is_undone(base):
    interrupt = type("InterruptProcessingException", (base,), {})()
    log, before = [], full_state()
    first = Fake("a", log, handle={"flags": {"matmul.tf32": TF32}})
    session = Session(first, Fake("b", log, install_raises=interrupt))
    with pytest.raises(type(interrupt)):
        session.call(lambda options: log.append("call"))
    assert "call" not in log
    session.finish("interrupted")
    assert "remove a" in log
    assert full_state() == before


def test_switched_off_by_the_environment_and_by_hand(monkeypatch):
    monkeypatch.setenv("SPEED_TIER_DISABLE", "b")
    log = []
    session = Session(*(Fake(name, log) for name in "abc"), switches={"c": Switch.OFF})
    session.call()
    report = session.finish()
    assert report.engaged() == ["a"]
    assert report.feature("b").reason == "switched off by SPEED_TIER_DISABLE"
    assert report.feature("c").reason == "switched off in Speed Tier (Advanced)"
    assert not {"check b", "check c"} & set(log)


def test_what_the_tier_does_not_plan_is_not_in_the_report():
    log = []
    session = Session(Fake("tf32", log), Fake("attention_backend", log), tier="default")
    session.call()
    assert [f.name for f in session.finish().features] == ["attention_backend"]


def test_off_opens_nothing():
    log, before = [], full_state()
    session = Session(Fake("tf32", log), Fake("regional_compile", log), tier="off")
    assert session.run.request.is_off
    seen = session.call(lambda options: (dict(options), full_state(), active_patches()))
    assert seen == ({}, before, 0)
    report = session.finish()
    assert log == []
    assert (report.features, report.tier, report.outcome) == ([], "off", "done")


def test_off_with_one_feature_switched_on_is_not_off():
    log = []
    session = Session(Fake("a", log), Fake("tf32", log), tier="off", switches={"a": Switch.ON})
    assert not session.run.request.is_off
    session.call()
    assert session.finish().engaged() == ["a"]


def test_off_inside_a_tiered_run_sees_the_process_as_it_was_found():
    log, before = [], full_state()
    outer = Session(Fake("a", log, handle={"flags": {"matmul.tf32": TF32}}))
    outer.call()
    changed = full_state()
    assert changed != before
    inner = Session(tier="off")
    assert inner.call(lambda options: full_state()) == before
    inner.finish()
    assert full_state() == changed
    outer.finish()


@pytest.mark.parametrize("first", [0, 1])
def test_two_tiered_runs_may_end_in_either_order(first):
    before = full_state()
    sessions = [Session(Fake("a", [], handle={"flags": {"matmul.tf32": TF32}})) for _ in "ab"]
    for session in sessions:
        session.call()
    sessions[first].finish()
    assert full_state()["matmul.allow_tf32"] is True
    sessions[1 - first].finish()
    assert full_state() == before


def test_close_is_idempotent_and_files_one_report():
    log = []
    session = Session(Fake("a", log))
    session.call()
    report = session.finish()
    filed = len([r for r in REPORTS.runs() if r.run_id == report.run_id])
    assert session.finish("failed", "again") is report
    assert (report.outcome, report.error) == ("done", "")
    assert log.count("remove a") == 1
    assert filed == len([r for r in REPORTS.runs() if r.run_id == report.run_id]) == 1


def test_a_run_that_never_called_the_denoiser_closes():
    report = Session(Fake("a", [])).finish("interrupted")
    assert (report.outcome, report.evaluations, report.features) == ("interrupted", 0, [])


def test_a_handle_that_cannot_be_taken_out_keeps_neither_flags_nor_the_others(caplog):
    log, before = [], full_state()
    session = Session(
        Fake("a", log, handle={"flags": {"matmul.tf32": TF32}}),
        Fake("b", log, handle={"fails_on_remove": True}),
    )
    session.call()
    session.finish()
    assert log[-2:] == ["remove b", "remove a"]
    assert full_state() == before
    assert "b could not be taken out" in caplog.text


@pytest.mark.parametrize(
    "error", [ValueError("in a block"), torch.OutOfMemoryError("pretended"), KeyboardInterrupt()]
)
def test_a_call_that_fails_comes_out_unchanged_and_restores_all(error):
    log, before = [], full_state()
    model = tiny.qwen_image(layers=1)
    patches = [Patch(model.img_in, "forward", lambda x: x)]
    session = Session(
        Fake("a", log, handle={"flags": {"matmul.tf32": TF32}, "patches": patches}), model=model
    )

    def invoke(options):
        raise error

    with pytest.raises(type(error)) as raised:
        session.call(invoke)
    assert raised.value is error
    assert log[-1] == "leave a"
    assert "forward" not in vars(model.img_in)
    report = session.finish("failed", str(error))
    assert (report.outcome, report.error) == ("failed", str(error))
    assert report.engaged() == ["a"]
    assert full_state() == before


@pytest.mark.parametrize(
    ("model", "name"),
    [(nn.Linear(1, 1), "Linear"), (nn.Module(), "Module")],
    ids=["linear", "empty"],
)
def test_another_family_passes_through_with_the_sentence(model, name):
    log, before = [], full_state()
    sentence = f"not a Z-Image or Qwen-Image transformer; found {name}"
    session = Session(Fake("a", log), Fake("b", log), model=model)
    assert session.call(lambda options: (dict(options), full_state())) == ({}, before)
    report = session.finish()
    assert report.model.note == sentence
    assert {(f.name, f.state, f.reason) for f in report.features} == {
        ("a", State.SKIPPED, sentence),
        ("b", State.SKIPPED, sentence),
    }
    assert log == []
    assert sentence in report.to_text()


def test_each_denoiser_of_a_run_engages_once():
    """Some hosts run the clone of a model on another module in the same run."""
    log = []
    session = Session(Fake("a", log))
    other = tiny.z_image(layers=1)
    for model in (None, other, None, other):
        session.call(model=model)
    assert log.count("install a") == 2
    session.finish()
    assert log.count("remove a") == 2


def test_calls_from_two_threads_engage_once():
    log, start = [], threading.Barrier(4)
    session = Session(Fake("a", log))

    def work():
        start.wait()
        session.call()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session.finish()
    assert (log.count("install a"), log.count("enter a")) == (1, 4)


def test_the_report_of_a_run():
    log = []
    kinds = [CompiledKind("layers", 30, 2, 1.5)]
    facts = CompileFacts(kinds, graphs=2, recompiles=1, graph_breaks={"why": 1}, seconds=1.5)
    session = Session(
        Fake("a", log, handle={"note": "figures"}),
        Fake("b", log, handle={"fell_back": "compile failed: x", "facts": facts}),
    )
    session.run.mark_loaded()
    for step in (1, 2, 3):
        session.call()
        session.run.mark_step(step, 3)
    report = session.finish()
    assert (report.feature("a").state, report.feature("a").note) == (State.ENGAGED, "figures")
    assert report.feature("a").fidelity == "rounding"
    assert report.feature("b").state is State.FELL_BACK
    assert report.feature("b").reason == "compile failed: x"
    assert report.engaged() == ["a"]
    assert (report.tier_asked, report.tier, report.tier_reason) == (
        "max",
        "max",
        "as asked, with a, b switched on",
    )
    assert (report.steps, report.evaluations, len(report.timing.steps_s)) == (3, 3, 3)
    assert report.timing.load_s is not None
    assert report.timing.first_step_s == report.timing.steps_s[0]
    assert report.timing.steady_step_s is not None
    assert report.timing.total_s >= sum(report.timing.steps_s)
    assert report.compile == facts
    model = report.model
    assert (model.family, model.stack, model.dtype) == ("qwen_image", "diffusers", "float32")
    found = (model.class_name, model.device, model.note)
    assert found == ("QwenImageTransformer2DModel", "cpu", "")
    assert set(report.flags) == {"before", "during", "after"}
    assert report.versions["torch"] == torch.__version__
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_a_feature_that_had_nothing_to_gain_was_not_engaged():
    graphs = GraphFacts(captured=1, replayed=3)
    session = Session(
        Fake("a", [], handle={"not_used": "does not pay"}), Fake("b", [], handle={"graphs": graphs})
    )
    session.call()
    report = session.finish()
    assert report.engaged() == ["b"]
    found = report.feature("a")
    assert (found.state, found.reason) == (State.SKIPPED, "does not pay")
    assert report.graphs == graphs
    assert report.notices == []


def test_random_inputs_of_a_measurement_do_not_move_the_samplers_random_numbers():
    class Measuring(Fake):
        def check(self, context):
            torch.randn(100)

    before = torch.get_rng_state()
    session = Session(Measuring("a", []))
    session.call()
    session.finish()
    assert torch.equal(torch.get_rng_state(), before)


def test_an_optimization_is_told_what_is_in_place_before_it():
    contexts = []
    session = Session(Fake("a", []), Fake("b", [], reason="no"), Fake("c", [], contexts=contexts))
    session.call()
    session.finish()
    assert [context.engaged for context in contexts] == [("a",)]


def test_what_the_page_is_told():
    session = Session(Fake("a", []), Fake("b", [], reason="no card"))
    session.run.mark_loaded()
    session.call()
    session.run._compiling("layers", 1, 2)
    session.run.mark_step(1, 4)
    report = session.finish()
    assert [kind for kind, _ in session.events] == ["engaged", "phase", "step", "report"]
    told = [data for _, data in session.events]
    assert (told[0]["phase"], told[0]["model"]["family"]) == ("sampling", "qwen_image")
    assert told[0]["shape"]["pixels"] == [64, 64]
    assert [(f["name"], f["state"], f["reason"]) for f in told[0]["features"]] == [
        ("a", "engaged", ""),
        ("b", "skipped", "no card"),
    ]
    assert told[1] == {"phase": "compiling", "block": "layers", "index": 1, "count": 2}
    step, timing = told[2], told[2]["timing"]
    assert (step["step"], step["total"], step["phase"]) == (1, 4, "sampling")
    assert (timing["steps_s"], timing["step_marks"]) == (report.timing.steps_s, ["warm-up"])
    assert 0 < timing["total_s"] < report.timing.total_s
    assert told[3] == {**report.to_dict(), "text": report.to_text()}
    assert json.loads(json.dumps(session.events)) == json.loads(json.dumps(session.events))


def test_steps_that_compiled_are_marked():
    facts = CompileFacts(kinds=[CompiledKind("layers", 2)])
    session = Session(Fake("a", [], handle={"facts": facts}))
    for compiles in (1, 1, 2, 2):
        session.call()
        facts.kinds[0].compiles = compiles
        session.run.mark_step(1, 4)
    assert session.finish().timing.step_marks == ["compile", "", "compile", ""]


def timed_run(steps_s, tier, monkeypatch, shape=(1, 4, 8, 8), model=None):
    session = Session(Fake("a", []), tier=tier, model=model)
    session.run.report.latent_shape = list(shape)
    for _ in steps_s:
        session.call()
        session.run.clock.mark_step()
    monkeypatch.setattr(session.run.clock, "steps_s", lambda only_passed=False: steps_s)
    return session.finish()


def test_the_speed_against_the_last_off_run(monkeypatch):
    shape = (7, 4, 8, 8)  # of no other test
    model = tiny.z_image(layers=1)
    assert timed_run([1.0, 1.0, 1.0], "max", monkeypatch, shape, model).speedup_against_off is None
    timed_run([9.0, 3.0, 3.0], "off", monkeypatch, shape, model)
    timed_run([9.0, 4.0, 4.0], "off", monkeypatch, (8, 4, 8, 8), model)
    timed_run([9.0, 5.0], "off", monkeypatch, shape, model)  # too few steps for a baseline
    faster = timed_run([9.0, 2.0, 2.0], "max", monkeypatch, shape, model)
    assert faster.speedup_against_off == 1.5
    assert "1.50x the speed of the last off run" in faster.to_text()
    assert timed_run([9.0], "max", monkeypatch, shape, model).speedup_against_off is None
    other = tiny.z_image(layers=1)
    assert timed_run([2.0, 2.0, 2.0], "max", monkeypatch, shape, other).speedup_against_off is None
    assert timed_run([2.0, 2.0, 2.0], "off", monkeypatch, shape, model).speedup_against_off is None


def test_unloading_releases_in_reverse_and_gives_flags_back():
    """The backstop alone: the run is never closed."""
    log, before = [], full_state()
    session = Session(Fake("a", log, handle={"flags": {"matmul.tf32": TF32}}), Fake("b", log))
    session.call()
    assert full_state() != before
    session.tiered.release(session.model)
    assert full_state() == before
    assert log[-2:] == ["release b", "release a"]
    session.tiered.release(None)
    session.tiered.release(session.model)


def test_the_real_table_engages_on_a_tiny_model_with_everything_forced():
    """All real optimizations but the compile, through the main path."""
    from speed_tier.speed.optimizations import OPTIMIZATIONS

    real = tuple(row for row in OPTIMIZATIONS if row.name != "regional_compile")
    model, inputs = tiny.qwen_image(), tiny.qwen_image_inputs()
    expected = tiny.output(model, inputs)
    session = Session(*real, model=model)
    got = session.call(lambda options: tiny.output(model, inputs))
    report = session.finish()
    assert report.engaged() == ["tf32", "fused_qkv"]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    session.tiered.release(model)
    assert torch.equal(tiny.output(model, inputs), expected)


@pytest.mark.parametrize(
    ("tier", "device", "disabled", "expected"),
    [
        ("max", "cuda", "", 1),
        ("max", "cuda", "regional_compile", 0),
        ("max", "cpu", "", 0),
        ("default", "cuda", "", 0),
        ("off", "cuda", "", 0),
    ],
)
def test_inductor_is_loaded_beside_the_weights_where_it_will_be_used(
    tier, device, disabled, expected, monkeypatch
):
    started = []
    monkeypatch.setattr(dynamo, "load_beside", lambda: started.append(1))
    monkeypatch.setenv("SPEED_TIER_DISABLE", disabled)
    tiered = TieredModel(TierRequest(resolve_tier(tier, is_gguf=False)))
    run = tiered.begin(tiered.new_report(), torch.device(device))
    run.close("done")
    assert len(started) == expected
