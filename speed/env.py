"""Versions, device capabilities and the pack's two environment variables."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass

import torch
from packaging.version import Version

MIN_TORCH = Version("2.7")

# A broken native package raises whatever its loader raises; these are the kinds seen in reports.
IMPORT_FAILURES = (
    ImportError,
    OSError,
    RuntimeError,
    AttributeError,
    NameError,
    TypeError,
    ValueError,
    SyntaxError,
)


@dataclass(frozen=True)
class Capabilities:
    """What one device can do, as far as an optimization needs to know.

    Attributes:
        device_type: "cuda", "cpu", "mps", "xpu", as torch names it.
        device_name: The card's name, or the machine's architecture.
        is_rocm: True on a ROCm build, where the device type is "cuda" as well.
        compute_capability: (major, minor) of an NVIDIA card, else None.
        torch_version: The running torch.
    """

    device_type: str
    device_name: str
    is_rocm: bool
    compute_capability: tuple[int, int] | None
    torch_version: Version

    @property
    def is_nvidia(self) -> bool:
        return self.device_type == "cuda" and not self.is_rocm


def torch_version() -> Version:
    return Version(torch.__version__.split("+")[0])


@functools.lru_cache(maxsize=16)
def capabilities(device: torch.device) -> Capabilities:
    """Capabilities of `device`; the first call for a CUDA device may start CUDA."""
    is_rocm = torch.version.hip is not None
    compute_capability = None
    name = platform.machine()
    if device.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
        if not is_rocm:
            compute_capability = torch.cuda.get_device_capability(device)
    return Capabilities(device.type, name, is_rocm, compute_capability, torch_version())


def too_old_for_compile(found: Version) -> str | None:
    if found < MIN_TORCH:
        return f"Speed Tier needs torch {MIN_TORCH} or newer to compile; found {found}"
    return None


def triton_problem() -> str | None:
    """Why Triton cannot be used in this interpreter, or None. Imports Triton."""
    package = "triton-windows" if sys.platform == "win32" else "triton"
    hint = f"install it into this Python: {sys.executable} -m pip install {package}"
    try:
        if importlib.util.find_spec("triton") is None:
            return f"Triton is not installed; {hint}"
    except ValueError:
        return f"Triton is a stand-in that another package made; {hint}"
    try:
        import triton  # noqa: F401
    except IMPORT_FAILURES as error:
        return f"Triton does not import ({type(error).__name__}: {error}); re{hint}"
    return None


def inductor_problem(device: torch.device) -> str | None:
    """Why Inductor cannot build code for `device` here, or None.

    Checks what can be known without compiling; a build that fails all the same is caught at the
    first forward and reported there.
    """
    if too_old := too_old_for_compile(torch_version()):
        return too_old
    if device.type == "mps":
        return "regional compile is not used on MPS; found an MPS device"
    if device.type != "cpu" and (problem := triton_problem()):
        return problem
    if sys.platform != "win32" and not c_compiler(device.type):
        variable, name = _compiler_names(device.type)
        if asked := os.environ.get(variable):
            return f"torch.compile needs a compiler; {variable} names {asked}, which does not exist"
        return f"torch.compile needs a C++ compiler; found no {name} on PATH. Install g++"
    return None


def _compiler_names(device_type: str) -> tuple[str, str]:
    """The variable and the command that are asked: Inductor on a CPU, Triton on a GPU."""
    if device_type == "cpu":
        return "CXX", "clang++" if sys.platform == "darwin" else "g++"
    return "CC", "gcc"


def c_compiler(device_type: str = "cpu") -> str | None:
    """The compiler that Inductor (cpu) or Triton's launcher (any other device) will run, or None.

    A variable that is set decides alone, as it does there.
    """
    variable, name = _compiler_names(device_type)
    if asked := os.environ.get(variable, "").strip():
        # A compiler with flags behind it, or a path that may hold a blank itself.
        return asked if shutil.which(asked) or shutil.which(asked.split()[0]) else None
    names = (name,) if device_type == "cpu" else (name, "clang", "cc")
    return next((found for name in names if (found := shutil.which(name))), None)


def disabled_features() -> frozenset[str]:
    """Feature names in SPEED_TIER_DISABLE, a comma-separated list."""
    names = os.environ.get("SPEED_TIER_DISABLE", "").split(",")
    return frozenset(name.strip() for name in names if name.strip())


@functools.lru_cache(maxsize=1)
def pack_version() -> str:
    """Version from pyproject.toml, the only place that holds it."""
    path = os.path.join(os.path.dirname(os.path.dirname(__file__)), "pyproject.toml")
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.startswith("version"):
                return line.split('"')[1]
    return "unknown"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions that belong in a bug report; None where a package is absent."""
    return {
        "speed_tier": pack_version(),
        "torch": torch.__version__,
        "triton": _installed("triton") or _installed("triton-windows"),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "platform": platform.platform(terse=True),
    }
