"""The overlay while sizes are prepared in the first step the first step."""

from __future__ import annotations

import itertools

from speed_tier.nodes.speed_tier import FEATURE_TOOLTIPS
from speed_tier.tests.browser.page import ComfyPage
from speed_tier.tests.host.graphs import Graph

_seeds = itertools.count(7000)  # a graph the host has not cached yet


def test_sizes_that_are_prepared_are_named(page: ComfyPage) -> None:
    graph = Graph()
    # Large enough for a tiny model that every size is on screen for a while.
    choices = {**dict.fromkeys(FEATURE_TOOLTIPS, "auto"), "dequant_cache_gib": 4.0}
    choices |= {"self_check": True, "warm_up_sizes": "1024x1024, 1024x832", "fused_qkv": "on"}
    model = graph.tiny_model("qwen", seed=next(_seeds))
    tiered = graph.speed_tier_advanced(model, "default", "tier", **choices)
    graph.sink(graph.sample(tiered, steps=2, seed=next(_seeds), node_id="sampler"), node_id="sink")
    page.open(graph.prompt)
    page.watch()
    page.queue()
    page.server.wait_idle()
    page.wait_overlay("done")
    assert "preparing" in page.js("return window.phases")
    named = [text for text in page.js("return window.seen") if text.startswith("preparing ")]
    # Draws are 0.4 s apart: a size may be done before it is drawn.
    expected = ["preparing 1024x1024, 1 of 2", "preparing 1024x832, 2 of 2"]
    assert named == [text for text in expected if text in named]
    assert named
    assert any("prepared in the first step" in note for note in page.newest_run()["notes"])
