"""What the engine finds out about this machine, and the sentence for each thing that is missing."""

import json
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from speed_tier.speed import env
from speed_tier.speed.env import (
    Capabilities,
    c_compiler,
    capabilities,
    disabled_features,
    inductor_problem,
    pack_version,
    too_old_for_compile,
    torch_version,
    triton_problem,
    versions,
)

REPO = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def in_subprocess(code, *paths):
    """Last line that `code` prints, with `paths` first on sys.path."""
    script = f"""
        import sys, types
        sys.path[:0] = {[str(path) for path in paths]!r}
        package = types.ModuleType("speed_tier"); package.__path__ = [{str(REPO)!r}]
        sys.modules["speed_tier"] = package
        from speed_tier.speed import env
    """
    command = [sys.executable, "-c", textwrap.dedent(script) + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_triton_that_is_not_installed_names_interpreter_and_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    problem = triton_problem()
    assert problem.startswith("Triton is not installed; install it into this Python: ")
    assert f"{sys.executable} -m pip install triton" in problem
    assert inductor_problem(torch.device("cuda")) == problem
    assert inductor_problem(CPU) != problem, "the CPU needs no Triton"


def test_the_package_has_another_name_on_windows(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(sys, "platform", "win32")
    assert triton_problem().endswith("-m pip install triton-windows")


@pytest.mark.parametrize(
    "body",
    [
        "raise ImportError('DLL load failed')",
        "raise OSError('libcuda.so.1')",
        "import no_such_module",
        "raise RuntimeError('0 active drivers')",
        "import torch; torch.no_such_attribute",
    ],
)
def test_triton_that_raises_on_import(tmp_path, body, monkeypatch):
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    problem = triton_problem()
    assert problem.startswith("Triton does not import (")
    assert "reinstall it into this Python" in problem


def test_triton_that_raises_on_import_in_a_fresh_process(tmp_path):
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('broken wheel')")
    code = "import torch; print(env.inductor_problem(torch.device('cuda')))"
    problem = in_subprocess(code, tmp_path)
    assert problem.startswith("Triton does not import (RuntimeError: broken wheel); reinstall it")


def test_a_stand_in_for_triton_is_no_triton(monkeypatch):
    """Other packs put an empty module there; it has no spec, and find_spec raises."""
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    assert triton_problem().startswith("Triton is a stand-in that another package made; install")


def test_a_path_without_a_compiler(monkeypatch, tmp_path):
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    assert c_compiler(), "these tests need a compiler, as the README says"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert c_compiler() is None
    assert inductor_problem(CPU) == (
        "torch.compile needs a C++ compiler; found no g++ on PATH. Install g++"
    )


def test_cxx_decides_alone_on_a_cpu_as_in_inductor(monkeypatch, tmp_path):
    with_blank = tmp_path / "my tools"
    with_blank.mkdir()
    (with_blank / "cxx").symlink_to(sys.executable)
    for right in ("sh -O2", str(with_blank / "cxx")):
        monkeypatch.setenv("CXX", right)
        assert c_compiler() == right
    monkeypatch.setenv("CXX", "/no/such/g++")
    assert c_compiler() is None
    assert inductor_problem(CPU) == (
        "torch.compile needs a compiler; CXX names /no/such/g++, which does not exist"
    )
    monkeypatch.setenv("CXX", "  ")
    assert c_compiler() not in (None, "  ")


def test_gcc_alone_is_enough_for_a_gpu_and_too_little_for_a_cpu(monkeypatch, tmp_path):
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "gcc").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert c_compiler("cpu") is None
    assert c_compiler("cuda") == str(tmp_path / "gcc")


@pytest.mark.parametrize("found", ["2.6", "2.5.1", "2.7.0.dev20250101", "1.13"])
def test_a_torch_that_is_too_old_says_both_versions(monkeypatch, found):
    problem = too_old_for_compile(Version(found))
    assert problem == f"Speed Tier needs torch 2.7 or newer to compile; found {Version(found)}"
    monkeypatch.setattr(env, "torch_version", lambda: Version(found))
    assert inductor_problem(CPU) == problem


@pytest.mark.parametrize("found", ["2.7", "2.10.0", "2.14.1"])
def test_a_new_torch_is_new_enough(found):
    assert too_old_for_compile(Version(found)) is None  # "2.10" is not older than "2.7"


def test_local_build_tags_do_not_matter(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu130")
    assert torch_version() == Version("2.9.1")


def test_mps_is_declined_by_name():
    assert inductor_problem(torch.device("mps")) == (
        "regional compile is not used on MPS; found an MPS device"
    )


def test_capabilities_of_the_cpu():
    found = capabilities(CPU)
    assert (found.device_type, found.is_nvidia, found.compute_capability) == ("cpu", False, None)
    assert found.torch_version == torch_version()


def test_rocm_is_not_nvidia():
    assert not Capabilities("cuda", "MI300X", True, None, torch_version()).is_nvidia
    assert Capabilities("cuda", "H200", False, (9, 0), torch_version()).is_nvidia


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, set()),
        ("", set()),
        ("tf32", {"tf32"}),
        (" tf32 ,regional_compile,, ", {"tf32", "regional_compile"}),
    ],
)
def test_disabled_features(monkeypatch, value, names):
    if value is None:
        monkeypatch.delenv("SPEED_TIER_DISABLE", raising=False)
    else:
        monkeypatch.setenv("SPEED_TIER_DISABLE", value)
    assert disabled_features() == names


def test_versions_are_plain_data_and_the_pack_has_one():
    found = versions()
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"speed_tier", "torch", "triton", "python", "cuda", "hip", "platform"}
    assert f'version = "{pack_version()}"' in (REPO / "pyproject.toml").read_text()
    assert Version(pack_version())
