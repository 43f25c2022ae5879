"""The pack's own source files, parsed once."""

from __future__ import annotations

import ast
import functools
import subprocess
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
CODE = ("speed", "nodes")


@functools.cache
def tracked(*suffixes: str) -> tuple[Path, ...]:
    """Files of the pack with one of these suffixes; what git ignores is not ours."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    if listed.returncode == 0:
        paths = [REPO / line for line in listed.stdout.splitlines()]
    else:  # an unpacked archive
        paths = [p for p in REPO.rglob("*") if not {".venv", ".cache"} & set(p.parts)]
    return tuple(sorted(p for p in paths if p.suffix in suffixes and p.is_file()))


def code_files() -> list[Path]:
    """Python files that the host runs: the entry, nodes/ and speed/."""
    return [p for p in tracked(".py") if p.relative_to(REPO).parts[0] in (*CODE, "__init__.py")]


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


class Import(NamedTuple):
    """One import: where it stands, and what it names from the pack's root ("speed.flags")."""

    path: Path
    line: int
    module: str
    names: tuple[str, ...]
    is_relative: bool
    is_lazy: bool

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(REPO)}:{self.line}"


def imports(path: Path) -> list[Import]:
    package = path.relative_to(REPO).parent.parts
    inside_functions = {
        id(node)
        for function in ast.walk(tree(path))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree(path)):
        lazy = id(node) in inside_functions
        if isinstance(node, ast.Import):
            found += [Import(path, node.lineno, a.name, (), False, lazy) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            module, names = node.module or "", tuple(alias.name for alias in node.names)
            if node.level:
                base = package[: len(package) - node.level + 1]
                module = ".".join([*base, *filter(None, [module])])
            found.append(Import(path, node.lineno, module, names, bool(node.level), lazy))
    return found
