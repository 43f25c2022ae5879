"""The house rules that a machine can read."""

import ast
import re

import pytest
from speed_tier.nodes.speed_tier import FEATURE_TOOLTIPS
from speed_tier.speed.families import FAMILIES
from speed_tier.speed.optimizations import OPTIMIZATIONS, VAE_OPTIMIZATIONS
from speed_tier.speed.optimizations.base import Fidelity
from speed_tier.tests.contracts.sources import REPO, code_files, tracked, tree

SOURCES = tracked(".py", ".js", ".mjs")
SPEED = REPO / "speed"
HELPERS = (
    *("base", "call_mode", "compile_config", "dynamo", "graph_rules", "graph_store"),
    "measured",
)
LEVERS = sorted(
    path
    for path in (SPEED / "optimizations").glob("*.py")
    if path.stem not in ("__init__", *HELPERS)
)
EVERY_ROW = tuple({row.name: row for row in OPTIMIZATIONS + VAE_OPTIMIZATIONS}.values())
DOC_LINES = ("Changes:", "Faster because:", "Fidelity:", "Process-wide:", "Declines:")


def names(paths):
    return [str(path.relative_to(REPO)) for path in paths]


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_no_file_is_longer_than_500_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500


def is_broad(handler):
    """Whether an except clause takes everything and does not hand it on."""
    caught = handler.type
    parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    broad = caught is None or any(
        isinstance(part, ast.Name) and part.id in ("Exception", "BaseException") for part in parts
    )
    ends_in_raise = isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None
    return broad and not ends_in_raise


@pytest.mark.parametrize("path", code_files(), ids=names(code_files()))
def test_broad_except_stands_in_apply_only(path):
    if path == SPEED / "apply.py":
        return
    broad = [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    ]
    assert broad == []


@pytest.mark.parametrize("path", code_files(), ids=names(code_files()))
def test_nothing_prints_or_sets_up_logging(path):
    called = {
        node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute))
    }
    assert not called & {"print", "basicConfig", "breakpoint"}


@pytest.mark.parametrize("path", code_files(), ids=names(code_files()))
def test_loggers_are_named_after_the_pack(path):
    for name in re.findall(r"getLogger\(([^)]*)\)", path.read_text(encoding="utf-8")):
        assert name.startswith('"speed_tier.'), name


@pytest.mark.parametrize("path", code_files(), ids=names(code_files()))
def test_every_module_and_public_class_of_the_engine_has_a_docstring(path):
    assert ast.get_docstring(tree(path))


@pytest.mark.parametrize("path", code_files(), ids=names(code_files()))
def test_only_patching_and_flags_assign_on_what_is_not_ours(path):
    """setattr and .data assignment are the two doors; a direct one elsewhere is a review stop."""
    if path.stem in ("patching", "flags") or path.parent.name == "gguf":
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "setattr", f"line {node.lineno}"
        if isinstance(node, ast.Assign):
            for target in node.targets:
                assert not (isinstance(target, ast.Attribute) and target.attr == "data")


def test_two_environment_variables_in_all():
    asked = set()
    for path in code_files():
        asked |= set(re.findall(r"\bSPEED_TIER_[A-Z]+\b", path.read_text(encoding="utf-8")))
    assert asked <= {"SPEED_TIER_DISABLE", "SPEED_TIER_LOG"}


@pytest.mark.parametrize("path", LEVERS, ids=names(LEVERS))
def test_an_optimization_says_its_five_lines_in_order(path):
    found = [
        line.split(":")[0] + ":"
        for line in ast.get_docstring(tree(path)).splitlines()
        if line.startswith(DOC_LINES)
    ]
    assert tuple(found) == DOC_LINES


def test_every_optimization_file_is_a_row_and_every_row_a_file():
    assert [path.stem for path in LEVERS] == sorted(row.name for row in EVERY_ROW)


@pytest.mark.parametrize("row", EVERY_ROW, ids=lambda row: row.name)
def test_a_row_keeps_the_contract(row):
    assert isinstance(row.fidelity, Fidelity)
    for method in ("check", "install", "release"):
        assert callable(getattr(row, method))
    assert hash(row) == hash(type(row)()), "rows are frozen values"


def test_every_feature_of_a_transformer_has_a_tooltip_and_no_tooltip_is_left_over():
    assert set(FEATURE_TOOLTIPS) == {row.name for row in OPTIMIZATIONS}
    for text in FEATURE_TOOLTIPS.values():
        assert text.endswith(".")


def test_one_test_file_for_each_optimization_and_family():
    tests = REPO / "tests" / "speed"
    missing = [
        *(p.stem for p in LEVERS if not (tests / "optimizations" / f"test_{p.stem}.py").exists()),
        *(f.name for f in FAMILIES if not (tests / "families" / f"test_{f.name}.py").exists()),
    ]
    assert missing == []


def test_every_module_of_the_engine_has_its_test_file():
    modules = [p for p in SPEED.glob("*.py") if p.stem not in ("__init__", "errors")]
    tests = {p.stem for p in (REPO / "tests" / "speed").glob("test_*.py")}
    assert [p.stem for p in modules if f"test_{p.stem}" not in tests] == []


@pytest.mark.parametrize(
    "path",
    [
        p
        for p in tracked(".py")
        if p.name.startswith("test_") and not {"test_nodes", "browser"} & set(p.parts)
    ],
    ids=lambda path: str(path.relative_to(REPO)),
)
def test_every_test_asserts_something(path):
    def checks(function):
        return any(
            isinstance(node, ast.Assert)
            or (isinstance(node, ast.Call) and "raises" in ast.unparse(node.func))
            or (
                isinstance(node, ast.Call)
                and re.search("assert|check|expect", ast.unparse(node.func))
            )
            for node in ast.walk(function)
        )

    silent = [
        node.name
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not checks(node)
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("except Exception:\n    pass", True),
        ("except:\n    pass", True),
        ("except (ValueError, BaseException):\n    x = 1", True),
        ("except BaseException:\n    undo()\n    raise", False),
        ("except ValueError:\n    pass", False),
    ],
)
def test_the_check_for_broad_excepts_itself(source, expected):
    module = ast.parse(f"try:\n    pass\n{source}")
    (handler,) = [node for node in ast.walk(module) if isinstance(node, ast.ExceptHandler)]
    assert is_broad(handler) is expected
