"""The example workflows open in the page without a missing node, and are valid but for files."""

from __future__ import annotations

import itertools
import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest
from speed_tier.tests.browser.page import ComfyPage
from speed_tier.tests.host.provision import REPO
from speed_tier.tests.host.server import PACK_NAME

EXAMPLES = sorted((REPO / "example_workflows").glob("*.json"))
LOADERS = {"UNETLoader", "CLIPLoader", "VAELoader", "LoraLoaderModelOnly", "SpeedTierLoader"}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def rejection(page: ComfyPage, prompt: dict[str, Any]) -> dict[str, Any]:
    """What the host has against a prompt, by class of node."""
    try:
        page.server.post("/prompt", {"prompt": prompt})
    except urllib.error.HTTPError as error:
        found = json.loads(error.read())["node_errors"]
        return {prompt[i]["class_type"]: problem["errors"] for i, problem in found.items()}
    raise AssertionError("accepted, though this host has no model files")


# Where the file has each node, as large as the page makes it. Nodes 2.0 need more height than the
# file says; an older frontend scales them, and their places by another factor every time.
BOXES = """await new Promise((done) => setTimeout(done, 500));
const title = LiteGraph.NODE_TITLE_HEIGHT;
return arg.map(({id, type, pos, size}) => {
    const node = app.graph.nodes.find((n) => String(n.id) === String(id));
    const box = document.querySelector(`[data-node-id="${id}"]`)?.getBoundingClientRect();
    const height = LiteGraph.vueNodesMode
        ? box.height / app.canvas.ds.scale / Math.max(1, node.size[0] / size[0])
        : node.size[1] + title;
    return [type, pos[0], pos[1] - title, size[0], height];
});"""
NAMES = [
    "compare_off_and_max",
    "qwen_image_lora_speed_tier",
    "qwen_image_speed_tier",
    "z_image_turbo_gguf_speed_tier",
    "z_image_turbo_speed_tier",
]
TIERED = {"SpeedTier", "SpeedTierLoader"}
COMPARE = "SpeedTierCompare"  # a sampler with a tier of its own
TIERS = {"compare_off_and_max": ["max"]}


def test_the_template_browser_has_them(page: ComfyPage) -> None:
    assert [path.stem for path in EXAMPLES] == NAMES
    assert sorted(page.server.get("/api/workflow_templates")[PACK_NAME]) == NAMES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_opens_whole(page: ComfyPage, path: Path) -> None:
    workflow = read(path)
    page.load(workflow)
    page.wait("return find('SpeedTierReport')")
    missing = page.js(
        """const known = LiteGraph.registered_node_types;
        return app.graph.nodes.map((node) => node.type).filter((type) => !(type in known));"""
    )
    assert missing == []
    assert {n["type"] for n in workflow["nodes"]} <= set(page.object_info)
    prompt = page.prompt()
    assert len(prompt) == len(workflow["nodes"])
    tiers = sorted(
        n["inputs"]["tier"] for n in prompt.values() if n["class_type"] in {*TIERED, COMPARE}
    )
    assert tiers == TIERS.get(path.stem, ["default"])
    samplers = [node for node in prompt.values() if node["class_type"] in ("KSampler", COMPARE)]
    assert len(samplers) == len(tiers)
    for sampler in samplers:
        inputs = sampler["inputs"]
        assert (inputs["seed"], inputs["denoise"]) == (1, 1)
        models = {prompt[i]["class_type"] for i in models_of(prompt, inputs)}
        assert sampler["class_type"] == COMPARE or models & TIERED
    # Every complaint of the host is about a file that this test has not got.
    rejected = rejection(page, prompt)
    assert set(rejected) == {n["class_type"] for n in prompt.values()} & LOADERS
    kinds = {problem["type"] for problems in rejected.values() for problem in problems}
    assert kinds == {"value_not_in_list"}
    # No node lies on another, title and overlay included.
    boxes = page.js(BOXES, workflow["nodes"])
    for first, second in itertools.combinations(boxes, 2):
        assert not overlap(first[1:], second[1:]), (first, second)


def models_of(prompt: dict[str, Any], inputs: dict[str, Any]) -> list[str]:
    """Ids of the nodes that a sampler's model comes through."""
    found = []
    while link := inputs.get("model"):
        found.append(link[0])
        inputs = prompt[link[0]]["inputs"]
    return found


def overlap(first: list[float], second: list[float]) -> bool:
    return all(
        first[axis] < second[axis] + second[axis + 2]
        and second[axis] < first[axis] + first[axis + 2]
        for axis in (0, 1)
    )
