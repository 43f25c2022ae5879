"""The translations: complete, with the same places to fill, and the English as the nodes say it."""

import json
import re

import pytest
from speed_tier.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from speed_tier.nodes import compare as compare_module
from speed_tier.nodes import loader as loader_module
from speed_tier.tests.contracts.sources import REPO

LANGUAGES = ("en", "zh", "ja")
FILES = ("main", "settings", "commands", "nodeDefs")


def read(language, name):
    return json.loads((REPO / "locales" / language / f"{name}.json").read_text(encoding="utf-8"))


def flat(data, prefix=""):
    if not isinstance(data, dict):
        return {prefix: data}
    return {k: v for key, value in data.items() for k, v in flat(value, f"{prefix}/{key}").items()}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_every_text_has_a_translation(language, name):
    english, other = flat(read("en", name)), flat(read(language, name))
    assert set(other) == set(english)
    for key, text in english.items():
        assert sorted(re.findall(r"{\w+}", other[key])) == sorted(re.findall(r"{\w+}", text)), key
        assert other[key].strip()
    assert other != english


def test_the_english_of_the_page_is_in_its_module():
    source = (REPO / "web" / "lib" / "texts.js").read_text(encoding="utf-8")
    body = source.split("export const ENGLISH = {", 1)[1].split("\n};", 1)[0]
    pairs = re.findall(r'^  "?([\w-]+)"?: "(.*)",$', body, re.MULTILINE)
    assert dict(pairs) == read("en", "main")["speedTier"]


def test_the_english_of_the_nodes_is_theirs(monkeypatch):
    monkeypatch.setattr(loader_module, "list_models", list)
    monkeypatch.setattr(compare_module.comfy_compare, "sampler_names", lambda: ([], []))
    nodes = read("en", "nodeDefs")
    assert set(nodes) == set(NODE_CLASS_MAPPINGS)
    for node_id, node in NODE_CLASS_MAPPINGS.items():
        said = nodes[node_id]
        assert said["display_name"] == NODE_DISPLAY_NAME_MAPPINGS[node_id]
        assert said["description"] == node.DESCRIPTION
        types = node.INPUT_TYPES()
        inputs = {**types.get("required", {}), **types.get("optional", {})}
        assert set(said["inputs"]) == set(inputs)
        for name, spec in inputs.items():
            assert said["inputs"][name]["name"] == name
            assert said["inputs"][name]["tooltip"] == spec[1]["tooltip"]


def test_every_node_has_a_help_page():
    for node_id in NODE_CLASS_MAPPINGS:
        page = (REPO / "web" / "docs" / f"{node_id}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# {NODE_DISPLAY_NAME_MAPPINGS[node_id]}\n")
        assert "timing overlay" in page.lower() or node_id == "SpeedTierReport"
