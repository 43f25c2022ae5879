"""Packed weights under everything the host does to a model, against a dense model of equal weights.

Tiny models of the host's own classes in a process of their own (gguf_in_process.py); what happens
is in gguf_loads.py, gguf_guests.py and gguf_compile.py; what is right is here.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from speed_tier.tests.host.gguf_files import gguf_files
from speed_tier.tests.host.gguf_in_process import Facts, run_scenarios

# Compiles first: what a half loaded layer leaves on itself makes later ones fewer.
PARTS = {
    "zimage": ("compile", "loads", "adapters", "hooks", "others"),
    "qwen": ("compile", "loads", "adapters", "hooks", "others", "file"),
}
# fp32 on both sides: a product with the factors beside the weight is rounded otherwise than one
# with the sum of both. What the treatment itself changes is a hundred times the second figure.
NEAR, FAR = 5e-6, 0.02


@pytest.fixture(scope="module")
def sessions() -> dict[str, dict[str, Facts]]:
    """Both families through all scenarios, each in a process of its own."""
    (path,) = gguf_files("qwen gguf").values()
    with ThreadPoolExecutor() as pool:
        running = {
            arch: pool.submit(run_scenarios, arch, parts, {"gguf": str(path)})
            for arch, parts in PARTS.items()
        }
        return {arch: future.result() for arch, future in running.items()}


@pytest.fixture(params=PARTS)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def seen(sessions: dict[str, dict[str, Facts]], arch: str) -> Any:
    def facts(name: str) -> Facts:
        found = sessions[arch][name]
        assert "failed" not in found, found.get("failed")
        return found

    return facts


def assert_follows(facts: Facts) -> None:
    assert facts["distance"] < NEAR < FAR < facts["moved"]


# ---- loads ----


def test_a_packed_model_is_the_dense_one_in_fewer_bytes(seen: Any, arch: str) -> None:
    facts = seen("full_load")
    assert facts["equal"]
    assert facts["packed"] == {"zimage": 28, "qwen": 42}[arch]
    assert facts["types"] == [8, 12, 13, 14]
    assert facts["all_uint8"]
    assert facts["offloaded"] == 0
    assert facts["model_size"] == facts["loaded_size"] == facts["expected_size"]
    assert facts["model_size"] < 0.5 * facts["dense_size"]


def test_half_a_model_on_the_card(seen: Any) -> None:
    facts = seen("partial_load")
    assert facts["lowvram"]
    assert facts["offloaded"] > 0
    assert 0.3 < facts["loaded_share"] < 0.7
    assert facts["equal"]
    assert facts["offloaded_after"] == 0
    assert facts["equal_after"]


def test_a_part_that_is_taken_off_the_card(seen: Any) -> None:
    facts = seen("partial_unload")
    assert facts["freed"] >= facts["wanted"] > 0
    assert facts["freed"] == facts["accounted"]
    assert facts["offloaded"] > 0
    assert facts["host_functions"] == 0, "a LoRA would be applied twice"
    assert facts["distance"] < NEAR
    assert facts["distance_after"] < NEAR
    assert facts["offloaded_after"] == 0
    assert facts["equal_without"]


def test_loras_change_while_most_of_the_model_is_offloaded(seen: Any) -> None:
    facts = seen("lora_while_offloaded")
    assert min(facts["offloaded"]) > 0
    assert facts["host_functions"] == [0, 0, 0]
    assert max(facts["distances"]) < NEAR
    assert min(facts["moved"]) > FAR
    assert facts["equal_without"]


def test_the_cast_of_an_offloaded_layer(seen: Any) -> None:
    facts = seen("cast_path")
    assert facts["equal"]
    assert facts["half_dtype"] == "torch.bfloat16"
    assert 0 < facts["half"] < 0.01
    assert facts["bias"] == 0
    assert facts["weight"] < NEAR


# ---- adapters ----


@pytest.mark.parametrize("kind", ["lora", "lokr", "loha", "dora", "diff"])
def test_every_kind_of_adapter_follows_the_host(seen: Any, arch: str, kind: str) -> None:
    facts = seen("adapter_kinds")[kind]
    assert_follows(facts)
    assert facts["little_loaded"] < NEAR
    assert facts["offloaded"] > 0
    layers = {"zimage": 15, "qwen": 36}[arch]
    by_term, rewritten = (layers, 0) if kind == "lora" else (0, layers)
    assert (facts["at_run_time"], facts["rewritten"]) == (by_term, rewritten)
    if kind != "lora":
        assert facts["distance"] == 0, "the host's own calculation on the same floats"


def test_nothing_of_an_adapter_stays(seen: Any) -> None:
    assert seen("adapter_kinds")["equal_without"]
    assert seen("strength_zero") == {"lora": True, "lokr": True, "diff": True}


def test_the_order_of_adapters_counts(seen: Any) -> None:
    facts = seen("lora_order")
    assert max(facts["distances"]) < NEAR < FAR < facts["apart"]


def test_clones_in_turns_move_no_weight(seen: Any) -> None:
    facts = seen("alternating_clones")
    assert max(facts["distances"]) < NEAR
    assert facts["bare_equal"]
    assert facts["apart"] > FAR
    assert facts["moved_weights"] == facts["host_loads"] == 0
    assert facts["memory_changed"] == 0
    # Each change of patches is a load to whoever listens; the second "b" in a row is none.
    assert facts["turns"] == ["a", "b", "a", "bare", "b", "b", "bare"]
    assert facts["loads"] == ["a", "b", "a", "bare", "b", "bare"]


def test_the_host_is_told_of_the_factors(seen: Any) -> None:
    facts = seen("adapter_memory")
    assert facts["extra"] == facts["factors"] > 0
    assert facts["extra_without"] == facts["model_size_changed"] == 0


# ---- hooks, merges, wrappers, saves ----


@pytest.mark.parametrize(
    "name",
    [
        "prompt alone",
        "both prompts",
        "one each",
        "over time",
        "over time, one each",
        "one each, over a lora",
        "one each, little loaded",
    ],
)
def test_a_scheduled_lora_comes_and_goes(seen: Any, name: str) -> None:
    facts = seen("hook_lora")[name]
    assert_follows(facts)
    assert facts["equal_after"]
    assert (facts["offloaded"] > 0) == ("little loaded" in name)


def test_merges_with_a_packed_model_on_either_side(seen: Any) -> None:
    facts = seen("merges")
    for name in ("packed into dense", "dense into packed", "packed into packed", "subtracted"):
        assert facts[name] < NEAR, name
    assert facts["second has a lora"] < NEAR
    assert facts["moved"] > FAR
    assert facts["lora moved"] > FAR
    assert facts["equal_after"]


def test_another_packs_function_on_a_weight(seen: Any) -> None:
    facts = seen("weight_wrapper")
    assert facts["moved"] > FAR
    for name in ("fresh", "later", "with_lora", "little_loaded"):
        assert facts[name] < NEAR, name
    assert facts["equal_without"]
    assert facts["equal_after"]
    assert facts["seen"] == [["torch.float32", facts["shape"]]], "a function was given packed bytes"


def test_lora_beside_the_weights_as_newer_hosts_do_it(seen: Any) -> None:
    facts = seen("bypass_lora")
    if not facts["supported"]:
        pytest.skip("0.3.75 has no bypass LoRA")
    assert_follows(facts)
    assert_follows(facts["beside_lora"])
    assert facts["as_merged"] < NEAR
    assert facts["equal_after"]


def test_packed_bytes_are_never_saved_as_weights(seen: Any) -> None:
    facts = seen("saving")
    assert len(facts["refused"]) == 2
    for text in facts["refused"]:
        assert "needs dense weights; found a GGUF model. Load the safetensors file" in text
    assert facts["files"] == []
    assert facts["equal_after"]


# ---- a real file ----


def test_a_model_can_be_loaded_again(sessions: dict[str, dict[str, Facts]]) -> None:
    facts = sessions["qwen"]["rebuild"]
    assert "failed" not in facts, facts.get("failed")
    assert facts["packed"] == 42
    assert not facts["is_dynamic"]
    assert facts["in_file"] < facts["model_size"] < 1.3 * facts["in_file"]
    assert facts["moved"] > FAR
    copies = ["factory", "static", "deep", "another card"] if facts["supported"] else ["factory"]
    for name in copies:
        copy = facts[name]
        assert copy["class"] == "QuantModelPatcher"
        assert copy["own_module"] == (name != "static")
        assert copy["equal_weights"]
        assert copy["equal_bare"]
        assert copy["equal_adapted"] == (name != "factory")
        assert len(copy["patched"]) == (name != "factory")
        assert copy["rebuildable"]
    assert facts["freed"]


# ---- compiles ----

KINDS = {
    "zimage": ["context_refiner", "noise_refiner", "layers", "layers#2"],
    "qwen": ["transformer_blocks", "transformer_blocks#2"],
}
# Compiles by kind where there are any. A kind compiles once, once more for the first LoRA, and
# the same two at its second size. Z-Image's noise refiner is plain here: the host merges a LoRA
# into it; its context refiner sees the prompt alone, which has one size.
COMPILES = {
    "zimage": {
        "first": (1, 1, 1, 1),
        "lora": (1, 0, 1, 1),
        "second size": (0, 1, 1, 1),
        "second size, lora": (0, 0, 1, 1),
        "regional only": (1, 0, 1, 1),
    },
    "qwen": {
        "first": (1, 1),
        "lora": (1, 1),
        "second size": (1, 1),
        "second size, lora": (1, 1),
        "regional only": (1, 1),
    },
}
# A layer that is not on the card takes another path: one more for each kind.
PARTLY = {"zimage": {"little loaded, lora": (1, 1, 1, 1)}, "qwen": {"little loaded, lora": (1, 1)}}


def test_a_lora_costs_one_compile_a_kind_and_no_other_does(seen: Any, arch: str) -> None:
    walk = seen("compile_walk")
    kinds = KINDS[arch]
    none = dict.fromkeys(kinds, 0)
    allowed = {**COMPILES[arch], **PARTLY[arch]}
    expected = {
        name: dict(zip(kinds, allowed[name], strict=True)) if name in allowed else none
        for name in walk
        if not name.startswith("dequant only")
    }
    assert {name: walk[name]["compiles"] for name in expected} == expected
    for name, step in walk.items():
        assert step["graphs"] == sum(step["compiles"].values()), name
        assert step["graph_breaks"] == {}, name
        assert step["eager"] == [], name


def test_every_order_of_the_two_features_gives_one_picture(seen: Any) -> None:
    walk = seen("compile_walk")
    for name, step in walk.items():
        assert step["distance"] < NEAR, name
        assert step["still_fast"] is False, name
        assert (step["offloaded"] > 0) == name.startswith("little loaded"), name
        expected = {"gguf_dequant", "regional_compile"}
        if name.startswith("regional only"):
            expected = {"regional_compile"}
        elif name.startswith("dequant only"):
            expected = {"gguf_dequant"}
        assert set(step["engaged"]) == expected, name
    bare = ["first", "back", "regional only", "dequant only", "both again"]
    assert len({walk[name]["sum"] for name in bare}) == 1
    loras = ["lora", "weaker", "other rank and layers", "first block", "two", "lokr"]
    sums = [walk[name]["sum"] for name in ["first", *loras]]
    assert len(set(sums)) == len(sums), "a LoRA did not arrive"
    assert walk["lora again"]["sum"] == walk["lora"]["sum"] == walk["loaded again"]["sum"]
