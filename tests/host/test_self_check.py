"""The self-check in a real host: planted faults are caught and blamed, clean runs are not.

`SPEED_TIER_CLEAN_RUNS=500` asks for more clean runs than the suite has time for.
"""

import os
import random

import pytest
import torch
from speed_tier.speed.bounds import check_bounds
from speed_tier.tests.host.in_process import Lora, Step, run_each

pytestmark = pytest.mark.host
ARCHS = ("zimage", "qwen")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMMON = {"steps": 4, "layers": 2, "height": 16, "width": 24, "switches": {"tf32": "off"}}
IMAGE_TOKENS = 16 * 24 // 4
# (name, what is planted, what of the step differs)
PLANTED = [
    ("a block scaled by 1.01", {"kind": "scaled", "block": 1}, {}),
    ("the last block scaled by 1.01, bf16", {"kind": "scaled", "block": -1}, {"dtype": "bf16"}),
    ("noise in every block", {"kind": "noise"}, {"tier": "max", "cfg": 2.0}),
    ("NaN at one size", {"kind": "NaN at one size", "width": IMAGE_TOKENS}, {"batch": 2}),
    ("NaN from a later step on", {"kind": "NaN later", "block": 0}, {"steps": 8}),
    ("NaN later, LoRA", {"kind": "NaN later", "block": 1}, {"steps": 8, "loras": ("attention",)}),
]
CLEAN_RUNS = int(os.environ.get("SPEED_TIER_CLEAN_RUNS", "4"))
BACKEND = "eager" if CLEAN_RUNS < 100 else "inductor"  # which rounds, and takes its time


def planted_steps(arch):
    for name, fault, more in PLANTED:
        more = {**COMMON, **more}
        if "loras" in more:
            more["loras"] = (Lora("attention", 0.5),)
        more["fault"] = fault
        yield Step(f"{name}: off", arch, **{**more, "tier": "", "switches": {}})
        # A fault that counts calls gives a graph's replay another number than its call.
        more = {"tier": "default", "graphs": "later" not in name, **more}
        yield Step(name, arch, **more)
        yield Step(f"{name}: again", arch, **more)
    yield Step("stale: off", arch, **{**COMMON, "tier": "", "switches": {}, "stale": True})
    yield Step("stale", arch, tier="default", graphs=True, stale=True, **COMMON)
    yield Step("stale: again", arch, tier="default", graphs=True, stale=True, **COMMON)


def clean_steps(arch):
    """Random runs with everything engaged that can be on a CPU, compiled and rounding."""
    draw = random.Random(7)
    for number in range(CLEAN_RUNS):
        yield Step(
            f"clean {number}",
            arch,
            tier="max",
            height=2 * draw.randint(3, 12),
            width=2 * draw.randint(3, 12),
            batch=draw.choice((1, 1, 2)),
            tokens=draw.randint(3, 80),
            cfg=draw.choice((1.0, 1.0, 3.0)),
            dtype=draw.choice(list(DTYPES)),
            loras=draw.choice(((), (Lora("attention", draw.random()),))),
            switches={"fused_qkv": "on"},
            compile={"backend": BACKEND},
        )


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    return run_each(
        lambda arch: [*planted_steps(arch), *clean_steps(arch)], ARCHS, tmp_path_factory.mktemp
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", [name for name, *_ in PLANTED])
def test_a_planted_fault_is_caught_and_blamed(sessions, arch, name):
    seen = sessions[arch]
    run = seen[name]
    assert torch.equal(run.latents, seen[f"{name}: off"].latents)
    planted = run.feature("planted")
    assert planted["state"] == "fell_back"
    assert planted["reason"].startswith("dropped by the self-check: ")
    assert run.engaged == seen[f"{name}: again"].engaged
    assert ("graph_capture" in run.engaged) is ("later" not in name)
    assert run.report["check"]["restarts"] == ("later" in name)
    assert [notice["kind"] for notice in run.report["notices"]].count("fell_back") >= 1


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", [name for name, *_ in PLANTED])
def test_the_next_run_does_without_it_and_is_not_compared_again(sessions, arch, name):
    again = sessions[arch][f"{name}: again"]
    assert torch.equal(again.latents, sessions[arch][f"{name}: off"].latents)
    assert again.feature("planted")["state"] == "skipped"
    assert again.report["notices"] == []
    assert again.report["check"]["calls"] == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_a_stale_graph_is_caught_and_blamed(sessions, arch):
    seen = sessions[arch]
    assert torch.equal(seen["stale"].latents, seen["stale: off"].latents)
    graphs = seen["stale"].feature("graph_capture")
    assert graphs["state"] == "fell_back"
    assert graphs["reason"] == "a replay did not give what the call itself gives"
    assert torch.equal(seen["stale: again"].latents, seen["stale: off"].latents)
    assert seen["stale: again"].feature("graph_capture")["state"] == "skipped"


@pytest.mark.parametrize("arch", ARCHS)
def test_clean_runs_raise_no_alarm(sessions, arch):
    wanted = {step.name: step for step in clean_steps(arch)}
    compared = 0
    for name, step in wanted.items():
        run = sessions[arch][name]
        assert torch.isfinite(run.latents).all()
        assert {f["name"] for f in run.report["features"] if f["state"] == "fell_back"} == set()
        check = run.report["check"]
        compared += check["calls"]
        assert (check["restarts"], check["notes"], check["unchecked"]) == (0, [], "")
        bounds = check_bounds(DTYPES[step.dtype], "tf32" in run.engaged)
        assert check["output_error"] <= bounds.output
        assert "regional_compile" in run.engaged
        print(name, step.dtype, f"{check['block_error']:.2e} {check['output_error']:.2e}")
    assert compared >= 0.9 * len(wanted)
