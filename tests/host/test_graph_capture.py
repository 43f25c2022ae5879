"""What a graph is made of and for in a real host: its arguments, its options, its LoRA.

The device is a stand-in that replays calls, so a replay's output is that of a plain call if, and
only if, everything that the forward reads is an argument, a weight or part of the signature.
"""

import pytest
import torch
from speed_tier.tests.host.in_process import Lora, Step, run_each

pytestmark = pytest.mark.host
ARCHS = ("zimage", "qwen")
COMMON = {"steps": 4, "layers": 1, "switches": {"tf32": "off"}}
LORA = (Lora("attention", 0.5),)
# In order: (name, what differs, graphs captured, calls replayed). Each beside an untiered run.
RUNS = [
    ("first", {}, 1, 2),
    ("again", {}, 0, 4),
    ("another size", {"width": 48}, 1, 2),
    ("two pictures", {"batch": 2}, 1, 2),
    ("two conditions, as two pictures are", {"cfg": 2.0}, 0, 4),
    ("another prompt", {"tokens": 40}, 1, 2),
    ("and back", {}, 0, 4),
    ("LoRA", {"loras": LORA}, 1, 2),
    ("LoRA at another strength", {"loras": (Lora("attention", 1.0),)}, 1, 2),
    ("without LoRA", {}, 1, 2),
]


def steps_of(arch):
    steps = []
    for name, more, *_ in RUNS:
        steps.append(Step(f"{name}: off", arch, tier="", **{**COMMON, **more, "switches": {}}))
        steps.append(Step(name, arch, tier="default", graphs=True, **COMMON, **more))
    return steps


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    return run_each(steps_of, ARCHS, tmp_path_factory.mktemp)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("name", "captured", "replayed"), [(n, c, r) for n, _, c, r in RUNS])
def test_a_replay_is_the_call(sessions, arch, name, captured, replayed):
    seen = sessions[arch]
    graphs = seen[name].report["graphs"]
    assert torch.equal(seen[name].latents, seen[f"{name}: off"].latents), graphs
    assert (graphs["captured"], graphs["replayed"]) == (captured, replayed), graphs
