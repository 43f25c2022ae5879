"""Speed Tier Report: which run reaches it, and when it says "from the cache"."""

import json

import pytest
from speed_tier.nodes import report as report_node
from speed_tier.nodes.report import ANY, SpeedTierReport, find_run
from speed_tier.tests.nodes.conftest import graph

NOTHING_SAMPLED = (
    "nothing upstream of this report has sampled with Speed Tier node {} in this process"
)


@pytest.fixture(autouse=True)
def nothing_shown(monkeypatch):
    monkeypatch.setattr(report_node, "_shown", {})


def found(prompt, node_id="6"):
    return find_run(prompt, node_id)[0]


def show(prompt, node_id="6"):
    return SpeedTierReport().report("the value", node_id, prompt)


def test_the_run_of_the_tier_upstream(run):
    wanted = run(graph())
    assert found(graph()) is wanted


def test_directly_after_the_sampler(run):
    prompt = graph()
    prompt["6"]["inputs"]["value"] = ["4", 0]
    wanted = run(prompt)
    assert found(prompt) is wanted


def test_the_newest_run_of_the_same_graph(run):
    run(graph(), "p1")
    newest = run(graph(), "p2")
    assert found(graph()) is newest


def test_another_seed_is_another_run(run):
    first, second = run(graph(1), "p1"), run(graph(2), "p2")
    assert found(graph(1)) is first
    assert found(graph(2)) is second
    missing, problem = find_run(graph(3), "6")
    assert missing is None
    assert problem.startswith(NOTHING_SAMPLED.format(2))


def test_a_graph_without_a_tier(run):
    prompt = graph()
    prompt["4"]["inputs"]["model"] = ["1", 0]
    run(graph())
    assert find_run(prompt, "6") == (None, "no Speed Tier node upstream of this report")
    assert find_run({}, "6")[1] == "no Speed Tier node upstream of this report"


def test_the_last_of_two_passes_counts(run):
    """Refiner: the latent path to the first pass is shorter than the model path to its own tier."""
    prompt = graph()
    prompt["20"] = {"class_type": "SpeedTier", "inputs": {"model": ["1", 0], "tier": "default"}}
    prompt["21"] = {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["20", 0]}}
    prompt["22"] = {"class_type": "ModelSamplingAuraFlow", "inputs": {"model": ["21", 0]}}
    prompt["23"] = {
        "class_type": "KSampler",
        "inputs": {"model": ["22", 0], "latent_image": ["4", 0], "denoise": 0.5},
    }
    prompt["6"]["inputs"]["value"] = ["23", 0]
    refined = run(prompt, tier_id="20", sampler_id="23")
    run(prompt, tier_id="2", sampler_id="4")
    assert found(prompt) is refined


def two_branches():
    """One loader, an off and a max branch, each with sampler and report."""
    prompt = graph()
    prompt["12"] = {"class_type": "SpeedTier", "inputs": {"model": ["1", 0], "tier": "off"}}
    prompt["14"] = {
        "class_type": "KSampler",
        "inputs": {**prompt["4"]["inputs"], "model": ["12", 0]},
    }
    prompt["16"] = {"class_type": "SpeedTierReport", "inputs": {"value": ["14", 0]}}
    return prompt


@pytest.mark.parametrize("order", [("2", "12"), ("12", "2")])
def test_two_branches_do_not_mix(run, order):
    prompt = two_branches()
    samplers = {"2": "4", "12": "14"}
    runs = {tier: run(prompt, tier_id=tier, sampler_id=samplers[tier]) for tier in order}
    assert found(prompt, "6") is runs["2"]
    assert found(prompt, "16") is runs["12"]


def test_a_branch_that_did_not_run_yet_says_so(run):
    prompt = two_branches()
    run(prompt)
    assert NOTHING_SAMPLED.format(12) in find_run(prompt, "16")[1]


@pytest.mark.parametrize("kind", ["SpeedTier", "SpeedTierAdvanced"])
def test_of_two_tiers_in_a_row_the_nearer_one_counts(run, kind):
    prompt = graph()
    prompt["7"] = {"class_type": kind, "inputs": {"model": ["2", 0], "tier": "off"}}
    prompt["8"] = {"class_type": "LoraLoader", "inputs": {"model": ["7", 0]}}
    prompt["4"]["inputs"]["model"] = ["8", 0]
    run(prompt, tier_id="2")
    near = run(prompt, tier_id="7")
    run(prompt, tier_id="2")
    assert found(prompt) is near


def test_another_tab_with_the_same_ids(run):
    """Node ids repeat from workflow to workflow; the graph tells them apart."""
    other = graph()
    other["1"]["inputs"]["unet_name"] = "qwen.safetensors"
    mine = run(graph(), "p1", workflow_id="a")
    theirs = run(other, "p2", workflow_id="b")
    assert found(graph()) is mine
    assert found(other) is theirs


def test_two_samplers_behind_one_tier(run):
    prompt = graph()
    prompt["14"] = {"class_type": "KSampler", "inputs": {**prompt["4"]["inputs"], "seed": 5}}
    prompt["16"] = {"class_type": "SpeedTierReport", "inputs": {"value": ["14", 0]}}
    first, second = run(prompt, sampler_id="4"), run(prompt, sampler_id="14")
    assert found(prompt, "6") is first
    assert found(prompt, "16") is second


def test_a_sampler_made_by_expansion(run):
    wanted = run(graph(), sampler_id="4.0.0.2")
    assert found(graph()) is wanted


def test_a_subgraph_used_twice(run):
    prompt = {}
    for place in ("54", "60"):
        for node_id, node in graph().items():
            inputs = {
                name: [f"{place}:{value[0]}", value[1]] if isinstance(value, list) else value
                for name, value in node["inputs"].items()
            }
            prompt[f"{place}:{node_id}"] = {**node, "inputs": inputs}
    runs = {p: run(prompt, tier_id=f"{p}:2", sampler_id=f"{p}:4") for p in ("54", "60")}
    assert found(prompt, "54:6") is runs["54"]
    assert found(prompt, "60:6") is runs["60"]


def test_the_node_hands_its_value_on_with_text_and_json(run):
    report = run(graph())
    shown = show(graph())
    value, text, encoded = shown["result"]
    assert value == "the value"
    assert text == report.to_text()
    assert json.loads(encoded) == report.to_dict()
    assert shown["ui"] == {"text": [text], "json": [encoded]}


def test_without_a_run_the_problem_is_the_text(host, book):
    value, text, encoded = show(graph())["result"]
    assert value == "the value"
    assert text.startswith(NOTHING_SAMPLED.format(2))
    assert json.loads(encoded) == {"schema": 1, "problem": text}
    assert SpeedTierReport.IS_CHANGED(unique_id="6") == "live"


def test_a_result_from_the_cache_is_labelled_once_and_then_left_alone(host, run):
    """The host asks IS_CHANGED before each prompt and runs the node when the answer changed."""
    report = run(graph(), "p1")
    answers = [SpeedTierReport.IS_CHANGED(unique_id="6")]
    assert json.loads(show(graph())["result"][2])["from_cache"] is False
    answers.append(SpeedTierReport.IS_CHANGED(unique_id="6"))
    host.execute("p2", "6", graph())  # the same graph again: no sampling run
    shown = json.loads(show(graph())["result"][2])
    assert shown["from_cache"] is True
    assert shown["run_id"] == report.run_id
    assert "served from the host's cache; measured" in show(graph())["result"][1]
    answers.append(SpeedTierReport.IS_CHANGED(unique_id="6"))
    assert answers[0] != answers[1] == answers[2]


def test_a_changed_seed_shows_the_new_run(host, run):
    run(graph(1), "p1")
    show(graph(1))
    before = SpeedTierReport.IS_CHANGED(unique_id="6")
    second = run(graph(2), "p2")
    shown = json.loads(show(graph(2))["result"][2])
    assert (shown["run_id"], shown["from_cache"]) == (second.run_id, False)
    assert SpeedTierReport.IS_CHANGED(unique_id="6") != before


def test_two_report_nodes_are_told_apart(host, run):
    run(graph(), "p1")
    show(graph())
    assert SpeedTierReport.IS_CHANGED(unique_id="7") == "live"
    assert SpeedTierReport.IS_CHANGED(unique_id=["6"]) != "live"  # some hosts wrap it in a list


def test_any_type_takes_every_link():
    for name in ("IMAGE", "LATENT", "MODEL", "*"):
        assert not ANY.__ne__(name)  # the host asks "!="
    assert ANY in {"*"}


def test_what_the_host_reads_of_the_class():
    assert SpeedTierReport.OUTPUT_NODE is True
    inputs = SpeedTierReport.INPUT_TYPES()
    assert set(inputs["required"]) == {"value"}
    assert inputs["hidden"] == {"unique_id": "UNIQUE_ID", "prompt": "PROMPT"}
    assert len(SpeedTierReport.RETURN_TYPES) == len(SpeedTierReport.RETURN_NAMES) == 3
    assert callable(getattr(SpeedTierReport, SpeedTierReport.FUNCTION))


def with_vae_tier():
    """The decoder's VAE comes through a tier of its own."""
    prompt = graph()
    prompt["7"] = {"class_type": "VAELoader", "inputs": {"vae_name": "ae.safetensors"}}
    prompt["8"] = {"class_type": "SpeedTierVAE", "inputs": {"vae": ["7", 0], "tier": "max"}}
    prompt["5"]["inputs"]["vae"] = ["8", 0]
    return prompt


def as_decode(report, operation="vae decode"):
    report.operation = operation
    report.timing.vae_decode_s = 0.25
    return report


def test_the_decode_stands_beneath_the_sampling(run):
    prompt = with_vae_tier()
    sampled = run(prompt)
    decoded = as_decode(run(prompt, tier_id="8", sampler_id="5"))
    assert found(prompt) is sampled
    text, data = (show(prompt)["ui"][name][0] for name in ("text", "json"))
    assert text.startswith("Speed Tier: max")
    assert "\nVAE decode 0.250 s\n" in text and "\nSpeed Tier VAE, decode: max" in text
    data = json.loads(data)
    assert (data["run_id"], data["vae"]["run_id"]) == (sampled.run_id, decoded.run_id)
    assert data["timing"]["vae_decode_s"] == 0.25
    assert sampled.timing.vae_decode_s is None, "the filed report is not changed"


def test_a_decode_without_a_sampler_of_ours_is_shown_itself(run):
    prompt = with_vae_tier()
    prompt["4"]["inputs"]["model"] = ["1", 0]
    decoded = as_decode(run(prompt, tier_id="8", sampler_id="5"))
    assert found(prompt) is decoded
    assert show(prompt)["ui"]["text"][0].startswith("Speed Tier VAE, decode: max")


def test_an_encode_is_not_taken_for_the_decode(run):
    prompt = with_vae_tier()
    run(prompt)
    as_decode(run(prompt, tier_id="8", sampler_id="5"), "vae encode")
    assert "VAE decode not measured" in show(prompt)["ui"]["text"][0]
    assert "vae" not in json.loads(show(prompt)["ui"]["json"][0])
