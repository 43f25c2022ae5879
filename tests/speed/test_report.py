"""The report: one object, as data, as text, as a log line, and the book of past runs."""

import json
import threading
from dataclasses import replace

import pytest
import torch
from speed_tier.speed import env
from speed_tier.speed.report import (
    SCHEMA,
    CompiledKind,
    CompileFacts,
    FeatureOutcome,
    GraphFacts,
    ModelFacts,
    Report,
    ReportBook,
    State,
    Timing,
)

# The page, the node and the benchmark read these; a change is a new schema number.
KEYS = {
    "check", "compile", "error", "features", "flags", "from_cache", "graph_signature", "graphs",
    "measured_at", "memory", "model", "node_id", "notes", "notices", "operation", "outcome",
    "payback_images",
    "prompt_id", "run_id", "sampler_node_id", "schema", "shape", "speedup_against_off",
    "started_unix_s", "tier", "timing", "versions", "workflow_id",
}  # fmt: skip
INNER_KEYS = {
    "tier": {"asked", "resolved", "reason"},
    "shape": {"latent", "steps", "evaluations", "text_tokens", "sampler", "pixels"},
    "memory": {"peak_bytes"},
    "timing": {
        "load_s", "first_step_s", "first_step_tax_s", "steps_s", "steady_step_s", "total_s",
        "vae_decode_s", "vae_note", "step_marks",
    },
    "compile": {"kinds", "graphs", "recompiles", "graph_breaks", "seconds", "cache"},
    "graphs": {"captured", "kept", "replayed", "pool_bytes", "not_replayed"},
    "check": {
        "calls", "blocks", "block_error", "output_error", "seconds", "restarts", "unchecked",
        "notes",
    },
    "model": {
        "family", "class_name", "stack", "dtype", "device", "compiled_by", "number", "note",
    },
}  # fmt: skip


def full_report(**changes):
    report = Report("max", "max", "as asked")
    report.outcome = "done"
    report.model = ModelFacts("z_image", "NextDiT", "comfyui", "bfloat16", "cuda:0")
    report.features = [
        FeatureOutcome("tf32", State.ENGAGED, fidelity="rounding", note="fp32 parts"),
        FeatureOutcome("fused_qkv", State.SKIPPED, "nothing to do: fused", "rounding"),
        FeatureOutcome("regional_compile", State.FELL_BACK, "compile failed: x", "rounding"),
    ]
    report.timing = Timing(0.5, 9.0, 7.0, [9.0, 2.0, 2.0], 2.0, 14.0)
    kinds = [CompiledKind("layers", 30, 2, 6.5, from_cache=1)]
    report.compile = CompileFacts(kinds, 1, 0, {"why": 2}, 6.5, "/user/compiled/ab")
    report.graphs = GraphFacts(1, 2, 5, 2**29, {"first calls of a size": 1})
    report.latent_shape = [1, 16, 128, 128]
    report.steps = 3
    report.peak_bytes = 3 * 2**30
    report.speedup_against_off = 1.5
    report.payback_images = 3
    for name, value in changes.items():
        setattr(report, name, value)
    return report


@pytest.mark.parametrize("report", [full_report(), Report("", "off", "unset")], ids=["full", "new"])
def test_the_data_is_json_with_stable_keys(report):
    data = report.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert set(data) == KEYS
    assert {name: set(data[name]) for name in INNER_KEYS} == INNER_KEYS
    assert data["schema"] == SCHEMA == 2


def test_features_in_the_data():
    features = full_report().to_dict()["features"]
    assert [set(feature) for feature in features] == [
        {"name", "state", "reason", "fidelity", "note"}
    ] * 3
    assert [feature["state"] for feature in features] == ["engaged", "skipped", "fell_back"]


def test_engaged_counts_neither_skipped_nor_fallen_back():
    report = full_report()
    assert report.engaged() == ["tf32"]
    assert report.feature("fused_qkv").state is State.SKIPPED
    assert report.feature("no such feature") is None


def test_the_text_names_every_feature_with_its_reason():
    lines = full_report(notes=["a note"]).to_text().splitlines()
    assert lines[0] == "Speed Tier: max (asked: max, as asked), done"
    for line in (
        "model: z_image, NextDiT, bfloat16 on cuda:0",
        "  tf32: engaged, rounding: fp32 parts",
        "  fused_qkv: skipped: nothing to do: fused",
        "  regional_compile: fell_back: compile failed: x",
        "load 0.500 s, whole run 14.000 s",
        "first step 9.000 s (tax 7.000 s), steady step 2.000 s",
        "steps (s): 9.000, 2.000, 2.000",
        "VAE decode not measured: the decode did not go through a Speed Tier node",
        "peak memory 3.00 GiB",
        "compiled in this run: layers x30: 2; 0 of them recompiles, 2 graph breaks, 6.5 s",
        "compiled from cache: 1 of 2; kept in /user/compiled/ab",
        "graph break x2: why",
        "the first-step tax is paid back by 3 images like this",
        "CUDA graphs: 1 captured in this run, 2 kept (0.50 GiB), 5 calls replayed",
        "1.50x the speed of the last off run of the same work",
        "note: a note",
    ):
        assert line in lines


def test_what_was_not_measured_says_so():
    text = Report("", "off", "no tier was asked for and the model is dense").to_text()
    assert "(asked: unset, no tier was asked for and the model is dense)" in text
    assert "steady step not measured" in text
    assert "steps (s): none" in text
    assert "peak memory" not in text
    assert "compiled in this run" not in text
    assert "CUDA graphs" not in text
    assert "the speed of" not in text
    assert "paid back" not in text


def test_a_run_served_from_the_cache_says_when_it_was_measured():
    report = full_report(started_unix_s=0.0)
    cached, live = report.to_dict(from_cache=True), report.to_dict()
    assert (cached["from_cache"], live["from_cache"]) == (True, False)
    assert cached["measured_at"] == live["measured_at"]
    assert f"served from the host's cache; measured {cached['measured_at']}" in report.to_text(True)
    assert "served from" not in report.to_text()


def test_an_error_and_a_foreign_model_are_in_the_text():
    model = ModelFacts(class_name="UNet", dtype="float16", device="cpu", note="not ours")
    text = full_report(outcome="failed", error="ValueError: no", model=model).to_text()
    assert "failed\n  ValueError: no" in text
    assert "model: no known family, UNet, float16 on cpu\n  not ours" in text


def test_the_log_line():
    assert full_report().log_line() == (
        "Speed Tier max done 14.00 s, 2.000 s/step, first-step tax 7.00 s; tf32"
    )
    assert Report("off", "off", "as asked").log_line() == (
        "Speed Tier off running; nothing engaged"
    )


def test_the_book_is_newest_first_and_bounded():
    book = ReportBook(keep=3)
    for number in range(5):
        book.add(full_report(node_id=str(number)))
    assert [report.node_id for report in book.runs()] == ["4", "3", "2"]


def test_find_takes_the_newest_that_matches_everything():
    book = ReportBook()
    for number, (node, prompt) in enumerate([("1", "p"), ("2", "p"), ("1", "q"), ("1", "p")]):
        book.add(full_report(node_id=node, prompt_id=prompt, error=str(number)))
    assert book.find(node_id="1", prompt_id="p").error == "3"
    assert book.find(node_id="1", prompt_id="q").error == "2"
    assert book.find(node_id="2", prompt_id="q") is None


def test_the_last_off_run_of_the_same_model_and_shape():
    book = ReportBook()

    def off(step_s, **changes):
        report = full_report(tier="off", **{"features": [], **changes})
        report.timing = Timing(steady_step_s=step_s)
        book.add(report)

    like = full_report()
    assert book.last_off_step_s(like) is None
    off(3.0)
    off(4.0)
    off(5.0, latent_shape=[2, 16, 128, 128])
    off(6.0, model=ModelFacts("qwen_image", "QwenImageTransformer2DModel"))
    off(7.0, outcome="interrupted")
    off(8.0, sampler="sample_heun")
    off(9.0, text_tokens=77)
    off(10.0, evaluations=2 * like.steps)
    off(11.0, steps=2)
    off(12.0, features=like.features)
    off(13.0, model=replace(like.model, number=2))
    off(14.0, model=replace(like.model, compiled_by="a torch.compile node"))
    off(None)
    book.add(full_report())
    assert book.last_off_step_s(like) == 4.0


@pytest.mark.parametrize(
    ("off_s", "steady_s", "tax_s", "images"),
    [(3.0, 2.0, 7.0, 3), (3.0, 2.0, 0.6, 1), (3.0, 2.0, 0.4, None), (2.03, 2.0, 7.0, None)],
)
def test_when_the_first_step_is_paid_back(off_s, steady_s, tax_s, images):
    book = ReportBook()
    run = full_report()
    run.timing = Timing(steady_step_s=steady_s, first_step_tax_s=tax_s)
    assert book.payback_images(run) is None
    off = full_report(tier="off", features=[])
    off.timing = Timing(steady_step_s=off_s)
    book.add(off)
    assert book.payback_images(run) == images
    run.features = []
    assert book.payback_images(run) is None


def test_run_ids_differ():
    assert len({Report("", "off", "").run_id for _ in range(100)}) == 100


def test_the_book_takes_reports_from_many_threads():
    book = ReportBook(keep=8)
    errors = []

    def work():
        try:
            for _ in range(200):
                book.add(full_report())
                book.find(node_id="none")
        except RuntimeError as error:  # "deque mutated during iteration"
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(book.runs()) == 8


@pytest.mark.parametrize(
    ("features", "notes", "expected"),
    [
        ([("tf32", State.SKIPPED, "TF32 needs an NVIDIA card; found cpu")], [], []),
        ([("regional_compile", State.SKIPPED, "switched off by SPEED_TIER_DISABLE")], [], []),
        (
            [("regional_compile", State.SKIPPED, "Triton is not installed; install it")],
            [],
            [("no_compile", "Triton is not installed; install it")],
        ),
        (
            [("regional_compile", State.FELL_BACK, "compile failed: x")],
            [],
            [("fell_back", "regional_compile: compile failed: x")],
        ),
        (
            [("fused_qkv", State.SKIPPED, "dynamic VRAM may move weights at any call")],
            ["max runs as default does: 2 GiB free", "max runs on a static copy"],
            [
                ("host_memory", "max runs as default does: 2 GiB free"),
                ("host_memory", "fused_qkv: dynamic VRAM may move weights at any call"),
            ],
        ),
    ],
)
def test_what_a_person_is_told_once(features, notes, expected):
    report = Report("max", "max", "as asked", notes=notes)
    report.features = [FeatureOutcome(*feature) for feature in features]
    assert [(notice.kind, notice.text) for notice in report.find_notices()] == expected


def test_every_missing_compiler_is_told(monkeypatch):
    found = [env.too_old_for_compile(env.Version("2.6")), env.inductor_problem(torch.device("mps"))]
    monkeypatch.setattr(env, "c_compiler", lambda _: None)
    for name in ("", "/no/such/g++"):
        monkeypatch.setenv("CXX", name)
        found.append(env.inductor_problem(torch.device("cpu")))
    monkeypatch.setattr(env.importlib.util, "find_spec", lambda _: None)
    found.append(env.triton_problem())
    for reason in found:
        report = Report("max", "max", "as asked")
        report.features = [FeatureOutcome("regional_compile", State.SKIPPED, reason)]
        assert [n.kind for n in report.find_notices()] == ["no_compile"], reason


@pytest.mark.parametrize(
    ("family", "latent", "expected"),
    [
        ("z_image", [1, 16, 128, 96], [768, 1024]),
        ("qwen_image", [1, 16, 1, 166, 166], [1328, 1328]),
        ("", [1, 16, 128, 96], []),
        ("z_image", [], []),
    ],
)
def test_the_size_of_the_picture(family, latent, expected):
    report = Report("max", "max", "", model=ModelFacts(family=family), latent_shape=latent)
    assert report.to_dict()["shape"]["pixels"] == expected
