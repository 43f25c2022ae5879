"""Importing the pack changes no torch flag, starts no CUDA and loads neither Triton nor a host."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

SCRIPT = """
    import json, os, sys, types
    package = types.ModuleType("speed_tier"); package.__path__ = [{repo!r}]
    sys.modules["speed_tier"] = package
    import torch
    from speed_tier.tests.speed.process import full_state
    before, modules = full_state(), set(sys.modules)
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    import importlib.util
    spec = importlib.util.spec_from_file_location("pack_entry", {entry!r})
    entry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(entry)
    by_entry = [name for name in vars(entry) if not name.startswith("__")]
    by_entry += [name for name in set(sys.modules) - modules if name.startswith("speed_tier.")]
    {imports}
    print(json.dumps({{
        "entry": by_entry,
        "same_state": full_state() == before,
        "changed": [k for k, v in full_state().items() if v != before[k]],
        "new": sorted(set(sys.modules) - modules),
        "cuda": torch.cuda.is_initialized(),
        "hooks": len(torch.nn.modules.module._global_forward_hooks) - hooks,
        "handlers": len(__import__("logging").getLogger("speed_tier").handlers),
    }}))
"""

WHOLE_PACK = (
    "import speed_tier.speed, speed_tier.speed.hosts.comfy, speed_tier.nodes, "
    "speed_tier.speed.hosts.diffusers, speed_tier.speed.gguf"
)


@pytest.fixture(scope="module")
def imported():
    script = textwrap.dedent(
        SCRIPT.format(repo=str(REPO), entry=str(REPO / "__init__.py"), imports=WHOLE_PACK)
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "importing the pack says something"
    return json.loads(done.stdout)


def test_no_setting_of_the_process_changes(imported):
    assert imported["changed"] == []
    assert imported["same_state"]
    assert (imported["hooks"], imported["handlers"]) == (0, 0)


def test_cuda_is_not_started(imported):
    assert imported["cuda"] is False


@pytest.mark.parametrize(
    "package",
    ["triton", "comfy", "diffusers", "aiohttp", "torch._dynamo", "torch._inductor", "server"],
)
def test_nothing_heavy_is_loaded(imported, package):
    loaded = [name for name in imported["new"] if f"{name}.".startswith(f"{package}.")]
    assert loaded == []


def test_the_pack_itself_was_loaded(imported):
    ours = {name for name in imported["new"] if name.startswith("speed_tier.")}
    assert {"speed_tier.nodes.routes", "speed_tier.speed.optimizations.regional_compile"} <= ours


def test_the_entry_outside_the_host_does_nothing(imported):
    assert imported["entry"] == []
