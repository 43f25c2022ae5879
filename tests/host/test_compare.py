"""Speed Tier Compare in the real host: off stays off, the tier is near it, the numbers are real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from speed_tier.speed.metrics import difference
from speed_tier.tests.host.graphs import Graph, Link, tiny_run
from speed_tier.tests.host.model_files import file_name, model_files
from speed_tier.tests.host.server import HostServer, PromptResult
from speed_tier.tests.host.tier_cases import ARGS, FORCED, digest, report_of

STEPS = 3
AMPLIFY = 1e5  # fp32 rounding; a file has 255 levels
PREVIEWS = ("--preview-method", "latent2rgb")


@pytest.fixture(scope="module")
def pack() -> Iterator[HostServer]:
    files = model_files("qwen_vae")
    with HostServer(extra_args=(*ARGS, *PREVIEWS), models=files, tag="compare") as running:
        yield running


@pytest.fixture(autouse=True)
def flags_are_as_before(pack: HostServer) -> Iterator[None]:
    before = pack.flags()
    yield
    assert pack.flags() == before


def compare(graph: Graph, model: Link, tier: str, **more: Any) -> None:
    """The node "compare" behind a model, with both latents stored."""
    graph.compare(model, tier, "compare", **{"steps": STEPS, "amplify": AMPLIFY, **more})
    graph.sink(["compare", 0], "compare_off", node_id="off")
    graph.sink(["compare", 1], "compare_tier", node_id="tier")


def plain(pack: HostServer, arch: str) -> str:
    """What the host's own KSampler gives for the same setting, with no tier in sight."""
    return digest(pack.run(tiny_run(arch, steps=STEPS)))


def said(result: PromptResult) -> tuple[str, dict[str, Any]]:
    return str(result.ui("compare", "text")), json.loads(result.ui("compare", "json"))


def latents(result: PromptResult) -> list[torch.Tensor]:
    return [torch.from_numpy(numpy.load(result.ui(sink, "file"))) for sink in ("off", "tier")]


def picture_of(pack: HostServer, result: PromptResult) -> numpy.ndarray:
    image = result.ui("picture", "images")
    path = pack.output_dir / image["subfolder"] / image["filename"]
    return numpy.asarray(Image.open(path), dtype=numpy.float64)


@pytest.mark.parametrize("arch", ["zimage", "qwen"])
@pytest.mark.parametrize("tier", ["off", "default"])
def test_off_against_what_changes_nothing(pack: HostServer, arch: str, tier: str) -> None:
    # Nothing of default engages on a CPU.
    graph = Graph()
    compare(graph, graph.tiny_model(arch), tier)
    graph.add("SaveImage", "picture", images=["compare", 2], filename_prefix=f"{arch}_{tier}")
    result = pack.run(graph.prompt)
    assert digest(result, "off") == digest(result, "tier") == plain(pack, arch)
    text, data = said(result)
    assert "latents: identical, byte for byte" in text
    assert data["latents"]["identical"] is True
    assert picture_of(pack, result).max() == 0
    assert [data["off"]["tier"]["resolved"], data["runs"][0]["tier"]["resolved"]] == ["off", tier]


@pytest.fixture(scope="module")
def behind_a_tier(pack: HostServer) -> dict[str, Any]:
    """max behind a model that carries a forced max already, run twice, with decoded pictures.

    Qwen-Image: one kind of block to compile.
    """
    graph = Graph()
    carried = graph.speed_tier_advanced(graph.tiny_model("qwen"), "max", "carried", **FORCED)
    vae = graph.add("VAELoader", vae_name=file_name("qwen_vae"))
    compare(graph, carried, "max", repeats=1, vae=vae)
    graph.add("SaveImage", "picture", images=["compare", 2], filename_prefix="max")
    graph.add("SpeedTierReport", "report", value=["compare", 1])
    for i, name in enumerate(("decoded_off", "decoded_tier")):
        graph.save_image(["compare", i], vae, name, node_id=name)
    mark = pack.events.mark()
    result = pack.run(graph.prompt)
    return {"result": result, "events": pack.events.since(mark)}


def test_off_is_untouched_behind_a_tier(pack: HostServer, behind_a_tier: dict[str, Any]) -> None:
    result = behind_a_tier["result"]
    assert digest(result, "off") == plain(pack, "qwen") != digest(result, "tier")
    _, data = said(result)
    assert data["off"]["features"] == []
    # tf32 was on by force in the tier before; on a CPU max itself leaves it out.
    states = {f["name"]: f["state"] for f in data["runs"][1]["features"]}
    assert (states["regional_compile"], states["tf32"]) == ("engaged", "skipped")


def test_max_is_near_off_and_the_figures_are_those_of_the_latents(
    behind_a_tier: dict[str, Any],
) -> None:
    result = behind_a_tier["result"]
    text, data = said(result)
    found = difference(*latents(result))
    assert 0 < found.relative_error < 1e-3
    for name in ("psnr_db", "relative_error", "max_error", "mean_error"):
        assert data["latents"][name] == pytest.approx(getattr(found, name), rel=1e-9), name
    assert f"latents: {found.words('max')}" in text
    assert data["repeats"][0]["identical"] is True


def test_the_first_run_pays_and_the_last_one_is_the_speed(behind_a_tier: dict[str, Any]) -> None:
    text, data = said(behind_a_tier["result"])
    first, last = data["runs"]
    assert first["compile"]["graphs"] > 0 == last["compile"]["graphs"]
    tax_s = (first["timing"]["total_s"] - first["timing"]["load_s"]) - (
        last["timing"]["total_s"] - last["timing"]["load_s"]
    )
    assert data["first_run_tax_s"] == pytest.approx(tax_s)
    assert tax_s > 0.5 * first["compile"]["seconds"] > 0
    speedup = data["off"]["timing"]["steady_step_s"] / last["timing"]["steady_step_s"]
    assert data["speedup"] == pytest.approx(speedup)
    assert f"speed: {speedup:.2f}x off's" in text
    assert f"first-run tax of max: {tax_s:.2f} s (run 1 less run 2" in text


def test_the_picture_is_of_the_decoded_images(
    pack: HostServer, behind_a_tier: dict[str, Any]
) -> None:
    result = behind_a_tier["result"]
    text, data = said(result)
    files = [
        pack.output_dir / result.ui(n, "images")["filename"]
        for n in ("decoded_off", "decoded_tier")
    ]
    decoded = [numpy.asarray(Image.open(f), dtype=numpy.float64) for f in files]
    picture = picture_of(pack, result)
    assert picture.shape == decoded[0].shape == (64, 64, 3)
    # A level of a file is 1; what lies under one cannot be read from files.
    assert abs(decoded[0] - decoded[1]).max() <= data["images"]["max_error"] * 255 + 1
    assert picture.max() > 10
    assert picture.max() == pytest.approx(
        min(255, AMPLIFY * 255 * data["images"]["max_error"]), abs=1
    )
    assert "picture: |max - off| of decoded pictures, times 100000; brightest" in text


def test_both_runs_report_to_the_node(behind_a_tier: dict[str, Any]) -> None:
    updates = [e.data for e in behind_a_tier["events"] if e.type == "speed_tier.update"]
    assert {(u["node_id"], u["sampler_node_id"]) for u in updates} == {("compare", "compare")}
    tiers = [u["tier"]["resolved"] for u in updates if u["kind"] == "report"]
    assert tiers == ["off", "max", "max"]
    # The report node behind it shows the newest of the three.
    shown = report_of(behind_a_tier["result"])
    assert shown["run_id"] == said(behind_a_tier["result"])[1]["runs"][1]["run_id"]


def test_progress_and_previews_are_the_samplers(behind_a_tier: dict[str, Any]) -> None:
    progress = [
        e.data for e in behind_a_tier["events"] if e.type == "progress" and e.data["max"] == STEPS
    ]
    assert {p["node"] for p in progress} == {"compare"}
    assert [p["value"] for p in progress].count(STEPS) == 3
    previews = [e for e in behind_a_tier["events"] if e.type == "binary"]
    assert len(previews) >= 3 * STEPS


def test_an_interrupt_in_the_second_run(pack: HostServer) -> None:
    graph = Graph()
    model = graph.add("TestSleep", model=graph.tiny_model("zimage"), seconds=0.1)
    compare(graph, model, "default", steps=20)
    mark = pack.events.mark()
    prompt_id = pack.queue(graph.prompt)
    pack.events.wait_for(
        lambda e: (
            e.type == "speed_tier.update"
            and (e.data["tier"], e.data["kind"]) == ("default", "engaged")
        ),
        mark=mark,
        timeout=60,
    )
    pack.interrupt()
    assert pack.wait(prompt_id, timeout=30).interrupted
    newest, before = pack.get("/speed_tier/report")["runs"][:2]
    assert (newest["tier"]["resolved"], newest["outcome"]) == ("default", "interrupted")
    assert (before["tier"]["resolved"], before["outcome"]) == ("off", "done")
    assert newest["shape"]["steps"] < 20
    graph = Graph()
    compare(graph, graph.tiny_model("zimage"), "off")
    assert digest(pack.run(graph.prompt), "tier") == plain(pack, "zimage")


def test_without_a_step_there_is_nothing_to_time(pack: HostServer) -> None:
    graph = Graph()
    compare(graph, graph.tiny_model("zimage"), "max", denoise=0.0, repeats=2)
    text, data = said(pack.run(graph.prompt))
    assert "speed: not measured, no step was sampled (denoise 0)" in text
    assert (data["off"], data["runs"]) == (None, [])
