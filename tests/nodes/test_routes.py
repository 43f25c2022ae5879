"""What ties a run to a graph, and what the page is sent."""

import asyncio
import copy
import json
import sys
import time
import types
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from speed_tier.nodes import routes
from speed_tier.nodes.routes import (
    EVENT,
    graph_signature,
    opener_for,
    register,
    snapshot,
    upstream,
)
from speed_tier.speed import TieredModel, TierRequest, resolve_tier
from speed_tier.speed.report import Report
from speed_tier.tests.nodes.conftest import graph


def test_equal_graphs_have_one_signature():
    first, second = graph(), copy.deepcopy(graph())
    second = dict(reversed(second.items()))
    for node in second.values():
        node["inputs"] = dict(reversed(node["inputs"].items()))
        node["_meta"] = {"title": "renamed"}
    assert graph_signature(first, "4") == graph_signature(second, "4")


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g["4"]["inputs"].update(seed=2),
        lambda g: g["2"]["inputs"].update(tier="off"),
        lambda g: g["1"]["inputs"].update(unet_name="q.safetensors"),
        lambda g: g["3"]["inputs"].update(text="a dog"),
        lambda g: g["4"]["inputs"].update(model=["1", 0]),
        lambda g: g["4"].update(class_type="KSamplerAdvanced"),
        lambda g: g["4"]["inputs"].update(positive=["3", 1]),
    ],
    ids=["seed", "tier", "model", "prompt", "link", "class", "slot"],
)
def test_what_makes_another_result_makes_another_signature(change):
    changed = graph()
    change(changed)
    assert graph_signature(changed, "4") != graph_signature(graph(), "4")


def test_what_comes_after_the_node_does_not_matter():
    changed = graph()
    changed["5"]["class_type"] = "VAEDecodeTiled"
    changed["9"] = {"class_type": "PreviewImage", "inputs": {"images": ["5", 0]}}
    assert graph_signature(changed, "4") == graph_signature(graph(), "4")
    assert graph_signature(changed, "5") != graph_signature(graph(), "5")


def test_a_node_made_by_expansion_counts_as_the_one_it_came_from():
    assert graph_signature(graph(), "4.0.0.7") == graph_signature(graph(), "4")
    inner = {**graph(), "8:4": graph()["4"]}
    assert graph_signature(inner, "8:4") != graph_signature(inner, "8")


def test_loops_missing_nodes_and_odd_values_do_no_harm():
    looped = graph()
    looped["1"]["inputs"] = {"again": ["4", 0], "gone": ["99", 0], "object": {1, 2}, "list": [1, 2]}
    assert len(graph_signature(looped, "4")) == 16
    assert graph_signature({}, "4") == graph_signature({}, "9")


def test_upstream_takes_links_only():
    node = {"inputs": {"a": ["1", 0], "b": 3, "c": ["x", "y", "z"], "d": [1, 0], "e": ["2", 1]}}
    assert upstream(node) == ["1", "2"]
    assert upstream({}) == []


def test_a_run_learns_its_ids_when_it_starts(host, run):
    report = run(graph(), "p7", sampler_id="4", workflow_id="w9")
    assert (report.node_id, report.sampler_node_id, report.prompt_id) == ("2", "4", "p7")
    assert report.workflow_id == "w9"
    assert report.graph_signature == graph_signature(graph(), "4")


def test_the_opener_of_a_cached_node_reads_the_prompt_that_runs_now(host):
    opener = opener_for("2", host)  # the node ran in prompt 1 and is cached in prompt 2
    seen = []
    for prompt_id, seed in (("p1", 1), ("p2", 2)):
        host.execute(prompt_id, "4", graph(seed))
        report = Report("", "off", "")
        opener(report)
        seen.append((report.prompt_id, report.graph_signature))
    assert seen == [
        (prompt_id, graph_signature(graph(seed), "4")) for prompt_id, seed in (("p1", 1), ("p2", 2))
    ]


@pytest.mark.parametrize("extra", [None, {}], ids=["no workflow saved", "empty"])
def test_a_prompt_without_a_page(host, extra):
    host.execute("p1", "4", graph(), client_id=None)
    host.prompt_queue.currently_running[1][3]["extra_pnginfo"] = extra
    report = Report("", "off", "")
    publish = opener_for("2", host)(report)
    publish("report", {})
    assert report.workflow_id == ""
    assert host.sent == []


def test_outside_a_prompt_nothing_is_known_and_nothing_sent(host):
    report = Report("", "off", "")
    publish = opener_for("2", host)(report)
    publish("report", {})
    assert (report.node_id, report.prompt_id, report.graph_signature) == ("2", "", "")
    assert host.sent == []
    opener_for("2", None)(report)("report", {})


def test_events_go_to_the_page_that_queued_the_prompt(host):
    host.execute("p1", "4", graph(), client_id="page 1")
    report = Report("max", "max", "as asked")
    opener_for("2", host)(report)("phase", {"phase": "loading"})
    ((event, message, client),) = host.sent
    assert (event, client) == (EVENT, "page 1") == ("speed_tier.update", "page 1")
    assert message == {
        "kind": "phase",
        "phase": "loading",
        "run_id": report.run_id,
        "started_unix_s": report.started_unix_s,
        "prompt_id": "p1",
        "workflow_id": "wf",
        "client_id": "page 1",
        "node_id": "2",
        "sampler_node_id": "4",
        "operation": "sampling",
        "tier": "max",
    }
    assert json.loads(json.dumps(message)) == message


def quiet(monkeypatch, server=None):
    """No event was sent for a while, no run is known; returns the clock, a list of one number."""
    now = [100.0]
    monkeypatch.setattr(
        routes, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0])
    )
    monkeypatch.setattr(routes, "_sent_s", deque([float("-inf")] * 4, maxlen=4))
    monkeypatch.setattr(routes, "_live", {})
    return now


@pytest.mark.parametrize("step_s", [0.001, 0.03, 0.1, 0.3, 2.0])
def test_at_most_five_events_a_second(host, monkeypatch, step_s):
    now = quiet(monkeypatch)
    host.execute("p1", "4", graph())
    times = []
    monkeypatch.setattr(host, "send_sync", lambda *_: times.append(now[0]))
    publish = opener_for("2", host)(Report("", "max", ""))
    made = []
    publish("phase", {"phase": "loading"})
    publish("engaged", {"features": []})
    for step in range(1, 101):
        now[0] += step_s
        publish("step", lambda step=step: made.append(step) or {"step": step, "total": 100})
    publish("report", {})
    assert all(sum(0 <= t - start < 1.0 for t in times) <= 5 for start in times)
    assert len(times) == len(made) + 3  # what is not sent is not made
    assert len(made) >= min(100, int(step_s * 100 * 3))


def test_a_step_costs_the_server_under_one_percent(host, monkeypatch):
    """Of 30 ms, the encoding of what is sent included. Measured: 0.02 ms on a busy machine."""
    now = quiet(monkeypatch)
    host.execute("p1", "4", graph())
    monkeypatch.setattr(host, "send_sync", lambda _, message, __: sent.append(json.dumps(message)))
    report, sent, spent_s = Report("max", "max", "as asked"), [], 0.0
    tiered = TieredModel(TierRequest(resolve_tier("max", is_gguf=False)))
    run = tiered.begin(report, torch.device("cpu"), opener_for("2", host)(report))
    for step in range(1, 301):
        now[0] += 0.03
        began = time.thread_time()
        run.mark_step(step, 300)
        spent_s += time.thread_time() - began
    run.restore_flags()
    assert 30 <= len(sent) <= 45
    assert spent_s / 300 < 0.01 * 0.03


def test_the_route_has_the_runs_that_ended_newest_first(run, host):
    web = pytest.importorskip("aiohttp.web")
    server = SimpleNamespace(routes=web.RouteTableDef())
    register(server)
    route, _ = server.routes
    assert (route.method, route.path) == ("GET", "/speed_tier/report")
    first, second = run(graph(1), "p1"), run(graph(2), "p2")
    answer = json.loads(asyncio.run(route.handler(None)).text)
    assert answer["schema"] == 1
    assert [r["run_id"] for r in answer["runs"]] == [second.run_id, first.run_id]
    assert answer["texts"] == {r.run_id: r.to_text() for r in (first, second)}
    assert answer["live"] == []


def test_the_snapshot_has_what_was_said_of_a_run_that_goes_on(host, book, monkeypatch):
    quiet(monkeypatch)
    host.execute("p1", "4", graph(), client_id="page 1")
    report = Report("max", "max", "as asked")
    publish = opener_for("2", host)(report)
    publish("phase", {"phase": "loading", "steps": 8})
    publish("engaged", {"phase": "sampling", "features": ["x"]})
    (live,) = snapshot(host)["live"]
    assert (live["run_id"], live["client_id"]) == (report.run_id, "page 1")
    assert (live["phase"], live["steps"], live["features"]) == ("sampling", 8, ["x"])
    book.add(report)
    publish("report", {})
    assert snapshot(host)["live"] == []
    assert snapshot(host)["clients"] == {report.run_id: "page 1"}


def test_a_run_whose_prompt_is_gone_is_not_live(host, monkeypatch):
    quiet(monkeypatch)
    host.execute("p1", "4", graph())
    opener_for("2", host)(Report("", "max", ""))("phase", {"phase": "loading"})
    host.execute("p2", "4", graph())
    assert snapshot(host)["live"] == []
    assert routes._live == {}


def test_a_prompt_that_the_host_served_from_its_cache_is_told_with_the_run(run, host):
    first = run(graph(1), "p1")
    host.end()
    second = run(graph(2), "p2")
    host.end()
    for prompt_id, seed, cached in (("p3", 1, "1234"), ("p4", 2, "1234"), ("p5", 2, "12")):
        host.execute(prompt_id, "6", graph(seed), client_id="page 2", workflow_id="w2")
        host.end(cached, started_ms=7000)
    told = snapshot(host)["served"]
    assert [(entry["prompt_id"], entry["run_id"]) for entry in told] == [
        ("p3", first.run_id), ("p4", second.run_id)
    ]  # fmt: skip
    assert told[0] == {
        "run_id": first.run_id, "prompt_id": "p3", "workflow_id": "w2", "client_id": "page 2",
        "sampler": "4", "started_unix_s": 7.0, "ended": True,
    }  # fmt: skip
    # Of one that goes on only the page knows what was cached; one with a run of its own has none.
    host.execute("p6", "6", graph(2))
    (running,) = [entry for entry in snapshot(host)["served"] if not entry["ended"]]
    assert (running["prompt_id"], running["run_id"]) == ("p6", second.run_id)
    run(graph(2), "p6")
    assert all(entry["ended"] for entry in snapshot(host)["served"])


def test_a_run_that_failed_is_served_to_nobody(run, host):
    run(graph(1), "p1").outcome = "failed"
    host.end()
    host.execute("p2", "6", graph(1))
    host.end("1234")
    assert snapshot(host)["served"] == []


def test_the_route_that_deletes_compiled_code_takes_nothing_from_the_request(
    host, tmp_path, monkeypatch
):
    web = pytest.importorskip("aiohttp.web")
    folders = types.ModuleType("folder_paths")
    folders.get_user_directory = lambda: str(tmp_path)
    monkeypatch.setitem(sys.modules, "folder_paths", folders)
    state = tmp_path / "__speed_tier"
    (state / "compiled" / "key" / "ab").mkdir(parents=True)
    (state / "compiled" / "key" / "about.json").write_text("{}")
    (state / "compiled" / "key" / "ab" / "code.so").write_bytes(b"x" * 1000)
    (state / "measured.json").write_text("{}")
    server = SimpleNamespace(routes=web.RouteTableDef())
    register(server)
    _, route = server.routes
    assert (route.method, route.path) == ("POST", "/speed_tier/compiled/clear")
    for freed in (1002, 0):
        answer = json.loads(asyncio.run(route.handler(None)).text)
        assert answer == {"freed_bytes": freed, "kept_bytes": 0}
    assert not (state / "compiled" / "key").exists()
    assert (state / "measured.json").exists()
