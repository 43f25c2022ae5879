"""Speed Tier Compare in the real page: its numbers and its timing, in both node renderers."""

from __future__ import annotations

import itertools
import json

import pytest
from speed_tier.tests.browser.page import ComfyPage
from speed_tier.tests.host.graphs import Graph

_seeds = itertools.count(900)  # a graph the host has not cached yet


@pytest.fixture
def opened(page: ComfyPage) -> ComfyPage:
    graph = Graph()
    graph.compare(graph.tiny_model("qwen"), "default", "compare", seed=next(_seeds), repeats=1)
    page.open(graph.prompt)
    page.wait_report("no report yet: run the workflow")
    return page


def test_the_node_shows_its_numbers_and_the_tiers_timing(opened: ComfyPage) -> None:
    (output,) = [output for output in opened.run().values() if "json" in output]
    (text,) = output["text"]
    assert text.startswith("default against off: 3 steps, euler, simple, cfg 1, seed 9")
    opened.wait_report(text)
    overlay = opened.wait_overlay("done")
    newest = opened.server.get("/speed_tier/report")["runs"][0]
    assert newest["run_id"] == json.loads(output["json"][0])["runs"][-1]["run_id"]
    assert overlay["tier"] == "default"
    # The text box and the timing box lie beside each other, not on one another.
    overlap = opened.js(
        """const [a, b] = [".speed-tier-report", ".speed-tier-overlay"].map((name) =>
            document.querySelector(name).getBoundingClientRect());
        return [a.height > 0 && b.height > 0, a.top < b.bottom && b.top < a.bottom];"""
    )
    assert overlap == [True, False]


def test_the_saved_workflow_holds_no_text(opened: ComfyPage) -> None:
    opened.run()
    opened.wait_overlay("done")
    saved = opened.saved()
    assert "against off" not in json.dumps(saved)
    (node,) = [node for node in saved["nodes"] if node["type"] == "SpeedTierCompare"]
    assert node["widgets_values"][-2:] == [1, 10]
