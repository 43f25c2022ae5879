"""Tiers in the real host: max leaves nothing behind, off is the host's own path bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from speed_tier.tests.host.graphs import Graph, tiny_run
from speed_tier.tests.host.server import HostServer, PromptFailedError
from speed_tier.tests.host.tier_cases import (
    ALLOW_TF32,
    ARGS,
    ENGAGED,
    FORCED,
    digest,
    engaged,
    max_graph,
    report_of,
)


@pytest.fixture(scope="module")
def bare() -> Iterator[HostServer]:
    with HostServer(with_pack=False, extra_args=ARGS, tag="tiers-bare") as running:
        yield running


@pytest.fixture(scope="module")
def pack() -> Iterator[HostServer]:
    with HostServer(extra_args=ARGS, tag="tiers-pack") as running:
        yield running


@pytest.fixture(scope="module", params=["zimage", "qwen"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(bare: HostServer, arch: str) -> str:
    return digest(bare.run(tiny_run(arch)))


@pytest.fixture(scope="module")
def start_flags(pack: HostServer) -> dict[str, Any]:
    return pack.flags()


@pytest.fixture(scope="module")
def compiled(pack: HostServer, arch: str, start_flags: dict[str, Any]) -> dict[str, Any]:
    """One max run with Inductor, the flags in the middle of it, its report and its events."""
    graph = Graph()
    tiered = graph.speed_tier_advanced(graph.tiny_model(arch), "max", "tier", **FORCED)
    watched = graph.add("TestFlagsDuring", model=tiered, name="during")
    latent = graph.sample(watched, node_id="sampler")
    graph.sink(graph.add("SpeedTierReport", "report", value=latent), node_id="sink")
    pack.post("/speed_tier_test/records/clear")
    mark = pack.events.mark()
    result = pack.run(graph.prompt)
    return {
        "report": report_of(result),
        "during": pack.post("/speed_tier_test/records/clear")["during"],
        "events": pack.events.since(mark, "speed_tier.update"),
        "digest": digest(result),
    }


def assert_nothing_left(
    pack: HostServer, arch: str, plain: str, start_flags: dict[str, Any]
) -> None:
    assert pack.flags() == start_flags
    assert digest(pack.run(tiny_run(arch, "off"))) == plain
    assert pack.flags() == start_flags
    assert pack.collect()["leftovers"]["tiny"]["shadowed"] == []


def test_max_engages_by_name_and_writes_flags(
    compiled: dict[str, Any], arch: str, start_flags: dict[str, Any], plain: str
) -> None:
    assert engaged(compiled["report"]) == ENGAGED[arch]
    assert compiled["report"]["compile"]["graphs"] > 0
    assert compiled["report"]["compile"]["graph_breaks"] == {}
    assert [flags[ALLOW_TF32] for flags in compiled["during"]] == [True, True]
    assert start_flags[ALLOW_TF32] is False
    assert compiled["digest"] != plain


def test_off_after_max_is_the_bare_host(
    pack: HostServer, compiled: dict[str, Any], arch: str, plain: str, start_flags: dict[str, Any]
) -> None:
    assert_nothing_left(pack, arch, plain, start_flags)
    assert digest(pack.run(tiny_run(arch))) == plain


def test_off_after_an_interrupt_in_max(
    pack: HostServer, compiled: dict[str, Any], arch: str, plain: str, start_flags: dict[str, Any]
) -> None:
    graph, model = max_graph(arch)
    model = graph.add("TestSleep", model=model, seconds=0.3)
    graph.sink(graph.sample(model, steps=40, node_id="sampler"), node_id="sink")
    mark = pack.events.mark()
    prompt_id = pack.queue(graph.prompt)
    pack.events.wait_for(
        lambda e: e.type == "progress" and e.data["value"] >= 2, mark=mark, timeout=120
    )
    pack.interrupt()
    assert pack.wait(prompt_id, timeout=30).interrupted
    newest = pack.get("/speed_tier/report")["runs"][0]
    assert newest["outcome"] == "interrupted"
    assert engaged(newest) == ENGAGED[arch]
    assert_nothing_left(pack, arch, plain, start_flags)


@pytest.mark.parametrize("kind", ["runtime error", "out of memory"])
def test_off_after_an_error_inside_a_block_of_max(
    pack: HostServer,
    compiled: dict[str, Any],
    arch: str,
    plain: str,
    start_flags: dict[str, Any],
    kind: str,
) -> None:
    graph, model = max_graph(arch)
    model = graph.add("TestRaise", model=model, kind=kind, where="layer", step=1, block=1)
    graph.sink(graph.sample(model, steps=3, node_id="sampler"), node_id="sink")
    result = pack.run(graph.prompt, check=False)
    assert result.error is not None
    assert "inside a block" in result.error["exception_message"]
    assert pack.get("/speed_tier/report")["runs"][0]["outcome"] == "failed"
    assert_nothing_left(pack, arch, plain, start_flags)


def test_off_after_free(
    pack: HostServer, compiled: dict[str, Any], arch: str, plain: str, start_flags: dict[str, Any]
) -> None:
    graph, model = max_graph(arch)
    graph.sink(graph.sample(model, seed=4, node_id="sampler"), node_id="sink")
    pack.run(graph.prompt)
    pack.free(unload_models=True)
    assert pack.state()["loaded"] == []
    assert_nothing_left(pack, arch, plain, start_flags)


def test_events_tell_the_run(compiled: dict[str, Any]) -> None:
    kinds = [event.data["kind"] for event in compiled["events"]]
    assert {"phase", "engaged", "step", "report"} <= set(kinds)
    assert kinds[-1] == "report"
    assert {event.data["node_id"] for event in compiled["events"]} == {"tier"}


def test_later_tier_replaces_the_earlier_one(
    pack: HostServer, arch: str, plain: str, start_flags: dict[str, Any]
) -> None:
    for later in ("off", "default"):
        graph, model = max_graph(arch)
        latent = graph.sample(graph.speed_tier(model, later), node_id="sampler")
        graph.sink(graph.add("SpeedTierReport", "report", value=latent), node_id="sink")
        result = pack.run(graph.prompt)
        assert report_of(result)["tier"]["resolved"] == later
        assert engaged(report_of(result)) == set()
        assert digest(result) == plain
    assert pack.flags() == start_flags


def test_unchanged_requeue_is_labelled_from_cache(pack: HostServer, arch: str) -> None:
    first = report_of(pack.run(tiny_run(arch, "default", report=True, seed=31)))
    again = pack.run(tiny_run(arch, "default", report=True, seed=31))
    changed = report_of(pack.run(tiny_run(arch, "default", report=True, seed=32)))
    assert first["from_cache"] is False
    assert report_of(again)["from_cache"] is True
    assert report_of(again)["run_id"] == first["run_id"]
    assert f"from the host's cache; measured {first['measured_at']}" in again.ui("report", "text")
    assert changed["from_cache"] is False
    assert changed["run_id"] != first["run_id"]


def test_report_without_a_speed_tier_says_so(pack: HostServer) -> None:
    result = pack.run(tiny_run("zimage", report=True, seed=33))
    assert result.ui("report", "text") == "no Speed Tier node upstream of this report"


def test_another_family_passes_through(bare: HostServer, pack: HostServer) -> None:
    result = pack.run(tiny_run("other", "max", advanced=FORCED, report=True))
    assert digest(result) == digest(bare.run(tiny_run("other")))
    assert engaged(report_of(result)) == set()
    assert "not a Z-Image or Qwen-Image transformer; found Flux" in result.ui("report", "text")


def test_unknown_tier_is_rejected_with_the_three(pack: HostServer) -> None:
    with pytest.raises(PromptFailedError, match=r"rejected.*off.*default.*max"):
        pack.run(tiny_run("zimage", "turbo"))
