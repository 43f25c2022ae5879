"""Faults for the self-check to find and runs it has to pass, with what either must show.

Steps of in_process.py, and plain assertions on what they showed: for the tests on a CPU and for
the script on a real card.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from speed_tier.speed.bounds import check_bounds
from speed_tier.tests.host.in_process import Lora, Seen, Step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Nothing that rounds: a run's latents have to be those of off, bit for bit.
ROUNDING = ("tf32", "eager_patches", "attention_backend", "fused_qkv")
EXACT = dict.fromkeys(ROUNDING, "off")
COMMON: dict[str, Any] = {"steps": 4, "layers": 2, "height": 16, "width": 24}
IMAGE_TOKENS = 16 * 24 // 4
# (name, what is planted, what of the step differs)
PLANTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("a block scaled by 1.01", {"kind": "scaled", "block": 1}, {}),
    ("the last block scaled by 1.01, bf16", {"kind": "scaled", "block": -1}, {"dtype": "bf16"}),
    # Compiled code is captured at the fifth call of a size, on a real card.
    ("noise in every block", {"kind": "noise"}, {"tier": "max", "cfg": 2.0, "steps": 8}),
    ("NaN at one size", {"kind": "NaN at one size", "width": IMAGE_TOKENS}, {"batch": 2}),
    ("NaN from a later step on", {"kind": "NaN later", "block": 0}, {"steps": 8}),
    (
        "NaN later, LoRA",
        {"kind": "NaN later", "block": 1},
        {"steps": 8, "loras": (Lora("attention", 0.5),)},
    ),
]


def captured(name: str) -> bool:
    """A fault that counts calls gives a graph's replay another number than its call."""
    return "later" not in name


def planted_steps(arch: str) -> Iterator[Step]:
    for name, fault, more in PLANTED:
        given = {**COMMON, "tier": "default", **more, "fault": fault, "graphs": captured(name)}
        switches = EXACT if captured(name) else {**EXACT, "graph_capture": "off"}
        yield Step(f"{name}: off", arch, **{**given, "tier": "", "graphs": False})
        yield Step(name, arch, **given, switches=switches)
        yield Step(f"{name}: again", arch, **given, switches=switches)
    given = {**COMMON, "stale": True}
    yield Step("stale: off", arch, **given, tier="")
    yield Step("stale", arch, **given, tier="default", graphs=True, switches=EXACT)
    yield Step("stale: again", arch, **given, tier="default", graphs=True, switches=EXACT)


def clean_steps(arch: str, count: int, backend: str, graphs: bool = False) -> Iterator[Step]:
    """Random runs in max, compiled and rounding."""
    draw = random.Random(7)
    for number in range(count):
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
            compile={"backend": backend},
            graphs=graphs,
        )


def check_caught(seen: Mapping[str, Seen], name: str) -> None:
    """The fault is blamed, and the run's latents are those of off."""
    run = seen[name]
    assert run.report is not None
    assert torch.equal(run.latents, seen[f"{name}: off"].latents)
    planted = run.feature("planted")
    assert planted["state"] == "fell_back"
    assert planted["reason"].startswith("dropped by the self-check: ")
    assert run.engaged == seen[f"{name}: again"].engaged
    assert ("graph_capture" in run.engaged) is captured(name)
    assert run.report["check"]["restarts"] == (not captured(name))
    assert [notice["kind"] for notice in run.report["notices"]].count("fell_back") >= 1


def check_remembered(seen: Mapping[str, Seen], name: str) -> None:
    """The next run goes without what was at fault, and is not compared again."""
    again = seen[f"{name}: again"]
    assert again.report is not None
    assert torch.equal(again.latents, seen[f"{name}: off"].latents)
    assert again.feature("planted")["state"] == "skipped"
    assert again.report["notices"] == []
    assert again.report["check"]["calls"] == 0


def check_stale(seen: Mapping[str, Seen]) -> None:
    """A graph that does not see new inputs is blamed, and given up."""
    assert torch.equal(seen["stale"].latents, seen["stale: off"].latents)
    graphs = seen["stale"].feature("graph_capture")
    assert graphs["state"] == "fell_back"
    assert graphs["reason"] == "a replay did not give what the call itself gives"
    assert torch.equal(seen["stale: again"].latents, seen["stale: off"].latents)
    assert seen["stale: again"].feature("graph_capture")["state"] == "skipped"


def check_clean(run: Seen, dtype: torch.dtype) -> dict[str, Any]:
    """No alarm; returns what the check has to say about the run."""
    assert run.report is not None
    assert torch.isfinite(run.latents).all()
    assert {f["name"] for f in run.report["features"] if f["state"] == "fell_back"} == set()
    check: dict[str, Any] = run.report["check"]
    assert (check["restarts"], check["notes"], check["unchecked"]) == (0, [], "")
    assert check["output_error"] <= check_bounds(dtype, "tf32" in run.engaged).output
    return check
