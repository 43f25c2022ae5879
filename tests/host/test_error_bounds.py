"""Each optimization alone, and all together, against an fp32 forward of the same weights.

The host's own classes with bf16 weights, one sampling step; fp32 has the same rounded weights.
"""

from __future__ import annotations

import pytest
import torch
from speed_tier.speed.bounds import allowed_error
from speed_tier.speed.tiers import TIER_FEATURES, Tier
from speed_tier.tests.host.in_process import Step, run_each

ARCHS = ("zimage", "qwen")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# 16 x 24 is not square, and 40 tokens are not a multiple of Z-Image's 32.
SHAPE = {"height": 16, "width": 24, "tokens": 40, "layers": 4}
BF16 = {"dtype": "bf16", **SHAPE}
FP32 = {"dtype": "fp32", "rounded": True, **SHAPE}
INDUCTOR = {"backend": "inductor"}
AOT_EAGER = {"backend": "aot_eager"}
TOGETHER = ("tf32", "fused_qkv", "regional_compile")
# What has nothing to do on these models, on a CPU.
IDLE = TIER_FEATURES[Tier.MAX] - set(TOGETHER)

# (step, features switched on, compile config, dtype)
CASES = [
    ("tf32", ("tf32",), {}, "fp32"),
    ("fused_qkv", ("fused_qkv",), {}, "bf16"),
    ("compile, aot_eager", ("regional_compile",), AOT_EAGER, "bf16"),
    ("compile, inductor", ("regional_compile",), INDUCTOR, "bf16"),
    ("all", TOGETHER, INDUCTOR, "bf16"),
]
# Z-Image has nothing to fuse, so that compiled alone and all together are the same code to it.
LEFT_OUT = {"zimage": ("fused_qkv", "compile, inductor"), "qwen": ()}
RUNS = [(arch, *case) for arch in ARCHS for case in CASES if case[0] not in LEFT_OUT[arch]]
IDS = [f"{arch}, {name}" for arch, name, *_ in RUNS]


def steps_of(arch):
    steps = [
        Step("exact", arch, tier="", **FP32),
        Step("exact, layer by layer", arch, tier="", in_fp32=True, **BF16),
        Step("off, bf16", arch, tier="off", **BF16),
        Step("off, fp32", arch, tier="off", **FP32),
    ]
    for run_arch, name, on, config, dtype in RUNS:
        if run_arch == arch:
            switches = {feature: "on" if feature in on else "off" for feature in TOGETHER}
            shape = BF16 if dtype == "bf16" else FP32
            with_check = {"compile": config, "check": name == "all"}
            steps.append(Step(name, arch, switches=switches, **with_check, **shape))
    return steps


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    """All cases of both models, each model in a process of its own."""
    return run_each(steps_of, ARCHS, tmp_path_factory.mktemp)


def error_of(seen, name):
    exact = seen["exact"].latents.double()
    return float((seen[name].latents.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("arch", "name", "on", "config", "dtype"), RUNS, ids=IDS)
def test_the_error_stays_within_the_bound(sessions, arch, name, on, config, dtype):
    seen = sessions[arch]
    features = seen[name].report["features"]
    expected = [f for f in on if arch == "qwen" or f != "fused_qkv"]
    assert seen[name].engaged == expected
    assert {f["name"] for f in features} == IDLE | set(TOGETHER)
    if "regional_compile" in on:
        assert seen[name].graphs == len(seen[name].compiles) > 0
        assert seen[name].feature("regional_compile")["reason"] == ""
    if config == INDUCTOR:
        same = torch.equal(seen[name].latents, seen[f"off, {dtype}"].latents)
        assert not same, "nothing was compiled"
    error, off_error = error_of(seen, name), error_of(seen, f"off, {dtype}")
    assert error <= allowed_error(off_error, DTYPES[dtype])


@pytest.mark.parametrize("arch", ARCHS)
def test_the_measure_itself(sessions, arch):
    """fp32 is its own reference; bf16 is far enough from it for a factor to mean something."""
    assert error_of(sessions[arch], "off, fp32") == 0
    # The reference of bench/verify.py, which needs no second copy of the weights, and leaves none
    # of its casts behind: off in bf16 runs on the same model after it.
    assert error_of(sessions[arch], "exact, layer by layer") < 1e-6
    assert 1e-3 < error_of(sessions[arch], "off, bf16") < 0.1
