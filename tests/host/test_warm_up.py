"""Sizes that Speed Tier (Advanced) prepares: nothing is left to do when they are used."""

import pytest
import torch
from speed_tier.tests.host.graphs import tiny_run
from speed_tier.tests.host.in_process import Step, run_each
from speed_tier.tests.host.server import HostServer, PromptFailedError

pytestmark = pytest.mark.host
ARCHS = ("zimage", "qwen")
COMMON = {"steps": 4, "layers": 1, "switches": {"tf32": "off"}}
WIDE, TALL = {"width": 48, "height": 16}, {"width": 16, "height": 40}
HERE = {"width": 32, "height": 32}
SIZES = "384x128, 128x320"
# A model of its own for each tier: what one has compiled is compiled for the other.
TIERS = {"default": {"graphs": True}, "max": {"dtype": "fp32", "rounded": True}}


def steps_of(arch):
    for tier, more in TIERS.items():
        shared = {**COMMON, **more}
        for name, size in {"here": HERE, "wide": WIDE, "tall": TALL}.items():
            off = {**shared, "graphs": False, "switches": {}, **size}
            yield Step(f"{tier} {name}: off", arch, tier="", **off)
        yield Step(f"{tier} here", arch, tier=tier, warm_up=SIZES, **shared, **HERE)
        yield Step(f"{tier} again", arch, tier=tier, warm_up=SIZES, **shared, **HERE)
        yield Step(f"{tier} wide", arch, tier=tier, **shared, **WIDE)
        yield Step(f"{tier} tall", arch, tier=tier, **shared, **TALL)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    return run_each(lambda arch: list(steps_of(arch)), ARCHS, tmp_path_factory.mktemp)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", ["here", "wide", "tall"])
def test_latents_are_those_of_off(sessions, arch, tier, name):
    seen = sessions[arch]
    assert torch.equal(seen[f"{tier} {name}"].latents, seen[f"{tier} {name}: off"].latents)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tier", TIERS)
def test_the_run_that_prepares_is_its_own_size(sessions, arch, tier):
    report = sessions[arch][f"{tier} here"].report
    shape = report["shape"]
    assert shape["evaluations"] == COMMON["steps"]
    assert shape["latent"][-2:] == [32, 32]
    (note,) = [note for note in report["notes"] if "prepared" in note]
    assert note.startswith("prepared in the first step: 384x128 (")
    assert ", 128x320 (" in note


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tier", TIERS)
def test_the_next_run_has_nothing_to_prepare(sessions, arch, tier):
    again = sessions[arch][f"{tier} again"]
    assert not [note for note in again.report["notes"] if "prepared" in note]
    assert again.graphs == 0
    assert again.report["graphs"]["captured"] == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tier", TIERS)
def test_preparing_is_part_of_the_first_step(sessions, arch, tier):
    report = sessions[arch][f"{tier} here"].report
    (note,) = [note for note in report["notes"] if "prepared" in note]
    spent_s = sum(float(part.split(" s")[0]) for part in note.split("(")[1:])
    assert report["timing"]["first_step_s"] >= spent_s - 0.1  # each is rounded


@pytest.mark.parametrize("arch", ARCHS)
def test_graphs_of_prepared_sizes_are_there(sessions, arch):
    seen = sessions[arch]
    assert seen["default here"].report["graphs"]["captured"] == 3
    for name in ("wide", "tall"):
        graphs = seen[f"default {name}"].report["graphs"]
        assert (graphs["captured"], graphs["replayed"]) == (0, COMMON["steps"])
        assert seen[f"default {name}"].report["check"]["calls"] == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_code_for_prepared_sizes_is_there(sessions, arch):
    seen = sessions[arch]
    assert sum(seen["max here"].compiles.values()) > 0
    for name in ("wide", "tall"):
        assert sum(seen[f"max {name}"].compiles.values()) == 0
        assert seen[f"max {name}"].graphs == 0


def test_the_page_hears_of_it(server: HostServer) -> None:
    mark = server.events.mark()
    advanced = {"warm_up_sizes": "128x64", "fused_qkv": "on"}  # which engages on a CPU as well
    graph = tiny_run("qwen", "default", advanced=advanced, report=True, width=64, height=64)
    result = server.run(graph)
    assert "prepared in the first step: 128x64 (" in result.ui("report", "text")
    phases = [e.data.get("phase") for e in server.events.since(mark, "speed_tier.update")]
    assert "preparing" in phases
    assert phases.index("preparing") < len(phases) - 1 - phases[::-1].index("sampling")


def test_a_model_of_another_family_is_left_alone(server: HostServer) -> None:
    plain = server.run(tiny_run("other", None)).ui("sink", "sha256")
    graph = tiny_run("other", "max", advanced={"warm_up_sizes": "128x64"}, report=True)
    result = server.run(graph)
    assert result.ui("sink", "sha256") == plain
    assert "prepared" not in result.ui("report", "text")


def test_a_size_that_is_none_is_refused_before_anything_runs(server: HostServer) -> None:
    graph = tiny_run("zimage", "default", advanced={"warm_up_sizes": "1000x1024"})
    with pytest.raises(PromptFailedError, match=r"rejected.*multiples of 16.*1000x1024"):
        server.run(graph)
