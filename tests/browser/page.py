"""ComfyUI's own page in headless Chromium: settings, loading, queueing, reading nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright
from speed_tier.tests.browser.workflow import to_workflow
from speed_tier.tests.conftest import chromium_path
from speed_tier.tests.host.server import HostServer

ARGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
TIMEOUT_MS = 60_000
# Without these a fresh user gets a template browser and update notes over the canvas.
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.InstalledVersion": "1.0.0",
    "Comfy.Release.Status": "skipped",
    "Comfy.Locale": "en",
    "Comfy.Workflow.WarnBlueprintOverwrite": False,
}
READY = """() => {
    const manager = window.app?.extensionManager;
    return window.app?.graph && window.comfyAPI?.api?.api?.clientId
        && manager && !manager.spinner && manager.workflow?.activeWorkflow;
}"""
# What the page would say if our part of it misbehaved; the bare host logs much of its own.
# The frontend also asks an outside registry about every pack by name, which is blocked.
NOT_OURS = "api.comfy.org"
OURS = ("speed_tier", "speedtier", "speed-tier", "Unknown message", "Unhandled message")

# What a person could see of every overlay now, and what it tells.
OVERLAYS = """[...document.querySelectorAll(".speed-tier-overlay")]
    .filter((e) => e.checkVisibility())
    .map((e) => ({
        state: e.dataset.state,
        tier: e.querySelector(".speed-tier-name").textContent,
        text: e.querySelector(".speed-tier-state").textContent,
        height: e.querySelector(".speed-tier-face").offsetHeight,
        spoken: e.querySelector("[role=status]").textContent,
        cells: Object.fromEntries([...e.querySelectorAll("[data-cell]")]
            .map((c) => [c.dataset.cell, c.lastChild.textContent])),
    }))"""
MODULE = """const load = async (name) => {
    const base = (await app.api.getExtensions()).find((e) => e.endsWith("/speed_tier.js"));
    return import(new URL(name, new URL(base, location.href)));
};"""

# Node objects of every graph, subgraphs included, by class.
FIND = """const find = (type, graph = app.rootGraph ?? app.graph) => {
    for (const node of graph.nodes) {
        if (node.comfyClass === type) return node;
        const inner = node.subgraph && find(type, node.subgraph);
        if (inner) return inner;
    }
    return null;
};"""


class ComfyPage:
    """One open page of one host.

    Args:
        nodes2: Vue nodes ("Nodes 2.0") instead of canvas nodes.
    """

    def __init__(self, browser: Browser, server: HostServer, nodes2: bool) -> None:
        self.server = server
        self.object_info = server.get("/object_info")
        self.console: list[str] = []
        self.context = browser.new_context(viewport={"width": 1500, "height": 900})
        for name, value in {**SETTINGS, "Comfy.VueNodes.Enabled": nodes2}.items():
            server.post(f"/settings/{name}", value)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.console.append(f"pageerror: {error}"))
        self.page.goto(server.url)
        self.wait_ready()

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("warning", "error"):
            place = (message.location or {}).get("url", "")
            self.console.append(f"{message.type}: {message.text} [{place}]")

    def complaints(self) -> list[str]:
        """Warnings and errors so far that name our files or our events."""
        return [
            text
            for text in self.console
            if NOT_OURS not in text and any(o.lower() in text.lower() for o in OURS)
        ]

    def wait_ready(self) -> None:
        self.page.wait_for_function(READY)

    def reload(self) -> None:
        self.page.reload()
        self.wait_ready()

    def js(self, code: str, arg: Any = None) -> Any:
        """Runs the body of an async function of `arg`; `find(type)` gives a node, `load(name)` a
        module of ours."""
        return self.page.evaluate(f"async (arg) => {{ {FIND} {MODULE} {code} }}", arg)

    def wait(self, code: str, arg: Any = None, timeout_ms: int = TIMEOUT_MS) -> None:
        """Waits until the body of a function of `arg` returns something true."""
        self.page.wait_for_function(
            f"(arg) => {{ {FIND} {code} }}", arg=arg, timeout=timeout_ms, polling=100
        )

    # -- workflows ------------------------------------------------------------------------------
    def open(self, prompt: dict[str, Any]) -> None:
        """Opens an API-format graph as a workflow of its own, in a new tab."""
        self.load(to_workflow(prompt, self.object_info))

    def load(self, workflow: dict[str, Any]) -> None:
        """Opens a saved workflow in a tab of its own."""
        self.js("await app.loadGraphData(arg)", workflow)

    def saved(self) -> dict[str, Any]:
        """The open workflow as it would be saved."""
        return self.js("return (await app.graphToPrompt()).workflow")

    def prompt(self) -> dict[str, Any]:
        """The open workflow as it would be queued."""
        return self.js("return (await app.graphToPrompt()).output")

    def widget(self, node_type: str, name: str, value: Any) -> None:
        self.js(
            """const widget = find(arg.type).widgets.find((w) => w.name === arg.name);
            widget.value = arg.value;
            widget.callback?.(arg.value);""",
            {"type": node_type, "name": name, "value": value},
        )

    def run(self) -> dict[str, Any]:
        """Queues the open workflow from the page; returns the outputs in the host's history."""
        done = set(self.server.get("/history"))
        self.js("await app.queuePrompt(0, 1)")
        self.server.wait_idle()
        (new,) = [i for i in self.server.get("/history") if i not in done]
        result = self.server.wait(new, 30)
        assert result.ok, result.error
        return result.outputs

    def newest_run(self) -> dict[str, Any]:
        return self.server.get("/speed_tier/report")["runs"][0]

    def watch(self) -> None:
        """From now on, write down every text of the one overlay on screen, and its height."""
        self.js(
            """const box = [...document.querySelectorAll(".speed-tier-overlay")]
                .find((e) => e.checkVisibility());
            window.seen = []; window.heights = new Set(); window.phases = [];
            app.api.addEventListener("speed_tier.update", ({detail}) => {
                const phase = detail.kind === "report" ? "report" : detail.phase;
                if (window.phases.at(-1) !== phase) window.phases.push(phase);
            });
            const node = find("SpeedTier") ?? find("SpeedTierAdvanced");
            window.watcher?.disconnect();
            window.watcher = new MutationObserver(() => {
                const text = box.querySelector(".speed-tier-state").textContent;
                if (window.seen.at(-1) !== text) window.seen.push(text);
                window.heights.add(`${box.firstChild.offsetHeight} ${node.size[1]}`);
            });
            window.watcher.observe(box, {subtree: true, childList: true, characterData: true,
                attributes: true});"""
        )

    def queue(self) -> str:
        """Queues the open workflow from the page and does not wait; returns the prompt's id."""
        done = set(self.server.get("/history"))
        self.js("await app.queuePrompt(0, 1)")
        for _ in range(100):
            queue = self.server.get("/queue")
            known = {item[1] for items in queue.values() for item in items}
            if new := (known | set(self.server.get("/history"))) - done:
                return new.pop()
            self.page.wait_for_timeout(50)
        raise AssertionError(f"nothing was queued: {self.console[-3:]}")

    # -- the overlay ----------------------------------------------------------------------------
    def overlays(self) -> list[dict[str, Any]]:
        return self.page.evaluate(f"() => {OVERLAYS}")

    def wait_overlay(self, text: str, timeout_ms: int = 30_000) -> dict[str, Any]:
        """Waits until exactly one overlay is on screen and its state reads `text`."""
        try:
            self.wait(
                f"const all = {OVERLAYS}; return all.length === 1 && all[0].text.match(arg)",
                f"^(?:{text})$",
                timeout_ms,
            )
        except Exception as error:
            raise AssertionError(f"wanted {text!r}, on screen: {self.overlays()}") from error
        return self.overlays()[0]

    def tell(self, **message: Any) -> None:
        """As if the server had sent this about the workflow on screen."""
        self.js(
            """app.api.dispatchEvent(new CustomEvent("speed_tier.update", {detail: {
                client_id: app.api.clientId, workflow_id: String(app.rootGraph.id),
                started_unix_s: Date.now() / 1000, tier: "max", prompt_id: "told", ...arg}}))""",
            message,
        )

    # -- the report node ------------------------------------------------------------------------
    def report_texts(self) -> list[str]:
        """Text of every report box that a person could see now."""
        return self.js(
            """return [...document.querySelectorAll(".speed-tier-report-text")]
                .filter((e) => e.checkVisibility()).map((e) => e.textContent);"""
        )

    def wait_report(self, text: str) -> None:
        """Waits until exactly one report is on screen and shows `text`."""
        try:
            self.wait(
                """const seen = [...document.querySelectorAll(".speed-tier-report-text")]
                    .filter((e) => e.checkVisibility());
                return seen.length === 1 && seen[0].textContent === arg;""",
                text,
                timeout_ms=20_000,
            )
        except Exception as error:
            raise AssertionError(f"wanted {text!r}, on screen: {self.report_texts()}") from error

    def close(self) -> None:
        self.context.close()


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium_path(), headless=True, args=list(ARGS)
        )
        try:
            yield browser
        finally:
            browser.close()
