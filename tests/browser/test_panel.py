"""The panel, the toasts and the texts in the real page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from speed_tier.tests.browser.figures import seconds
from speed_tier.tests.browser.page import ComfyPage
from speed_tier.tests.host.graphs import tiny_run

_seeds = itertools.count(9000)


@pytest.fixture
def ran(page: ComfyPage) -> Iterator[dict[str, Any]]:
    """A run that has ended, on screen, and its report; the panel is closed afterwards."""
    page.open(tiny_run("qwen", "off", seed=next(_seeds), steps=4))
    page.run()
    page.widget("SpeedTier", "tier", "default")
    page.run()
    page.wait_overlay("done")
    yield page.server.get("/speed_tier/report")["runs"][0]
    if page.page.locator(".speed-tier-panel").count():
        toggle(page)


def toggle(page: ComfyPage) -> None:
    page.js("await app.extensionManager.command.execute('SpeedTier.Panel.toggle')")


def open_panel(page: ComfyPage) -> None:
    # A click without a mouse: the menu bar may lie over a node.
    page.js(
        """[...document.querySelectorAll(".speed-tier-face")]
            .find((e) => e.checkVisibility()).click()"""
    )
    page.page.wait_for_selector(".speed-tier-card")


def test_a_click_opens_the_report_as_the_server_has_it(
    page: ComfyPage, ran: dict[str, Any]
) -> None:
    open_panel(page)
    page.wait(
        "return document.querySelector('.speed-tier-card').dataset.run === arg", ran["run_id"]
    )
    seen = page.js(
        """const card = document.querySelector(".speed-tier-card");
        const texts = (selector) => [...card.querySelectorAll(selector)].map((e) => e.textContent);
        return {
            title: card.querySelector("h3").textContent,
            bars: texts("rect title"),
            marks: [...card.querySelectorAll("rect")].map((e) => e.getAttribute("class")),
            spoken: card.querySelector("svg").getAttribute("aria-label"),
            figures: Object.fromEntries([...card.querySelectorAll("[data-figure]")]
                .map((e) => [e.dataset.figure, e.textContent])),
            features: [...card.querySelectorAll("tr[data-state]")]
                .map((e) => [e.title, e.dataset.state, e.cells[3].textContent]),
            versions: texts("details dd"),
        };"""
    )
    timing = ran["timing"]
    assert seen["title"].startswith("default · done · ")
    assert seen["marks"] == [f"speed-tier-step {mark or 'steady'}" for mark in timing["step_marks"]]
    assert seen["marks"][0] == "speed-tier-step warm-up"
    assert [bar.split(": ")[1].split(",")[0] for bar in seen["bars"]] == [
        seconds(step) for step in timing["steps_s"]
    ]
    assert seen["spoken"].startswith("4 steps; first ")
    figures = seen["figures"]
    assert figures["total"] == seconds(timing["total_s"])
    assert figures["load"] == seconds(timing["load_s"])
    assert figures["steady"] == f"{seconds(timing['steady_step_s'])}/it"
    assert figures["size"] == "64x64"
    assert figures["steps"] == "4"
    assert figures["model"] == "qwen_image, float32"
    assert seen["features"] == [
        [f["name"], f["state"], f["reason"] or f["note"]] for f in ran["features"]
    ]
    assert seen["versions"] == [version for version in ran["versions"].values() if version]


def test_copies_are_the_servers_own(page: ComfyPage, ran: dict[str, Any]) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_panel(page)
    text = page.server.get("/speed_tier/report")["texts"][ran["run_id"]]
    for at, expected in enumerate((ran, text)):
        page.wait("return !document.querySelector('.speed-tier-tools button').disabled")
        page.js("document.querySelector('.speed-tier-said').textContent = ''")
        page.page.locator(".speed-tier-tools button").nth(at).click()
        page.wait("return document.querySelector('.speed-tier-said').textContent === 'Copied'")
        copied = page.page.evaluate("() => navigator.clipboard.readText()")
        assert (json.loads(copied) if at == 0 else copied) == expected


def test_the_button_deletes_compiled_code_and_says_how_much(
    page: ComfyPage, ran: dict[str, Any]
) -> None:
    key = page.server.instance / "user" / "__speed_tier" / "compiled" / "a key"
    key.mkdir(parents=True)
    (key / "about.json").write_text("{}")
    (key / "code").write_bytes(b"x" * (5 * 2**20))
    open_panel(page)
    page.page.locator(".speed-tier-tools button").nth(2).click()
    said = "Deleted 5.0 MiB. The next run of max compiles again."
    page.wait("return document.querySelector('.speed-tier-said').textContent === arg", said)
    assert not key.exists()


def test_two_runs_side_by_side_by_keyboard(page: ComfyPage, ran: dict[str, Any]) -> None:
    open_panel(page)
    runs = page.server.get("/speed_tier/report")["runs"]
    page.wait(
        "return document.querySelectorAll('.speed-tier-runs tr[data-run]').length === arg",
        len(runs),
    )
    rows = page.js(
        """return [...document.querySelectorAll(".speed-tier-runs tr[data-run]")].map(
            (e) => [e.dataset.run, e.cells[3].textContent, e.cells[6].textContent])"""
    )
    assert [row[0] for row in rows] == [run["run_id"] for run in runs]
    assert [row[1] for row in rows[:2]] == ["default", "off"]
    assert rows[0][2] == "64x64"
    page.page.focus("#speed-tier-compare-none")
    page.page.keyboard.press("ArrowDown")
    page.page.keyboard.press("ArrowDown")
    page.wait("return document.querySelectorAll('.speed-tier-card').length === 2")
    titles = page.js(
        "return [...document.querySelectorAll('.speed-tier-card h3')].map("
        "(e) => e.textContent.split(' ')[0])"
    )
    assert titles == ["default", "off"]
    assert page.js("return document.activeElement.id").endswith(runs[1]["run_id"])
    page.page.keyboard.press("ArrowUp")
    page.page.keyboard.press("ArrowUp")
    page.wait("return document.querySelectorAll('.speed-tier-card').length === 1")


def test_without_the_frontends_panel_it_floats(page: ComfyPage, ran: dict[str, Any]) -> None:
    before = page.js("return app.extensionManager.setting.get('Comfy.UseNewMenu')")
    page.js("await app.extensionManager.setting.set('Comfy.UseNewMenu', 'Disabled')")
    try:
        toggle(page)
        page.page.wait_for_selector(".speed-tier-floating .speed-tier-card")
        page.page.keyboard.press("Escape")
        page.wait("return !document.querySelector('.speed-tier-floating')")
    finally:
        page.js("await app.extensionManager.setting.set('Comfy.UseNewMenu', arg)", before)
        page.page.wait_for_timeout(300)


def test_a_notice_is_told_once_a_session(page: ComfyPage) -> None:
    page.open(tiny_run("qwen", "max", seed=1))
    page.js(
        """sessionStorage.clear(); window.told = [];
        const {toast} = app.extensionManager; const add = toast.add;
        window.untell = () => { toast.add = add; };
        toast.add = (message) => window.told.push(message);"""
    )
    try:
        reasons = {
            "no_compile": "Triton is not installed; install it",
            "fell_back": "x: y",
            "host_memory": "max runs as default does: z",
        }
        notices = [{"kind": kind, "text": text} for kind, text in reasons.items()]
        timing = {"steps_s": [], "step_marks": []}
        for run_id in ("t1", "t2"):
            page.tell(
                kind="report",
                run_id=run_id,
                node_id="99",
                outcome="done",
                notices=notices,
                timing=timing,
                tier={"resolved": "max"},
            )
        told = page.js("return window.told")
        assert [message["detail"] for message in told] == list(reasons.values())
        assert {message["severity"] for message in told} == {"warn"}
        assert [message["summary"] for message in told] == [
            "max runs without compiling",
            "A Speed Tier feature fell back",
            "ComfyUI manages this model's memory",
        ]
        assert (
            page.js(
                "return Object.keys(sessionStorage).filter("
                "(key) => key.startsWith('speed_tier.told.')).length"
            )
            == 3
        )
    finally:
        page.js("window.untell()")


def test_texts_in_other_languages(page: ComfyPage) -> None:
    page.open(tiny_run("qwen", "max", seed=1))
    page.wait_overlay("not run yet")
    for language, idle in (
        ("zh", "尚未运行"),
        ("ja", "未実行"),
        ("fr", "not run yet"),
        ("en", "not run yet"),
    ):
        page.js(
            """const { loadTexts } = await load("lib/texts.js");
            await loadTexts(app.api, arg);
            const { scheduler } = await load("speed_tier.js");
            scheduler.soon();""",
            language,
        )
        page.wait_overlay(idle)
    served = page.server.get("/i18n")
    assert served["zh"]["nodeDefs"]["SpeedTier"]["display_name"].startswith("速度档位")
    assert served["ja"]["settings"]["SpeedTier_Overlay_show"]["name"]


def test_help_pages_are_served(page: ComfyPage) -> None:
    for node in ("SpeedTier", "SpeedTierAdvanced", "SpeedTierLoader", "SpeedTierReport"):
        found = page.js(
            """const base = (await app.api.getExtensions())
                .find((e) => e.endsWith("/speed_tier.js"));
            const answer = await fetch(new URL(`docs/${arg}.md`, new URL(base, location.href)));
            return [answer.status, await answer.text()];""",
            node,
        )
        assert found[0] == 200
        assert found[1].startswith("# ")
