"""The example workflows open in the page without a missing node, and are valid but for files."""

from __future__ import annotations

import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest
from speed_tier.tests.browser.page import ComfyPage
from speed_tier.tests.host.provision import REPO
from speed_tier.tests.host.server import PACK_NAME

EXAMPLES = sorted((REPO / "example_workflows").glob("*.json"))
LOADERS = {"UNETLoader", "CLIPLoader", "VAELoader"}


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


def test_both_families_have_one(page: ComfyPage) -> None:
    names = [path.stem for path in EXAMPLES]
    assert names == ["qwen_image_speed_tier", "z_image_turbo_speed_tier"]
    assert sorted(page.server.get("/api/workflow_templates")[PACK_NAME]) == names


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
    by_class = {node["class_type"]: node["inputs"] for node in prompt.values()}
    assert len(prompt) == len(workflow["nodes"])
    assert by_class["SpeedTier"]["tier"] == "default"
    assert prompt[by_class["KSampler"]["model"][0]]["class_type"] == "SpeedTier"
    assert by_class["KSampler"]["seed"] == 1
    assert by_class["KSampler"]["denoise"] == 1
    # Every complaint of the host is about a file that this test has not got.
    rejected = rejection(page, prompt)
    assert set(rejected) == LOADERS
    kinds = {problem["type"] for problems in rejected.values() for problem in problems}
    assert kinds == {"value_not_in_list"}
