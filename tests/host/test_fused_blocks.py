"""The host's own blocks beside their fused stand-ins, with the kernels in Triton's interpreter."""

import pytest
import torch
from speed_tier.speed.bounds import allowed_error
from speed_tier.tests.host.in_process import Lora, Step, run_each

pytestmark = pytest.mark.host
ARCHS = ("zimage", "qwen")
SHAPE = {"height": 8, "width": 8, "tokens": 20, "layers": 1}
BF16 = {"dtype": "bf16", **SHAPE}
ONLY = {"fused_qkv": "off", "tf32": "off"}
LORA = {"loras": (Lora("attention", 0.5),)}
# name -> what differs from the plain case
CASES = {
    "default": {},
    "two pictures": {"batch": 2},
    "two conditions": {"cfg": 2.0},
    "LoRA": LORA,
    "max, whose blocks are compiled": {"tier": "max"},
}


def steps_of(arch):
    steps = []
    for name, more in CASES.items():
        plain = {key: value for key, value in more.items() if key != "tier"}
        exact = {**BF16, "dtype": "fp32", "rounded": True}
        steps.append(Step(f"{name}: exact", arch, tier="", **exact, **plain))
        steps.append(Step(f"{name}: off", arch, tier="off", **BF16, **plain))
        # The interpreter takes its time: one case is enough for the self-check.
        more = {"tier": "default", "check": name == "default", **BF16, **more}
        steps.append(Step(name, arch, **more, switches=ONLY))
    return steps


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    return run_each(steps_of, ARCHS, tmp_path_factory.mktemp, {"TRITON_INTERPRET": "1"})


def distance(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_fused_blocks_are_as_near_to_fp32_as_the_hosts_own(sessions, arch, name):
    seen = sessions[arch]
    exact = seen[f"{name}: exact"].latents
    assert "eager_patches" in seen[name].engaged, seen[name].feature("eager_patches")
    off_error = distance(seen[f"{name}: off"].latents, exact)
    assert distance(seen[name].latents, exact) <= allowed_error(off_error, torch.bfloat16)
    check = seen[name].report["check"]
    assert (check["calls"], check["notes"]) == (int(name == "default"), [])
    if name == "default":  # they did run: nothing else rounds differently here
        assert not torch.equal(seen[name].latents, seen[f"{name}: off"].latents)
