"""Speed Tier Report in the real page: its text is the host's report, in both node renderers."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from speed_tier.speed.tiers import TIER_FEATURES, Tier
from speed_tier.tests.browser.figures import cells
from speed_tier.tests.browser.page import ComfyPage
from speed_tier.tests.host.graphs import tiny_run

EMPTY = "no report yet: run the workflow"
_seeds = itertools.count(100)  # a graph the host has not cached yet


def open_run(page: ComfyPage, tier: str = "default", arch: str = "zimage", steps: int = 2) -> None:
    page.open(tiny_run(arch, tier, report=True, seed=next(_seeds), steps=steps))
    page.wait_report(EMPTY)


def report_output(outputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Text and data of the one report node among a prompt's outputs."""
    (output,) = [output for output in outputs.values() if "json" in output]
    return output["text"][0], json.loads(output["json"][0])


def test_the_node_shows_the_report_of_each_tier(page: ComfyPage) -> None:
    open_run(page, "off")
    for tier in ("off", "default", "max"):
        page.widget("SpeedTier", "tier", tier)
        text, data = report_output(page.run())
        page.wait_report(text)
        run = page.newest_run()
        assert data == run
        assert run["tier"]["resolved"] == tier
        assert not run["from_cache"]
        assert text.startswith(f"Speed Tier: {tier} (asked: {tier}, as asked), done\n")
        assert f"measured {run['measured_at']}" in text
        assert f"first step {run['timing']['first_step_s']:.3f} s" in text
        for feature in run["features"]:
            assert f"{feature['name']}: {feature['state']}" in text
        assert {feature["name"] for feature in run["features"]} == TIER_FEATURES[Tier(tier)]


def test_a_run_from_the_cache_says_so(page: ComfyPage) -> None:
    open_run(page)
    fresh, data = report_output(page.run())
    page.wait_report(fresh)
    for _ in range(2):  # the second repeat is served whole, the report node included
        text, again = report_output(page.run())
        page.wait_report(text)
        assert again["from_cache"]
        assert again["run_id"] == data["run_id"] == page.newest_run()["run_id"]
        assert f"served from the host's cache; measured {data['measured_at']}" in text
    assert "served from" not in fresh


def test_a_model_of_another_family_is_named(page: ComfyPage) -> None:
    open_run(page, "max", arch="other")
    text, _ = report_output(page.run())
    page.wait_report(text)
    assert "not a Z-Image or Qwen-Image transformer; found Flux" in text


def test_the_text_is_in_neither_file_nor_prompt(page: ComfyPage) -> None:
    open_run(page, "default", arch="qwen")
    before = page.saved()
    text, _ = report_output(page.run())
    page.wait_report(text)
    saved = page.saved()
    for workflow in (before, saved):
        (node,) = [n for n in workflow["nodes"] if n["type"] == "SpeedTierReport"]
        assert not node.get("widgets_values")
        (tier,) = [n for n in workflow["nodes"] if n["type"] == "SpeedTier"]
        assert tier["widgets_values"] == ["default"]
    assert "served from" not in json.dumps(saved)
    assert text.splitlines()[0] not in json.dumps(saved)
    inputs = [n["inputs"] for n in page.prompt().values() if n["class_type"] == "SpeedTierReport"]
    assert [list(found) for found in inputs] == [["value"]]


def test_a_saved_workflow_opens_with_its_values(page: ComfyPage) -> None:
    open_run(page, "default")
    report_output(page.run())
    saved, prompt = page.saved(), page.prompt()
    saved["id"] = "11111111-0000-4000-8000-000000000001"
    page.load(saved)
    assert page.prompt() == prompt
    page.wait_report(EMPTY)  # it is another workflow, though the ids of its nodes are the same


def test_undo_keeps_the_text(page: ComfyPage) -> None:
    open_run(page)
    text, _ = report_output(page.run())
    page.wait_report(text)
    page.js("window.nodeBefore = find('SpeedTierReport')")
    page.widget("SpeedTier", "tier", "max")
    page.js(
        """app.extensionManager.workflow.activeWorkflow.changeTracker.checkState();
        await app.extensionManager.command.execute("Comfy.Undo");"""
    )
    page.wait("return find('SpeedTier')?.widgets[0].value === 'default'")
    assert page.js("return find('SpeedTierReport') !== window.nodeBefore")  # all nodes are new
    page.wait_report(text)


def test_a_run_belongs_to_the_workflow_it_was_queued_from(page: ComfyPage) -> None:
    open_run(page, steps=15)
    done = set(page.server.get("/history"))
    page.js("await app.queuePrompt(0, 1)")
    open_run(page, arch="qwen")  # the same node ids, on screen when the first one ends
    page.server.wait_idle()
    (prompt_id,) = set(page.server.get("/history")) - done
    text, _ = report_output(page.server.wait(prompt_id).outputs)
    page.page.wait_for_timeout(300)
    page.wait_report(EMPTY)
    page.js("await app.extensionManager.command.execute('Workspace.PreviousOpenedWorkflow')")
    page.wait_report(text)


def test_snapshot_and_events_in_any_order(page: ComfyPage) -> None:
    """What the page missed comes with the snapshot, what is still to come with the events."""
    open_run(page, "off", arch="qwen", steps=3)
    report_output(page.run())
    old = page.newest_run()
    message = {"run_id": "live", "kind": "step", "node_id": old["node_id"], "step": 2, "total": 5}
    seen = page.js(
        """const { runs } = await load("lib/run_store.js");
        const common = {client_id: app.api.clientId, workflow_id: String(app.rootGraph.id),
            prompt_id: "told", started_unix_s: Date.now() / 1000, phase: "sampling", tier: "max"};
        const ended = {...arg, ...common, outcome: "done", timing: {steps_s: []}};
        runs.takeSnapshot({live: [{...common, ...arg}]});
        runs.take({...common, ...arg, step: 3});
        runs.takeSnapshot({live: [{...common, ...arg}]}); // older than the event
        const step = runs.get("live").step;
        runs.takeSnapshot({runs: [ended], texts: {live: "text"}, clients: {live: "page"}});
        runs.take({...common, ...arg, step: 4}); // late news of a run that has ended
        const end = runs.get("live");
        runs.takeSnapshot({}); // the host was started anew: reports stay, open runs go
        runs.take({...common, ...arg, run_id: "open"});
        const open = runs.hasOpenRun("told");
        runs.takeSnapshot({});
        return {step, kind: end.kind, text: end.text, open, kept: Boolean(runs.get("live")),
            after: runs.hasOpenRun("told")};""",
        message,
    )
    assert seen == {
        "step": 3, "kind": "report", "text": "text", "open": True, "kept": True, "after": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    "inside", [["SpeedTierReport"], ["SpeedTier", "KSampler", "SpeedTierReport"]]
)
def test_a_report_inside_a_subgraph(page: ComfyPage, inside: list[str]) -> None:
    open_run(page)
    page.js("app.graph.convertToSubgraph(new Set(arg.map((type) => find(type))))", inside)
    page.page.wait_for_timeout(600)  # opening in the same tick can show a stale element
    page.js(
        """const wrapper = app.rootGraph.nodes.find((node) => node.isSubgraphNode?.());
        app.canvas.openSubgraph(wrapper.subgraph, wrapper);"""
    )
    page.wait_report(EMPTY)
    text, data = report_output(page.run())
    page.wait_report(text)
    assert ":" in data["node_id"] or inside == ["SpeedTierReport"]
    if inside != ["SpeedTierReport"]:
        assert page.wait_overlay("done")["cells"] == cells(data)
    assert data["outcome"] == "done"


def test_events_reach_the_page(page: ComfyPage) -> None:
    open_run(page)
    report_output(page.run())
    run = page.newest_run()
    message = page.js(
        """const base = (await app.api.getExtensions()).find((e) => e.endsWith("speed_report.js"));
        const { runs } = await import(new URL("lib/run_store.js", new URL(base, location.href)));
        return runs.get(arg);""",
        run["run_id"],
    )
    assert message["kind"] == "report"
    assert message["timing"] == run["timing"]


def test_the_report_is_copied(page: ComfyPage) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_run(page, "off", arch="qwen")
    assert page.js("return document.querySelector('.speed-tier-report-copy').hidden")
    text, _ = report_output(page.run())
    page.wait_report(text)
    page.js("document.querySelector('.speed-tier-report-copy').click()")
    page.wait("return document.querySelector('.speed-tier-report-copy').title === 'Copied'")
    assert page.page.evaluate("() => navigator.clipboard.readText()") == text


def test_the_box_is_readable(page: ComfyPage) -> None:
    open_run(page, "default")
    page.wait_report(report_output(page.run())[0])
    box = page.page.locator(".speed-tier-report-text").locator("visible=true")
    assert box.get_attribute("role") == "region"
    assert box.get_attribute("aria-label") == "Speed Tier report"
    seen = page.js(
        """const text = document.querySelector(".speed-tier-report-text");
        const style = getComputedStyle(text);
        text.focus();
        getSelection().selectAllChildren(text);
        return {font: style.fontFamily, select: style.userSelect, moves: style.animationName,
            height: text.clientHeight, all: text.scrollHeight,
            focused: document.activeElement === text, selected: getSelection().toString()};"""
    )
    assert "mono" in seen["font"].lower()
    assert seen["select"] == "text"
    assert seen["moves"] == "none"
    assert seen["height"] >= 150
    assert seen["focused"]
    assert seen["selected"].startswith("Speed Tier: default")
