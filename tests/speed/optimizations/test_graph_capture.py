"""When a graph is made, used, refused and dropped. The device is a stand-in that replays calls."""

import gc
import os
import weakref

import pytest
import torch
from speed_tier.speed.gguf.adapters import Adapters
from speed_tier.speed.gguf.linear import QuantLinear
from speed_tier.speed.optimizations import call_mode, graph_capture
from speed_tier.speed.optimizations.attention_backend import make_override
from speed_tier.speed.optimizations.base import HostFacts
from speed_tier.speed.optimizations.graph_capture import GraphCapture, GraphConfig
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.optimizations.recording import inputs, run


@pytest.fixture(autouse=True)
def nothing_leaks(process_as_found):
    yield
    assert not call_mode.MODE.eager_blocks and not call_mode.MODE.uninterrupted


@pytest.fixture
def graphs(recorder):
    return GraphCapture(GraphConfig(recorder=recorder, max_graphs=2))


def test_the_third_call_of_a_size_is_a_replay(graphs, recorder):
    facts, handle = run(graphs, tiny.toy(), inputs(6))
    assert (facts.captured, facts.kept, facts.replayed) == (1, 1, 4)
    assert facts.pool_bytes == 1 << 20
    assert recorder.replays == 4
    assert "4 calls replayed" in handle.note and "5.0 ms a call, 10.0 without" in handle.note
    assert handle.not_used == "" and handle.peak_bytes == 7


def test_the_next_run_replays_from_its_first_call(graphs, recorder):
    model = tiny.toy()
    run(graphs, model, inputs(3))
    facts, _ = run(graphs, model, inputs(3))
    assert (facts.captured, facts.replayed) == (0, 3)
    assert recorder.captures == 1


def test_outputs_are_copies(graphs):
    model = tiny.toy()
    with tiny.engaged(graphs, on=model) as engaged:
        outputs = [engaged.call(x) for x in inputs(5)]
    expected = [tiny.plain(model, x) for x in inputs(5)]
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_every_size_has_a_graph_and_the_one_unused_for_longest_goes(graphs, recorder):
    model = tiny.toy()
    sizes = [inputs(3, tokens=n) for n in (4, 8, 12)]
    facts, _ = run(graphs, model, [x for size in sizes for x in size])
    assert (facts.captured, facts.kept) == (3, 2)
    assert recorder.released == 1
    run(graphs, model, sizes[1] + sizes[2])
    assert recorder.captures == 3
    run(graphs, model, sizes[0])
    assert recorder.captures == 4


def test_graphs_stay_as_long_as_there_is_room(recorder):
    graphs = GraphCapture(GraphConfig(recorder=recorder, max_graphs=6))
    facts, _ = run(graphs, tiny.toy(), [x for n in range(1, 7) for x in inputs(3, tokens=n)])
    assert facts.kept == 6 and recorder.released == 0


def test_one_rehearsal_serves_every_size_of_the_same_call(graphs, recorder):
    run(graphs, tiny.toy(), [x for n in (4, 8, 12) for x in inputs(3, tokens=n)])
    assert recorder.rehearsals == 1
    run(graphs, tiny.toy().double(), [x.double() for x in inputs(3)])
    assert recorder.rehearsals == 2


def test_another_constant_is_rehearsed(graphs, recorder):
    """It may run other operations, and one that fails in a capture ends the process."""
    run(graphs, host_model(), host_calls(guidance="index") + host_calls(guidance="timestep zero"))
    assert recorder.captures == recorder.rehearsals == 2


def test_a_busy_card_waits_for_a_second_run(recorder, graphs):
    recorder.issue = 0.2
    model = tiny.toy()
    facts, handle = run(graphs, model, inputs(5))
    assert facts.captured == facts.replayed == 0
    assert "a second run of this size decides" in handle.not_used
    facts, _ = run(graphs, model, inputs(5))
    assert (facts.captured, facts.replayed) == (1, 4)


def test_what_does_not_pay_is_dropped_and_not_tried_again(recorder, graphs):
    recorder.graph_ms = 10.0
    model = tiny.toy()
    facts, _ = run(graphs, model, inputs(6))
    assert (facts.captured, facts.kept, facts.replayed) == (1, 0, 1)
    assert recorder.released == recorder.trims == 1
    facts, handle = run(graphs, model, inputs(4))
    assert recorder.captures == 1
    assert handle.not_used == "does not pay: 10.0 ms with, 10.0 without"


def test_a_wrong_graph_is_never_used(recorder, graphs):
    recorder.wrong_by = 1e-7
    facts, handle = run(graphs, tiny.toy(), inputs(5))
    assert facts.replayed == facts.kept == 0
    assert handle.not_used.endswith("its output is not that of the call it was captured from")
    assert recorder.released == 1


def test_a_graph_that_gives_the_calls_own_nan_is_right(recorder, graphs):
    model = tiny.toy()
    model.blocks[1].norm.weight.data[3] = float("nan")
    with tiny.engaged(graphs, on=model) as engaged:
        assert all(engaged.call(x).isnan().any() for x in inputs(4))
    facts = engaged.handles[0].graph_facts()
    assert (facts.captured, facts.replayed, engaged.handles[0].fell_back) == (1, 2, "")


def test_a_stale_graph_is_found_at_its_first_replay(recorder, graphs):
    recorder.stale = True
    model = tiny.toy()
    facts, handle = run(graphs, model, inputs(6))
    assert (facts.captured, facts.kept, recorder.replays) == (1, 0, 1)
    assert handle.fell_back == "a replay did not give what the call itself gives"
    refusal = graphs.check(tiny.context(model))
    assert refusal == f"dropped for this model: {handle.fell_back}"
    assert graphs.check(tiny.context(tiny.toy())) is None


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: broken\nmore"), torch.OutOfMemoryError()]
)
def test_a_failing_capture_costs_nothing_but_the_graph(recorder, graphs, error):
    recorder.fail = error
    facts, handle = run(graphs, tiny.toy(), inputs(5))
    assert facts.captured == 0
    assert "could not be captured" in handle.not_used and "\n" not in handle.not_used


def test_what_the_rehearsal_finds_is_the_reason(recorder, graphs):
    recorder.problem = "aten.nonzero needs the values of its input"
    _, handle = run(graphs, tiny.toy(), inputs(4))
    assert handle.not_used.endswith("aten.nonzero needs the values of its input")
    assert recorder.captures == 0


class Options(tiny.Toy):
    """Called as the host calls its models."""

    def forward(self, x, control=None, transformer_options=None, guidance=None):
        transformer_options["block_index"] = 3
        y = super().forward(x)
        return y if control is None else y + control


def host_model():
    return Options(*tiny.toy().blocks)


def host_calls(count=4, **more):
    plain = {"cond_or_uncond": [0], "sigmas": torch.ones(1), "wrappers": {}, "patches": {}}
    options = {**plain, **more.pop("options", {})}
    return [
        {"x": x, "transformer_options": {**options, "uuids": [object()]}, **more}
        for x in inputs(count)
    ]


def test_options_that_no_forward_reads_do_not_matter(graphs):
    outer = {"wrappers": {"apply_model": {"other": [print]}, "diffusion_model": {"other": []}}}
    facts, _ = run(graphs, host_model(), host_calls() + host_calls(options=outer))
    assert (facts.captured, facts.replayed) == (1, 6)


def test_our_attention_override_is_part_of_the_signature(graphs):
    ours = {"optimized_attention_override": make_override("cudnn")}
    facts, _ = run(graphs, host_model(), host_calls() + host_calls(options=ours))
    assert (facts.captured, facts.replayed) == (2, 4)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"control": torch.ones(1)}, "a ControlNet is applied"),
        ({"guidance": {}}, "guidance is a dict"),
        ({"options": {"patches": {"double_block": [print]}}}, "option patches is set"),
        ({"options": {"patches_replace": {"dit": {1: print}}}}, "option patches_replace is set"),
        ({"options": {"prefetch_dynamic_vbars": True}}, "option prefetch_dynamic_vbars is set"),
        ({"options": {"rope_options": {"scale_x": 2}}}, "option rope_options is set"),
        ({"options": {"of_tomorrow": 1}}, "option of_tomorrow is set"),
        ({"options": {"optimized_attention_override": max}}, "optimized_attention_override is set"),
        (
            {"options": {"wrappers": {"diffusion_model": {"easycache": [print]}}}},
            "a wrapper runs inside the model (easycache)",
        ),
        ({"guidance": torch.ones(1, device="meta")}, "an argument is on meta"),
    ],
)
def test_what_a_graph_cannot_follow_is_a_plain_call(graphs, recorder, more, reason):
    facts, handle = run(graphs, host_model(), host_calls(**more))
    assert facts.captured == facts.replayed == recorder.captures == 0
    assert reason in handle.not_used
    assert sum(facts.not_replayed.values()) == 4


def test_one_unusual_call_does_not_end_the_graph(graphs):
    calls = host_calls(4)
    unusual = host_calls(1, control=torch.ones(1))
    facts, _ = run(graphs, host_model(), calls + unusual + calls)
    assert (facts.captured, facts.replayed) == (1, 6)


def test_a_changed_constant_or_size_is_another_signature(graphs):
    facts, _ = run(graphs, host_model(), host_calls(guidance=1) + host_calls(guidance=2))
    assert facts.captured == 2


def test_hooks_are_seen_at_the_very_call(graphs):
    model = tiny.toy()
    with tiny.engaged(graphs, on=model) as engaged:
        for x in inputs(4):
            engaged.call(x)
        hook = model.blocks[1].mlp[0].register_forward_hook(lambda m, i, o: o * 2)
        x = tiny.toy_input(seed=9)
        assert torch.equal(engaged.call(x), tiny.plain(model, x))
        hook.remove()
        assert torch.equal(engaged.call(x), tiny.plain(model, x))
    facts = engaged.handles[0].graph_facts()
    assert facts.not_replayed["a part of the model has a forward hook"] == 1
    assert facts.replayed == 3


def test_weights_that_moved_or_were_replaced_drop_every_graph(graphs, recorder):
    model = tiny.toy()
    run(graphs, model, inputs(4))
    for change in ("replaced", "moved"):
        weight = model.blocks[0].mlp[0].weight
        if change == "replaced":
            model.blocks[0].mlp[0].weight = torch.nn.Parameter(weight * 2, requires_grad=False)
        else:
            weight.data = weight.data * 3
        captures = recorder.captures
        run(graphs, model, inputs(4))
        assert recorder.captures == captures + 1
    assert recorder.released == 2


def test_weights_changed_in_place_keep_the_graph(graphs, recorder):
    model = tiny.toy()
    run(graphs, model, inputs(4))
    with torch.no_grad():
        model.blocks[0].mlp[0].weight.mul_(2)
    facts, _ = run(graphs, model, inputs(4))
    assert facts.replayed == 4 and recorder.captures == 1


def test_adapters_come_and_go(graphs, recorder):
    model = tiny.toy()
    layer = QuantLinear(tiny.WIDTH, tiny.WIDTH)
    layer.qtype = 8
    model.packed = layer  # of the model, though its forward does not call it
    run(graphs, model, inputs(4))
    layer.adapters = Adapters()
    facts, _ = run(graphs, model, inputs(4))
    assert facts.captured == 1
    layer.adapters = None
    facts, _ = run(graphs, model, inputs(4))
    assert facts.captured == 1
    layer.adapters = Adapters(rewrite=lambda dense: dense)
    facts, handle = run(graphs, model, inputs(4))
    assert facts.captured == 0 and "an adapter rewrites its weight" in handle.not_used


def test_features_of_the_run_are_part_of_the_signature(graphs):
    model = tiny.toy()
    run(graphs, model, inputs(4))
    facts, _ = run(graphs, model, inputs(4), engaged=("tf32",))
    assert facts.captured == 1
    facts, _ = run(graphs, model, inputs(4), host=HostFacts(attention_in_use="the host's other"))
    assert facts.captured == 1
    allowed = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not allowed
    try:
        facts, _ = run(graphs, model, inputs(4))
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
    assert facts.captured == 1


def test_little_memory(graphs, recorder):
    model = tiny.toy()
    _, handle = run(graphs, model, inputs(4), host=HostFacts(spare_bytes=lambda: 1 << 30))
    assert handle.not_used.endswith("not enough free memory for a graph")
    facts, _ = run(graphs, model, inputs(4), host=HostFacts(spare_bytes=lambda: 1 << 40))
    assert facts.captured == 1, "asked again in the next run"
    other = tiny.toy()
    run(graphs, other, inputs(4), host=HostFacts(spare_bytes=lambda: 1 << 40))
    assert recorder.captures == 2
    facts, _ = run(graphs, other, inputs(1), host=HostFacts(spare_bytes=lambda: 1 << 20))
    assert facts.replayed == 1 and facts.kept == 0, "given back when the run ends"


def test_out_of_memory_in_a_plain_call_drops_the_graphs_and_repeats_it(graphs, recorder):
    model = host_model()
    run(graphs, model, host_calls())
    plain, failures = Options.forward, [torch.OutOfMemoryError("no memory")]

    def forward(self, *args, **kwargs):
        if failures:
            raise failures.pop()
        return plain(self, *args, **kwargs)

    Options.forward = forward
    try:
        call = host_calls(1, control=torch.ones(1))[0]
        with tiny.engaged(graphs, on=model) as engaged:
            got = engaged.call(**call)
        failures.append(torch.OutOfMemoryError("no memory"))
        with tiny.engaged(graphs, on=model) as engaged, pytest.raises(torch.OutOfMemoryError):
            engaged.call(**call)
    finally:
        Options.forward = plain
    assert torch.equal(got, tiny.plain(model, **call))
    assert recorder.released == 1


def test_out_of_memory_in_a_replay_drops_the_graphs_and_runs_the_call(graphs, recorder):
    model, failures = tiny.toy(), [torch.OutOfMemoryError("no memory")]
    run(graphs, model, inputs(4))
    [entry] = graph_capture._kept[model].entries.values()
    entry.captured.replay = lambda tensors: (_ for _ in ()).throw(failures.pop())
    facts, _ = run(graphs, model, inputs(1))
    assert facts.kept == 0 and recorder.released == 1 and not failures


def test_an_exception_of_the_model_is_the_models(graphs):
    model = host_model()
    run(graphs, model, host_calls())
    with (
        tiny.engaged(graphs, on=model) as engaged,
        pytest.raises(RuntimeError, match=r"shape|size"),
    ):
        engaged.call(x=torch.randn(1, 2, 3), transformer_options={})
    facts, _ = run(graphs, model, host_calls())
    assert facts.replayed == 4


def test_a_cancel_comes_before_a_replay(graphs, recorder):
    """A replay passes none of the layers in which the host asks."""

    class CancelledError(Exception):
        pass

    asked = []

    def ask():
        asked.append(1)
        if len(asked) == 3:
            raise CancelledError

    model = tiny.toy()
    with (
        tiny.engaged(graphs, on=model, host=HostFacts(check_interrupt=ask)) as engaged,
        pytest.raises(CancelledError),
    ):
        for x in inputs(9):
            engaged.call(x=x)
    assert recorder.replays == 2
    facts, _ = run(graphs, model, inputs(2))
    assert facts.replayed == 2


def test_gradients_are_not_captured(graphs):
    model = tiny.toy()
    with tiny.engaged(graphs, on=model) as engaged:
        for x in inputs(4):
            assert torch.equal(_with_gradients(engaged, x), tiny.plain(model, x))
    assert engaged.handles[0].not_used == "gradients are on"


def _with_gradients(engaged, x):
    [patch] = engaged.handles[0].patches
    with torch.enable_grad():
        return patch.replacement(x).detach()


def test_release_gives_everything_back(graphs, recorder):
    model = tiny.toy()
    run(graphs, model, inputs(4))
    graphs.release(model)
    assert recorder.released == recorder.trims == 1
    run(graphs, model, inputs(4))
    assert recorder.captures == 2


def test_a_dropped_model_takes_its_graphs_along(graphs):
    model = tiny.toy()
    run(graphs, model, inputs(4))
    # The recording of this test refers to the run's forward; a real graph refers to no model.
    store = graph_capture._kept[model]
    store.drop()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("strict", [True, False])
def test_memory_that_only_the_driver_counts(recorder, strict):
    recorder.strict = strict
    _, handle = run(GraphCapture(GraphConfig(recorder=recorder)), tiny.toy(), inputs(4))
    assert handle.uncounted_bytes == (1 << 20 if strict else 0)


def test_a_signature_that_ended_a_process_is_left_alone(tmp_path, recorder):
    recorder.strict = True
    graphs = GraphCapture(GraphConfig(recorder=recorder))
    host = HostFacts(state_folder=tmp_path)
    model = tiny.toy()
    recorder.fail = KeyboardInterrupt()  # what ends the process leaves the note in place
    note = tmp_path / f"graph_being_captured.{os.getpid()}.json"
    noted = []
    recorder.capture = lambda *a, **k: (noted.append(note.read_text()), [][1])
    with pytest.raises(IndexError):
        run(graphs, model, inputs(3), host=host)
    note.write_text(noted[0])
    del recorder.capture
    recorder.fail = None
    _, handle = run(graphs, tiny.toy(), inputs(4), host=host)
    assert handle.not_used.endswith("an earlier process ended while it captured this")
    facts, _ = run(graphs, tiny.toy(), inputs(4, tokens=12), host=host)
    assert facts.captured == 1


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (HostFacts(dynamic_vram=True), "dynamic VRAM moves weights"),
        (HostFacts(compiled_by="a torch.compile node"), "a torch.compile node compiles this model"),
    ],
)
def test_what_the_host_does_itself(graphs, facts, reason):
    assert reason in graphs.check(tiny.context(tiny.toy(), host=facts))


def test_a_model_that_is_not_all_there(graphs):
    model = tiny.toy()
    model.blocks[0].mlp[0].to("meta")
    assert graphs.check(tiny.context(model)) == "2 weights are not on cpu"
    model = tiny.toy()
    model.blocks[1].forward = lambda *a: None
    assert "another pack has replaced the forward of ToyBlock" in graphs.check(tiny.context(model))
    model.forward = lambda *a: None
    assert graphs.check(tiny.context(model)) == "another pack has replaced the model's forward"


def test_the_real_recorder_wants_an_nvidia_card():
    assert GraphCapture().check(tiny.context(tiny.toy())) == (
        "CUDA graphs need an NVIDIA card; found cpu"
    )
