"""Who may import whom, as design.md says. Every import of the pack is read, lazy ones as well."""

import ast
import sys

import pytest
from speed_tier.tests.contracts.sources import REPO, code_files, imports, tree

# Rooms of the pack and what each may import from the others; a room may always import itself.
ROOMS = {
    "nodes": {"surface", "apply", "tiers", "report", "hosts", "comparison", "metrics", "warm_up"},
    # speed/__init__.py: re-exports
    "surface": {"apply", "compile_cache", "vae_run", "tiers", "report", "errors"},
    "apply": {
        *("optimizations", "families", "kernels", "gguf", "patching", "flags", "probe", "tiers"),
        *("timing", "report", "engagement", "self_check", "warm_up", "env", "errors"),
    },
    "engagement": {"optimizations", "families", "patching", "report", "env", "errors"},
    "self_check": {
        *("engagement", "bounds", "families", "flags", "patching", "report", "env", "errors"),
    },
    "warm_up": {"engagement", "report", "env", "errors"},
    "vae_run": {
        "apply",
        "engagement",
        "families",
        "optimizations",
        "errors",
        "flags",
        "patching",
        "report",
        "tiers",
    },
    "hosts": {
        *("gguf", "kernels", "families", "patching", "flags", "timing", "report"),
        *("env", "errors", "apply", "vae_run", "tiers", "optimizations", "warm_up"),
    },
    "optimizations": {
        *("kernels", "gguf", "families", "patching", "flags", "probe", "report", "timing"),
        *("crash_canary", "compile_cache", "cuda_graph", "fused_blocks", "env", "errors"),
    },
    "gguf": {"kernels", "env", "errors"},
    "fused_blocks": {"kernels", "patching", "env", "errors"},
    **{
        room: {"env", "errors"}
        for room in (
            *("families", "patching", "flags", "timing", "report", "kernels"),
            "crash_canary",
        )
    },
    "probe": {"timing", "env", "errors"},
    "cuda_graph": {"flags", "env", "errors"},
    "compile_cache": {"flags", "env", "errors"},
    "tiers": {"env", "errors"},
    "env": {"errors"},
    "bounds": set(),
    "metrics": set(),
    "comparison": {"metrics", "report"},
    "errors": set(),
}
HOSTS_ONLY = {
    *("comfy", "comfy_execution", "comfy_extras", "comfyui_version", "folder_paths", "server"),
    "diffusers",
}
MAY_USE_HOST = ("nodes", "hosts")
# Derived from the host's classes, so they import it at their top; imported late themselves.
BUILT_ON_THE_HOST = {"speed.hosts.comfy_quant", "speed.hosts.comfy_loader"}


def room_of(module: str) -> str:
    """Room of a module named from the pack's root: "speed.gguf.load" is in gguf."""
    parts = module.split(".")
    if parts[0] == "nodes":
        return "nodes"
    if parts == ["speed"]:
        return "surface"
    return parts[1]


def module_of(path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def ours(found):
    """Modules of the pack that an import reaches; "from . import flags" reaches flags."""
    modules = []
    for name in found.names or ("",):
        full = f"{found.module}.{name}" if name else found.module
        path = REPO / full.replace(".", "/")
        is_module = path.with_suffix(".py").exists() or (path / "__init__.py").exists()
        modules.append(full if is_module else found.module)
    return modules


PACK_FILES = [p for p in code_files() if p.parent != REPO]
IDS = [str(p.relative_to(REPO)) for p in PACK_FILES]


def test_there_is_something_to_read():
    assert len(PACK_FILES) > 25
    assert {room_of(module_of(path)) for path in PACK_FILES} <= set(ROOMS)


@pytest.mark.parametrize("path", PACK_FILES, ids=IDS)
def test_rooms_import_only_what_they_may(path):
    room = room_of(module_of(path))
    wrong = [
        f"{found.place}: {room} imports {module}"
        for found in imports(path)
        if found.is_relative
        for module in ours(found)
        if room_of(module) not in ROOMS[room] | {room}
    ]
    assert wrong == []


@pytest.mark.parametrize("path", PACK_FILES, ids=IDS)
def test_imports_of_our_own_are_relative(path):
    """The host has a top-level `nodes` of its own; an absolute import would get that one."""
    own = {"nodes", "speed", "speed_tier", "tests", "bench"}
    absolute = [f for f in imports(path) if not f.is_relative and f.module.split(".")[0] in own]
    assert [f"{found.place}: {found.module}" for found in absolute] == []


@pytest.mark.parametrize("path", PACK_FILES, ids=IDS)
def test_only_hosts_and_nodes_import_the_host_and_only_when_used(path):
    room = room_of(module_of(path))
    for found in imports(path):
        if not found.is_relative and found.module.split(".")[0] in HOSTS_ONLY:
            assert room in MAY_USE_HOST, f"{found.place}: {room} imports {found.module}"
            late = module_of(path) in BUILT_ON_THE_HOST
            assert found.is_lazy or late, f"{found.place}: {found.module} at import time"


@pytest.mark.parametrize("path", PACK_FILES, ids=IDS)
def test_modules_built_on_the_host_are_imported_late(path):
    if module_of(path) in BUILT_ON_THE_HOST:
        return
    for found in imports(path):
        if found.is_relative and BUILT_ON_THE_HOST & set(ours(found)):
            assert found.is_lazy, f"{found.place}: {found.module} at import time"


@pytest.mark.parametrize("path", PACK_FILES, ids=IDS)
def test_heavy_parts_of_torch_and_triton_wait_until_they_are_used(path):
    heavy = ("triton", "torch._dynamo", "torch._inductor", "aiohttp")
    early = [
        f"{found.place}: {found.module}"
        for found in imports(path)
        if not found.is_relative and not found.is_lazy and found.module.startswith(heavy)
    ]
    if path.parent.name == "kernels" and path.stem not in ("__init__", "dispatch", "reference"):
        return  # a kernel file is imported when its kernel is used; test_lean_import watches that
    assert early == []


def test_the_engine_needs_only_what_pyproject_names():
    allowed = {"torch", "packaging", "numpy", "gguf", "safetensors", "triton"}
    allowed |= set(sys.stdlib_module_names) | HOSTS_ONLY | {"aiohttp"}
    other = {
        f"{found.place}: {found.module}"
        for path in PACK_FILES
        for found in imports(path)
        if not found.is_relative and found.module.split(".")[0] not in allowed
    }
    assert other == set()


def test_the_surface_only_re_exports():
    (surface,) = [p for p in PACK_FILES if p.relative_to(REPO).parts == ("speed", "__init__.py")]
    kinds = {type(node) for node in tree(surface).body}
    assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}


def test_the_check_sees_a_forbidden_import(tmp_path, monkeypatch):
    """The check itself: a file of the flags room that reaches for the optimizations."""
    from speed_tier.tests.contracts import sources

    fake = tmp_path / "speed" / "flags.py"
    fake.parent.mkdir()
    fake.write_text("def f():\n    from .optimizations import base\n    import comfy.ops\n")
    monkeypatch.setattr(sources, "REPO", tmp_path)
    relative, absolute = sorted(sources.imports(fake), key=lambda found: found.line)
    assert (relative.module, relative.is_relative, relative.is_lazy) == (
        *("speed.optimizations", True, True),
    )
    assert room_of(relative.module) not in ROOMS["flags"]
    assert (absolute.module, absolute.is_relative) == ("comfy.ops", False)
