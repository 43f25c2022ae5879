"""The self-check in a real host: planted faults are caught and blamed, clean runs are not.

`SPEED_TIER_CLEAN_RUNS=500` asks for more clean runs than the suite has time for.
"""

import os

import pytest
from speed_tier.tests.host.in_process import run_each
from speed_tier.tests.host.self_check_cases import (
    DTYPES,
    PLANTED,
    check_caught,
    check_clean,
    check_remembered,
    check_stale,
    clean_steps,
    planted_steps,
)

pytestmark = pytest.mark.host
ARCHS = ("zimage", "qwen")
CLEAN_RUNS = int(os.environ.get("SPEED_TIER_CLEAN_RUNS", "4"))
BACKEND = "eager" if CLEAN_RUNS < 100 else "inductor"  # which rounds, and takes its time


def clean(arch):
    return list(clean_steps(arch, CLEAN_RUNS, BACKEND))


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    return run_each(
        lambda arch: [*planted_steps(arch), *clean(arch)], ARCHS, tmp_path_factory.mktemp
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", [name for name, *_ in PLANTED])
def test_a_planted_fault_is_caught_and_blamed(sessions, arch, name):
    check_caught(sessions[arch], name)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", [name for name, *_ in PLANTED])
def test_the_next_run_does_without_it_and_is_not_compared_again(sessions, arch, name):
    check_remembered(sessions[arch], name)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_stale_graph_is_caught_and_blamed(sessions, arch):
    check_stale(sessions[arch])


@pytest.mark.parametrize("arch", ARCHS)
def test_clean_runs_raise_no_alarm(sessions, arch):
    steps = clean(arch)
    compared = 0
    for step in steps:
        run = sessions[arch][step.name]
        check = check_clean(run, DTYPES[step.dtype])
        compared += check["calls"]
        assert "regional_compile" in run.engaged
        print(step.name, step.dtype, f"{check['block_error']:.2e} {check['output_error']:.2e}")
    assert compared >= 0.9 * len(steps)
