"""The overlay in the real page: it follows the run and shows the report's own numbers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from speed_tier.tests.browser.figures import DASH, cells
from speed_tier.tests.browser.page import ComfyPage
from speed_tier.tests.host.graphs import Graph, tiny_run, two_branches

IDLE = "not run yet"
_seeds = itertools.count(5000)  # a graph the host has not cached yet


def slow_run(
    tier: str = "default",
    steps: int = 4,
    step_s: float = 0.3,
    arch: str = "qwen",
    raises: int = -1,
    report: bool = False,
) -> dict[str, Any]:
    """A run whose steps take a while, so that a page can follow it."""
    graph = Graph()
    model = graph.add("TestSleep", model=graph.tiny_model(arch), seconds=step_s)
    if raises >= 0:
        how = {"kind": "runtime error", "where": "layer", "step": raises, "block": 0}
        model = graph.add("TestRaise", model=model, **how)
    tiered = graph.speed_tier(model, tier, "tier")
    latent = graph.sample(tiered, steps=steps, seed=next(_seeds), node_id="sampler")
    if report:
        latent = graph.add("SpeedTierReport", "report", value=latent)
    graph.sink(latent, node_id="sink")
    return graph.prompt


def test_from_loading_to_done_in_every_tier(page: ComfyPage) -> None:
    page.server.free(free_memory=True)  # what an earlier test compiled would not be compiled again
    page.open(slow_run("off"))
    assert page.wait_overlay(IDLE)["cells"] == dict.fromkeys(cells_of_nothing(), DASH)
    page.watch()
    for tier in ("off", "default", "max"):
        page.js("window.seen.length = window.phases.length = 0")
        page.widget("SpeedTier", "tier", tier)
        page.queue()
        page.wait_overlay("loading|first step|step .*|compiling .*")
        page.server.wait_idle()
        shown = page.wait_overlay("done")
        run = page.newest_run()
        assert run["tier"]["resolved"] == shown["tier"] == tier
        assert shown["cells"] == cells(run)
        assert shown["spoken"].startswith(f"{tier} done, total ")
        compiled = any(kind["compiles"] for kind in run["compile"]["kinds"])
        assert compiled == (tier == "max")
        assert run["timing"]["step_marks"] == ["compile" if compiled else "warm-up", "", "", ""]
        between = ["compiling", "sampling"] if compiled else []
        assert page.js("return window.phases") == ["loading", "sampling", *between, "report"]
        # Draws are 0.4 s apart: what is shorter than that may never be seen.
        seen = [t for t in page.js("return window.seen") if t not in ("loading", "first step")]
        steps = [text for text in seen if text.startswith("step ")]
        assert len(steps) >= 1
        assert steps == sorted(steps)
        assert all(text.endswith(" of 4") for text in steps)
        compiling = ["compiling 1 of 1"] if compiled and seen[0] not in steps else []
        assert seen == [*compiling, *steps, "done"]
    assert run["speedup_against_off"] is not None
    assert len(page.js("return [...window.heights]")) == 1  # nothing jumped


def cells_of_nothing() -> list[str]:
    return ["last", "steady", "tax", "total", "speedup", "recompiles"]


def test_interrupted_and_failed(page: ComfyPage) -> None:
    page.open(slow_run(steps=40))
    page.queue()
    page.wait_overlay("step .*")
    page.js("await app.api.interrupt()")
    page.server.wait_idle()
    shown = page.wait_overlay("interrupted")
    assert shown["cells"] == cells(page.newest_run())
    page.open(slow_run(raises=1, step_s=0.0))
    page.queue()
    page.server.wait_idle()
    shown = page.wait_overlay("failed")
    assert shown["cells"] == cells(page.newest_run())
    error = page.newest_run()["error"]
    assert page.js(
        """return [...document.querySelectorAll(".speed-tier-face")]
            .some((e) => e.checkVisibility() && e.title === arg)""",
        error,
    )
    page.page.keyboard.press("Escape")  # the host's own error dialog
    page.js("document.querySelectorAll('.p-dialog-close-button').forEach((e) => e.click())")


def test_what_the_host_serves_from_its_cache_is_no_fresh_run(page: ComfyPage) -> None:
    page.open(slow_run(step_s=0.0))
    page.run()
    assert page.wait_overlay("done")["state"] == "done"
    run = page.newest_run()
    for _ in range(2):
        page.run()
        shown = page.wait_overlay("from cache, measured .+")
        assert (shown["state"], shown["tier"]) == ("cached", "default")
        assert shown["cells"] == cells(run)
    assert page.newest_run()["run_id"] == run["run_id"]
    page.widget("KSampler", "seed", next(_seeds))
    page.run()
    assert page.wait_overlay("done")["cells"] == cells(page.newest_run())


def test_a_reload_in_mid_run(page: ComfyPage) -> None:
    """The workflow stays, what the page only thought it knew goes, the run's steps come again."""
    page.open(slow_run(step_s=0.0, report=True))
    (report,) = [output["text"][0] for output in page.run().values() if "json" in output]
    page.wait_report(report)
    page.widget("TestSleep", "seconds", 0.4)
    page.widget("KSampler", "steps", 60)
    page.js(
        "await app.extensionManager.workflow.saveWorkflow"
        "(app.extensionManager.workflow.activeWorkflow)"
    )
    prompt = page.prompt()
    node_id = page.js("return String(find('SpeedTier').id)")
    page.queue()
    page.wait_overlay("step .* of 60")
    page.tell(kind="step", run_id="gone", node_id=node_id, phase="sampling", step=1, total=9)
    page.wait_overlay("step 1 of 9")
    page.reload()
    page.wait("return find('SpeedTier')")
    assert page.prompt() == prompt
    first = page.wait_overlay("step .* of 60")["text"]  # and not the run that the host never had
    page.wait_overlay(f"(?!{first}$)step .* of 60")
    page.wait_report(report)
    page.js("await app.api.interrupt()")
    page.server.wait_idle()
    assert page.wait_overlay("interrupted")["cells"] == cells(page.newest_run())


def test_another_tab_stays_quiet(page: ComfyPage) -> None:
    """The same file, open in a second browser tab, says nothing of this one's run."""
    page.open(slow_run(steps=3))
    page.wait_overlay(IDLE)
    workflow = page.saved()
    other = page.context.new_page()
    try:
        other.goto(page.server.url)
        other.wait_for_function("() => window.app?.extensionManager?.workflow?.activeWorkflow")
        other.evaluate("async (w) => await app.loadGraphData(w)", workflow)
        other.wait_for_selector(".speed-tier-overlay", state="attached")
        page.queue()
        page.server.wait_idle()
        page.wait_overlay("done")
        # The snapshot has everybody's runs.
        other.evaluate("() => app.api.dispatchEvent(new CustomEvent('reconnected'))")
        other.wait_for_timeout(1000)
        states = other.evaluate(
            "() => [...document.querySelectorAll('.speed-tier-overlay')]"
            ".map((e) => e.dataset.state)"
        )
        assert set(states) == {"idle"}
    finally:
        other.close()


def test_another_workflow_stays_quiet(page: ComfyPage) -> None:
    page.open(slow_run(steps=6))
    page.queue()
    page.wait_overlay("step .*")
    page.open(slow_run())  # the same node ids
    page.wait_overlay(IDLE)
    page.server.wait_idle()
    page.page.wait_for_timeout(300)
    assert page.wait_overlay(IDLE)["tier"] == ""
    page.js("await app.extensionManager.command.execute('Workspace.PreviousOpenedWorkflow')")
    assert page.wait_overlay("done")["cells"] == cells(page.newest_run())


def test_two_open_copies_of_one_file(page: ComfyPage) -> None:
    page.open(slow_run(steps=3))
    workflow = page.saved()
    page.load(workflow)
    page.wait_overlay(IDLE)
    if page.js("return String(app.rootGraph.id)") != workflow["id"]:
        pytest.skip("this frontend gives the copy an id of its own")
    page.queue()
    page.server.wait_idle()
    page.wait_overlay("done")
    page.js("await app.extensionManager.command.execute('Workspace.PreviousOpenedWorkflow')")
    page.wait_overlay(IDLE)


def test_two_nodes_show_a_run_each(page: ComfyPage) -> None:
    page.open(two_branches("qwen", ("off", "default"), seed=next(_seeds), steps=3))
    page.run()
    page.wait(
        """return [...document.querySelectorAll('.speed-tier-overlay')]
            .filter((e) => e.checkVisibility() && e.dataset.state === 'done').length === 2"""
    )
    runs = {
        run["tier"]["resolved"]: run for run in page.server.get("/speed_tier/report")["runs"][:2]
    }
    shown = {overlay["tier"]: overlay["cells"] for overlay in page.overlays()}
    assert shown == {tier: cells(run) for tier, run in runs.items()}
    assert set(shown) == {"off", "default"}


def test_inside_a_subgraph_that_is_used_twice(page: ComfyPage) -> None:
    page.open(tiny_run("qwen", "default", seed=next(_seeds), steps=3))
    page.js("app.graph.convertToSubgraph(new Set([find('SpeedTier'), find('KSampler')]))")
    page.page.wait_for_timeout(600)  # opening in the same tick can show a stale element
    page.js(
        """const wrapper = app.rootGraph.nodes.find((node) => node.isSubgraphNode?.());
        const second = LiteGraph.createNode(wrapper.type);
        app.graph.add(second);
        window.ids = [wrapper, second].map((w) => `${w.id}:${find('SpeedTier').id}`);
        app.canvas.openSubgraph(wrapper.subgraph, wrapper);"""
    )
    page.wait_overlay(IDLE)
    page.js("app.rootGraph.remove(app.rootGraph.getNodeById(window.ids[1].split(':')[0]))")
    page.run()
    run = page.newest_run()
    first, second = page.js("return window.ids")
    assert run["node_id"] == first
    assert page.wait_overlay("done")["cells"] == cells(run)
    # The second wrapper's run is of the same node object: the newest of the two is shown.
    page.js(
        """const wrapper = app.rootGraph.nodes.find((node) => node.isSubgraphNode?.());
        const again = LiteGraph.createNode(wrapper.type);
        app.rootGraph.add(again);
        window.ids[1] = `${again.id}:${find('SpeedTier').id}`;"""
    )
    second = page.js("return window.ids[1]")
    page.tell(kind="step", run_id="s2", node_id=second, phase="sampling", step=2, total=7)
    page.wait_overlay("step 2 of 7")
    page.tell(kind="step", run_id="s9", node_id="99:1", phase="sampling", step=5, total=7)
    page.page.wait_for_timeout(400)
    page.wait_overlay("step 2 of 7")


def test_muted_bypassed_collapsed_deleted(page: ComfyPage) -> None:
    page.open(tiny_run("qwen", "default", seed=next(_seeds)))
    node_id = page.js("return String(find('SpeedTier').id)")
    page.tell(kind="step", run_id="m1", node_id=node_id, phase="sampling", step=1, total=4)
    page.wait_overlay("step 1 of 4")
    for mode, word in ((4, "bypassed"), (2, "muted")):
        page.js("find('SpeedTier').mode = arg; app.canvas.setDirty(true, true)", mode)
        page.tell(kind="step", run_id="m1", node_id=node_id, phase="sampling", step=2, total=4)
        page.wait_overlay(word)
    page.js("find('SpeedTier').mode = 0; find('SpeedTier').collapse()")
    page.wait(
        f"return {'!'}[...document.querySelectorAll('.speed-tier-overlay')]"
        ".some((e) => e.checkVisibility())"
    )
    page.tell(kind="step", run_id="m1", node_id=node_id, phase="sampling", step=3, total=4)
    page.js("find('SpeedTier').collapse(); app.canvas.setDirty(true, true)")
    page.wait_overlay("step 3 of 4")
    page.js("app.graph.remove(find('SpeedTier'))")
    page.tell(kind="step", run_id="m1", node_id=node_id, phase="sampling", step=4, total=4)
    page.wait("return !find('SpeedTier')")
    page.page.wait_for_timeout(300)
    assert page.overlays() == []


@pytest.mark.parametrize("node_type", ["SpeedTier", "SpeedTierAdvanced", "SpeedTierLoader"])
def test_every_node_with_a_tier_has_one(page: ComfyPage, node_type: str) -> None:
    page.open(tiny_run("qwen", seed=1))
    page.js("app.graph.add(LiteGraph.createNode(arg))", node_type)
    page.js("app.canvas.setDirty(true, true)")
    node_id = page.js("return String(find(arg).id)", node_type)
    page.tell(kind="phase", run_id=f"n-{node_type}-{node_id}", node_id=node_id, phase="loading")
    assert page.wait_overlay("loading")["tier"] == "max"


def test_nothing_of_it_is_saved_or_queued(page: ComfyPage) -> None:
    page.open(tiny_run("qwen", "max", seed=next(_seeds)))
    before, prompt = page.saved(), page.prompt()
    node_id = page.js("return String(find('SpeedTier').id)")
    page.tell(kind="step", run_id="f1", node_id=node_id, phase="sampling", step=1, total=4)
    page.wait_overlay("step 1 of 4")
    assert page.prompt() == prompt
    saved = page.saved()
    (tier,) = [node for node in saved["nodes"] if node["type"] == "SpeedTier"]
    assert tier["widgets_values"] == ["max"]
    assert [n.get("properties") for n in saved["nodes"]] == [
        n.get("properties") for n in before["nodes"]
    ]
    assert saved["extra"].keys() == before["extra"].keys()
    (inputs,) = [n["inputs"] for n in prompt.values() if n["class_type"] == "SpeedTier"]
    assert set(inputs) == {"model", "tier"}


def test_one_setting_hides_it(page: ComfyPage) -> None:
    page.open(tiny_run("qwen", "max", seed=1))
    page.wait_overlay(IDLE)
    page.js("await app.extensionManager.setting.set('SpeedTier.Overlay.show', false)")
    page.wait(
        "return ![...document.querySelectorAll('.speed-tier-overlay')]"
        ".some((e) => e.checkVisibility())"
    )
    page.js("app.graph.add(LiteGraph.createNode('SpeedTierLoader'))")  # while it is hidden
    page.page.wait_for_timeout(400)
    assert page.overlays() == []
    page.js("app.graph.remove(find('SpeedTierLoader'))")
    page.js("await app.extensionManager.setting.set('SpeedTier.Overlay.show', true)")
    page.wait_overlay(IDLE)


def test_a_narrow_node_shows_fewer_figures(page: ComfyPage) -> None:
    """Rather than cut all of them off; the bar says how far the run is."""
    page.open(tiny_run("qwen", "max", seed=1))
    node_id = page.js("return String(find('SpeedTier').id)")
    timing = {"steps_s": [2.5, 1.25], "steady_step_s": 1.25, "total_s": 123.4}
    page.tell(kind="step", run_id="n1", node_id=node_id, phase="sampling", step=1, total=4,
        timing=timing)  # fmt: skip
    page.wait_overlay("step 1 of 4")
    look = """const box = [...document.querySelectorAll(".speed-tier-overlay")]
            .find((e) => e.checkVisibility());
        const cells = [...box.querySelectorAll("[data-cell]")].filter((e) => e.checkVisibility());
        return {cells: cells.map((e) => e.dataset.cell), cut: cells.filter((e) =>
            e.firstChild.scrollWidth > e.firstChild.clientWidth).length,
            bar: box.querySelector(".speed-tier-bar").style.width};"""
    page.js(
        "const n = find('SpeedTier'); n.setSize([300, n.size[1]]); app.canvas.setDirty(true, true)"
    )
    page.page.wait_for_timeout(400)
    assert page.js(look) == {"cells": cells_of_nothing(), "cut": 0, "bar": "25%"}
    page.js(
        "const n = find('SpeedTier'); n.setSize([150, n.size[1]]); app.canvas.setDirty(true, true)"
    )
    page.page.wait_for_timeout(400)
    narrow = page.js(look)
    assert narrow["cut"] == 0
    if not page.js("return Boolean(LiteGraph.vueNodesMode)"):  # those have a width of their own
        assert narrow["cells"] == ["last", "steady", "total"]


@pytest.mark.parametrize("event", ["reconnected", "execution_success", "execution_interrupted"])
def test_what_the_page_missed_is_asked_for(page: ComfyPage, event: str) -> None:
    """A run that the page thinks open and the server does not know goes: a restart, a lost end."""
    page.open(tiny_run("qwen", "max", seed=1))
    node_id = page.js("return String(find('SpeedTier').id)")
    page.tell(kind="step", run_id=event, node_id=node_id, phase="sampling", step=3, total=4)
    page.wait_overlay("step 3 of 4")
    page.js(
        """const detail = {prompt_id: "told"};
        app.api.dispatchEvent(new CustomEvent(arg, {detail}))""",
        event,
    )
    page.wait_overlay(IDLE)
    page.js(
        """find("SpeedTier").mode = 4;
        app.api.dispatchEvent(new CustomEvent("graphChanged", {detail: {}}))"""
    )
    page.wait_overlay("bypassed")


def test_it_draws_seldom_and_not_while_hidden(page: ComfyPage) -> None:
    page.open(tiny_run("qwen", "max", seed=1))
    node_id = page.js("return String(find('SpeedTier').id)")
    seen = page.js(
        """const { scheduler } = await load("speed_tier.js");
        const send = (step) => app.api.dispatchEvent(new CustomEvent("speed_tier.update", {
            detail: {kind: "step", run_id: "fast", client_id: app.api.clientId, prompt_id: "told",
                workflow_id: String(app.rootGraph.id), node_id: arg, started_unix_s: 4e9,
                tier: "max", phase: "sampling", step, total: 300}}));
        const pause = (ms) => new Promise((done) => setTimeout(done, ms));
        await pause(300);
        const before = {draws: scheduler.draws, ms: scheduler.spent_ms};
        const began = performance.now();
        for (let step = 1; step <= 300; step++) { send(step); if (step % 3 === 0) await pause(5); }
        await pause(300);
        const seconds = (performance.now() - began) / 1000;
        const open = {draws: scheduler.draws - before.draws, ms: scheduler.spent_ms - before.ms};
        Object.defineProperty(document, "hidden", {value: true, configurable: true});
        const hidden = scheduler.draws;
        send(299); await pause(400); send(300); await pause(400);
        const drawn = scheduler.draws - hidden;
        delete document.hidden;
        document.dispatchEvent(new Event("visibilitychange"));
        await pause(300);
        return {seconds, ...open, drawn, after: scheduler.draws - hidden};""",
        node_id,
    )
    assert seen["draws"] <= 2.5 * seen["seconds"] + 2
    assert seen["drawn"] == 0
    assert seen["after"] >= 1
    page.wait_overlay("step 300 of 300")


def test_a_longer_draw_waits_longer(page: ComfyPage) -> None:
    page.open(tiny_run("qwen", "max", seed=1))
    starts = page.js(
        """const { Scheduler } = await load("lib/scheduler.js");
        const starts = [];
        const burn = (ms) => { const began = performance.now(); starts.push(began);
            while (performance.now() - began < ms); };
        const slow = new Scheduler(() => burn(20), 50, 0.05);
        const ends = performance.now() + 1200;
        while (performance.now() < ends) {
            slow.soon();
            await new Promise((done) => setTimeout(done, 10));
        }
        return starts;"""
    )
    assert 2 <= len(starts) <= 4  # a busy machine draws longer still
    assert starts[1] - starts[0] >= 399


def test_it_takes_under_one_percent_of_the_page(page: ComfyPage) -> None:
    """Of a stream of 30 ms steps, at the rate at which the server sends them.

    Measured with eight busy programs on two cores: 4 to 5 ms a second of the 10 that are 1 %.
    """
    page.open(tiny_run("qwen", "max", seed=1))
    node_id = page.js("return String(find('SpeedTier').id)")
    session = page.context.new_cdp_session(page.page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def layout_ms() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        found = {metric["name"]: metric["value"] for metric in metrics}
        return 1000 * (found["LayoutDuration"] + found["RecalcStyleDuration"])

    before = layout_ms()
    seen = page.js(
        """const { scheduler } = await load("speed_tier.js");
        const pause = (ms) => new Promise((done) => setTimeout(done, ms));
        const draws = scheduler.draws, spent = [], began = performance.now();
        for (let step = 8; step <= 160; step += 8) {
            const steps_s = Array(step).fill(0.03), spent_ms = scheduler.spent_ms;
            app.api.dispatchEvent(new CustomEvent("speed_tier.update", {detail: {
                kind: "step", run_id: "cost", client_id: app.api.clientId, prompt_id: "told",
                workflow_id: String(app.rootGraph.id), node_id: arg, started_unix_s: 4e9,
                tier: "max", phase: "sampling", step, total: 160, compile: {recompiles: 0},
                timing: {steps_s, step_marks: steps_s.map(() => ""),
                    steady_step_s: 0.03 + step / 1e6, first_step_tax_s: 0.1,
                    total_s: step * 0.03}}}));
            await pause(250);
            if (scheduler.spent_ms > spent_ms) spent.push(scheduler.spent_ms - spent_ms);
        }
        spent.sort((a, b) => a - b);
        return {draws: scheduler.draws - draws, seconds: (performance.now() - began) / 1000,
            typical_ms: spent[Math.floor(spent.length / 2)]};""",
        node_id,
    )
    cost = seen["draws"] * seen["typical_ms"] + layout_ms() - before
    assert seen["draws"] >= 8
    assert cost / seen["seconds"] < 10, (cost, seen)


def test_how_it_looks_to_everyone(page: ComfyPage) -> None:
    page.open(tiny_run("qwen", "max", seed=1))
    page.wait_overlay(IDLE)
    look = """const face = [...document.querySelectorAll(".speed-tier-face")]
        .find((e) => e.checkVisibility());
        const style = getComputedStyle(face);
        const all = [face, ...face.querySelectorAll("*")].map((e) => getComputedStyle(e));
        return {color: style.color, background: style.backgroundColor, tag: face.tagName,
            name: face.getAttribute("aria-label"), tab: face.tabIndex,
            moves: all.some((s) => s.animationName !== "none"
                || s.transitionDuration.split(",").some((d) => parseFloat(d) > 0))};"""
    dark = page.js(look)
    assert (dark["tag"], dark["tab"], dark["moves"]) == ("BUTTON", 0, False)
    assert "panel" in dark["name"]
    page.js("await app.extensionManager.setting.set('Comfy.ColorPalette', 'light')")
    try:
        page.wait(
            """const face = [...document.querySelectorAll(".speed-tier-face")]
                .find((e) => e.checkVisibility());
            return getComputedStyle(face).backgroundColor !== arg;""",
            dark["background"],
        )
        assert page.js(look)["color"] != dark["color"]
    finally:
        page.js("await app.extensionManager.setting.set('Comfy.ColorPalette', 'dark')")
