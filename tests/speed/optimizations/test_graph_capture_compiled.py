"""Graphs of models whose blocks are compiled, and the choice between compiled and fused blocks."""

import torch
from speed_tier.speed.optimizations import graph_capture
from speed_tier.speed.optimizations.base import HostFacts
from speed_tier.speed.optimizations.graph_capture import GraphCapture, GraphConfig
from speed_tier.speed.optimizations.regional_compile import CompileConfig, RegionalCompile
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.optimizations.recording import inputs, run

BOTH = ("eager_patches", "regional_compile")
COMPILE = RegionalCompile(CompileConfig(backend="eager"))


def strict_graphs(recorder):
    """As under cudaMallocAsync, where compiled code itself cannot be captured."""
    recorder.strict = True
    return GraphCapture(GraphConfig(recorder=recorder))


def test_compiled_blocks_under_the_hosts_allocator(recorder):
    """They cannot be captured there: their eager code is, and the faster of the two is used."""
    graphs = strict_graphs(recorder)
    facts, _ = run(graphs, tiny.toy(), inputs(9), engaged=("regional_compile",))
    assert recorder.modes == [(False, True)]
    assert (facts.captured, facts.replayed) == (1, 4)
    recorder.graph_ms = 10.0
    facts, _ = run(graphs, tiny.toy(), inputs(9), engaged=("regional_compile",))
    assert facts.kept == 0 and facts.replayed == 1, "the compiled blocks are as fast"


def test_what_is_still_being_compiled_is_not_captured(recorder, graphs, monkeypatch):
    counts = iter(range(99))
    monkeypatch.setattr(graph_capture.dynamo, "graph_count", lambda: next(counts))
    _, handle = run(graphs, tiny.toy(), inputs(4), engaged=("regional_compile",))
    assert handle.not_used.endswith("the compiler is not done with this size")
    assert recorder.captures == 0


def test_compiled_and_fused_blocks_are_compared_once_and_for_the_next_process(tmp_path, recorder):
    """The one that loses is not compiled again; a model or size that was not measured is."""
    graphs, host = strict_graphs(recorder), HostFacts(state_folder=tmp_path)
    both = {"host": host, "engaged": ("eager_patches",)}
    assert COMPILE.check(tiny.context(tiny.toy(), **both)) is None
    run(graphs, tiny.toy(), inputs(9), host=host, engaged=BOTH)
    reason = COMPILE.check(tiny.context(tiny.toy(), **both))
    assert reason == (
        "does not pay: measured on this card 10.0 ms a call with compiled blocks, "
        "5.0 with fused ones in a CUDA graph"
    )
    for other in (
        {"host": host, "engaged": ()},
        {**both, "forced": True},
        {**both, "batch": 2},
        {**both, "image_tokens": 4096},
        {**both, "dtype": torch.bfloat16},
    ):
        assert COMPILE.check(tiny.context(tiny.toy(), **other)) is None
    assert COMPILE.check(tiny.context(tiny.toy(bias=False), **both)) is None

    recorder.graph_ms = 10.4  # compiled blocks are faster now, by 4 %
    run(graphs, tiny.toy(), inputs(9), host=host, engaged=BOTH)
    assert COMPILE.check(tiny.context(tiny.toy(), **both)) is None


def test_compiled_blocks_under_torchs_allocator_are_captured_themselves(recorder, graphs):
    run(graphs, tiny.toy(), inputs(4), engaged=("regional_compile",))
    assert recorder.modes == [(True, False)]


def test_figures_of_another_size_are_not_those_of_the_run(tmp_path, recorder):
    """Their key names the size of the run's first call."""
    graphs, host = strict_graphs(recorder), HostFacts(state_folder=tmp_path)
    both = {"host": host, "engaged": ("eager_patches",)}
    calls = [*inputs(1), *inputs(9, tokens=48)]
    facts, _ = run(graphs, tiny.toy(), calls, host=host, engaged=BOTH)
    assert facts.replayed > 0
    assert COMPILE.check(tiny.context(tiny.toy(), **both)) is None
    run(graphs, tiny.toy(), [*calls, *inputs(9)], host=host, engaged=BOTH)
    assert COMPILE.check(tiny.context(tiny.toy(), **both)).startswith("does not pay: ")
