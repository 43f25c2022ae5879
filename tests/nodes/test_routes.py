"""What ties a run to a graph, and what the page is sent."""

import asyncio
import copy
import json
from types import SimpleNamespace

import pytest
from speed_tier.nodes import routes
from speed_tier.nodes.routes import EVENT, graph_signature, opener_for, register, upstream
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
        "node_id": "2",
        "sampler_node_id": "4",
        "tier": "max",
    }
    assert json.loads(json.dumps(message)) == message


def test_step_events_are_thinned_out_but_the_last_one_comes(host, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(routes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    host.execute("p1", "4", graph())
    publish = opener_for("2", host)(Report("", "max", ""))
    for step in range(1, 11):
        now[0] += 0.1
        publish("step", {"step": step, "total": 10})
        publish("phase", {"phase": "compiling"})
    steps = [data["step"] for _, data, _ in host.sent if data["kind"] == "step"]
    assert steps == [1, 4, 7, 10]
    assert sum(data["kind"] == "phase" for _, data, _ in host.sent) == 10


def test_the_route_lists_the_runs_newest_first(run):
    web = pytest.importorskip("aiohttp.web")
    server = SimpleNamespace(routes=web.RouteTableDef())
    register(server)
    (route,) = server.routes
    assert (route.method, route.path) == ("GET", "/speed_tier/report")
    first, second = run(graph(1), "p1"), run(graph(2), "p2")
    answer = json.loads(asyncio.run(route.handler(None)).text)
    assert answer["schema"] == 1
    assert [r["run_id"] for r in answer["runs"]] == [second.run_id, first.run_id]
