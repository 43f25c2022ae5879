"""What a session of changing sizes, prompts and LoRA costs in compiles, by Dynamo's own count.

Tiny models of the host's own classes, the host's own sampling path, backend "eager": Dynamo traces
and guards as it always does, and nothing waits for a code generator.
"""

from __future__ import annotations

import pytest
import torch
from speed_tier.tests.host.in_process import Lora, Step, run_each

FORCED = {"tf32": "on", "fused_qkv": "on"}
KINDS = {
    "zimage": ["context_refiner", "noise_refiner", "layers"],
    "qwen": ["transformer_blocks"],
}
ENGAGED = {
    "zimage": ["tf32", "regional_compile"],  # its q, k and v are one projection already
    "qwen": ["tf32", "fused_qkv", "regional_compile"],
}

ATTENTION = Lora("attention")
WEAKER = Lora("attention", strength=0.5)
MLP = Lora("mlp", strength=0.7, seed=9, rank=8)
FIRST_BLOCK = Lora("first block", strength=0.7, seed=9, rank=8)

# (step, what differs from the first, compiles by kind for Z-Image, for Qwen-Image). A kind may
# compile once, once more at its second size and once more at its second batch. Z-Image's context
# refiner sees the prompt alone, padded to 32 tokens: another picture size is no size to it.
WALK = [
    ("first", {}, (1, 1, 1), (1,)),
    ("more steps", {"steps": 3}, (0, 0, 0), (0,)),
    ("96x64", {"height": 96}, (0, 1, 1), (1,)),
    ("128x128", {"height": 128, "width": 128}, (0, 0, 0), (0,)),
    ("batch 2", {"batch": 2}, (1, 1, 1), (1,)),
    ("batch 3", {"batch": 3}, (0, 0, 0), (0,)),
    ("5 tokens", {"tokens": 5}, (0, 0, 0), (0,)),
    ("40 tokens", {"tokens": 40}, (1, 0, 0), (0,)),
    ("150 tokens", {"tokens": 150}, (0, 0, 0), (0,)),
    ("300 tokens", {"tokens": 300}, (0, 0, 0), (0,)),
    ("cfg", {"cfg": 3.0}, (0, 0, 0), (0,)),
    ("cfg and batch", {"cfg": 3.0, "batch": 2, "tokens": 40}, (0, 0, 0), (0,)),
    ("lora", {"loras": (ATTENTION,)}, (0, 0, 0), (0,)),
    ("weaker lora", {"loras": (WEAKER,)}, (0, 0, 0), (0,)),
    ("two loras", {"loras": (ATTENTION, FIRST_BLOCK)}, (0, 0, 0), (0,)),
    ("lora after tier", {"loras": (ATTENTION,), "loras_after_tier": True}, (0, 0, 0), (0,)),
    ("weaker after tier", {"loras": (WEAKER,), "loras_after_tier": True}, (0, 0, 0), (0,)),
    ("two after tier", {"loras": (ATTENTION, MLP), "loras_after_tier": True}, (0, 0, 0), (0,)),
    ("back", {}, (0, 0, 0), (0,)),
]
LORA_STEPS = [name for name, change, _, _ in WALK if "loras" in change]
COMPARED = ["first", "96x64", "batch 3", "40 tokens", "cfg and batch", *LORA_STEPS]

# Five sizes, each with a padded prompt length of its own, where three variants are allowed.
LIMIT = 3
LIMITED = {"backend": "eager", "recompile_limit": LIMIT, "dynamic": False}
SIZES = [(16 + 16 * i, 32, 12 + 32 * i) for i in range(5)]


def session_steps(arch):
    steps = []
    for name, change, _, _ in WALK:
        steps.append(Step(name, arch, switches=FORCED, **change))
        if name in COMPARED:
            steps.append(Step(f"off, {name}", arch, tier="off", **change))
    for i, (height, width, tokens) in enumerate(SIZES):
        size = {"height": height, "width": width, "tokens": tokens}
        steps.append(Step(f"limit {i}", arch, switches=FORCED, compile=LIMITED, **size))
        steps.append(Step(f"off, limit {i}", arch, tier="off", **size))
    return steps


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    """Both models through the whole walk, each in a process of its own."""
    return run_each(session_steps, KINDS, tmp_path_factory.mktemp)


@pytest.fixture(params=KINDS)
def arch(request):
    return request.param


@pytest.fixture
def seen(sessions, arch):
    return sessions[arch]


def relative(got, expected):
    return float((got - expected).norm() / expected.norm())


def test_what_engages_is_named(seen, arch):
    assert {name: seen[name].engaged for name, *_ in WALK} == {
        name: ENGAGED[arch] for name, *_ in WALK
    }
    assert seen["off, first"].report["features"] == []


def test_each_step_compiles_exactly_what_it_may(seen, arch):
    column = 2 + list(KINDS).index(arch)
    expected = {row[0]: dict(zip(KINDS[arch], row[column], strict=True)) for row in WALK}
    assert {name: seen[name].compiles for name in expected} == expected


def test_the_report_counts_what_dynamo_counts(seen, arch):
    for name, *_ in WALK:
        step = seen[name]
        assert step.graphs == sum(step.compiles.values()), name
        assert step.graphs == step.report["compile"]["graphs"], name
        assert step.report["compile"]["graph_breaks"] == {}, name
    assert seen["first"].report["compile"]["recompiles"] == 0
    assert seen["96x64"].report["compile"]["recompiles"] == seen["96x64"].graphs > 0
    assert all(seen[f"off, {name}"].graphs == 0 for name in COMPARED)


@pytest.mark.parametrize("name", COMPARED)
def test_the_output_is_that_of_off(seen, name):
    assert relative(seen[name].latents, seen[f"off, {name}"].latents) < 1e-5


def test_every_lora_changes_the_picture(seen):
    """Else the walk would count the compiles of a LoRA that never arrived."""
    pictures = [seen[name].latents for name in ("first", "lora", "weaker lora", "two loras")]
    pictures.append(seen["two after tier"].latents)
    for i, one in enumerate(pictures):
        assert all(relative(one, other) > 1e-3 for other in pictures[:i])
    assert relative(seen["lora"].latents, seen["lora after tier"].latents) < 1e-5


def test_the_way_back_gives_the_first_picture(seen):
    assert torch.equal(seen["back"].latents, seen["first"].latents)


def test_a_limit_falls_back_to_eager_and_goes_on(seen, arch):
    steps = [seen[f"limit {i}"] for i in range(len(SIZES))]
    each = dict.fromkeys(KINDS[arch], 1)
    none = dict.fromkeys(KINDS[arch], 0)
    assert [step.compiles for step in steps] == [each] * LIMIT + [none] * (len(SIZES) - LIMIT)
    assert [step.graphs for step in steps] == [sum(step.compiles.values()) for step in steps]
    for i, step in enumerate(steps):
        compiled = step.feature("regional_compile")
        assert step.report["outcome"] == "done"
        assert compiled["state"] == ("engaged" if i < LIMIT else "fell_back")
        assert ("recompile limit hit" in compiled["reason"]) == (i >= LIMIT)
        assert relative(step.latents, seen[f"off, limit {i}"].latents) < 1e-5
