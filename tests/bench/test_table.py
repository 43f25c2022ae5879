"""The README's speed table: what the rows give, and nothing that the rows do not give."""

import json
import subprocess
import sys

import pytest
from speed_tier.bench import table
from speed_tier.tests.contracts.sources import REPO


def row(runner, ms, commit="aaa", **more):
    facts = {
        "gpu": "A card",
        "commit": commit,
        "allocator": "native",
        "host": "0.3.75",
        "command": "python -m bench.tiers",
        "versions": {"torch": "2.11"},
        "family": "z_image",
        "format": "bf16" if runner.startswith("dense") else "Q4_K_M",
        "batch": 1,
        "cfg": 1.0,
        "layers": None,
        "width": 1024,
        "height": 1024,
        "first_run_tax_s": 0.25,
    }
    return {**facts, "runner": runner, "ms_p50": ms, **more}


def cells(rows, index=0):
    """The cells of one line of the table."""
    line = table.table(rows).splitlines()[2 + index]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_readme_has_the_table_that_the_rows_give():
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    fresh = table.written(readme, table.table(table.read()))
    assert readme == fresh, "run: python -m bench.table --write README.md"
    assert "| Z-Image 1024x1024, Q4_K_M |" in readme


def test_ratios_are_against_the_packs_own_loader_in_one_run():
    rows = [row("off", 200.0), row("default", 100.0), row("comfyui-gguf", 250.0), row("max", 20.0)]
    assert cells(rows) == [
        "Z-Image 1024x1024, Q4_K_M",
        "250",
        "200 (1.25x)",
        "100 (2.50x)",
        "20 (12.5x)",
        "0.2",
        "0.2",
        "`aaa`",
    ]


def test_a_newer_row_replaces_an_older_one():
    rows = [
        *(row("comfyui-gguf", 250.0), row("default", 100.0)),
        *(row("comfyui-gguf", 240.0, "bbb"), row("default", 80.0, "bbb")),
    ]
    assert cells(rows)[1:4] == ["240", "", "80 (3.00x)"]
    assert cells(rows)[-1] == "`bbb`"


@pytest.mark.parametrize(
    "other", [{"commit": "bbb"}, {"started": "later"}, {"command": "x"}, {"host": "0.33"}]
)
def test_no_ratio_across_runs(other):
    rows = [row("comfyui-gguf", 250.0), row("off", 200.0), row("default", 100.0, **other)]
    assert cells(rows)[3] == "100"
    assert cells(rows)[2].startswith("200 (1.25x)")


def test_a_cell_of_another_commit_names_it_and_keeps_its_own_ratio():
    rows = [
        *(row("comfyui-gguf", 250.0), row("max", 100.0, first_run_tax_s=9.0)),
        *(row("comfyui-gguf", 240.0, "bbb"), row("default", 80.0, "bbb")),
    ]
    assert cells(rows)[1:] == [
        *("240", "", "80 (3.00x)", "100 (2.50x) at `aaa`", "0.2", "9.0 at `aaa`", "`bbb`"),
    ]


def test_dense_weights_are_against_off():
    rows = [row("dense off", 120.0), row("dense default", 96.0)]
    assert cells(rows)[:5] == ["Z-Image 1024x1024, bf16", "", "120", "96 (1.25x)", ""]


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": "cpu"},
        {"layers": 2},
        {"batch": 4},
        {"cfg": 4.0},
        {"width": 512},
    ],
)
def test_rows_that_are_not_for_the_table(tmp_path, other):
    rows = [row("comfyui-gguf", 250.0), row("default", 1.0, **other)]
    failed = {k: v for k, v in row("off", 1.0).items() if k != "ms_p50"}
    lines = [json.dumps(r) for r in [*rows, {**failed, "failed": "out of memory"}]]
    (tmp_path / "tiers.jsonl").write_text("\n".join(lines) + "\n")
    assert cells(table.read(tmp_path))[1:5] == ["250", "", "", ""]


def test_lines_are_by_model_size_and_format():
    rows = [
        row("default", 1.0, family="qwen_image"),
        row("dense off", 2.0),
        row("off", 3.0, width=512, height=512),
        row("off", 4.0),
    ]
    titles = [cells(rows, i)[0] for i in range(4)]
    assert titles == [
        "Z-Image 1024x1024, Q4_K_M",
        "Z-Image 1024x1024, bf16",
        "Z-Image 512x512, Q4_K_M",
        "Qwen-Image 1024x1024, Q4_K_M",
    ]


def test_each_card_has_a_table_and_its_conditions():
    rows = [row("off", 1.0), row("off", 2.0, gpu="Another", host="0.33", steps=20)]
    first, second = table.table(rows).split("\n\n|")
    assert first.startswith("| A card, ms a step |")
    assert "ComfyUI 0.3.75" in first
    assert "8 Euler steps" in first
    assert second.startswith(" Another, ms a step |")
    assert "ComfyUI 0.33, `native`" in second
    assert "20 Euler steps" in second


def test_what_is_around_the_table_stays(tmp_path):
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    assert table.written(text, "new") == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"
    for broken in ("no markers", table.BEGIN, f"{table.END} {table.BEGIN}"):
        with pytest.raises(ValueError, match="needs one <!-- table"):
            table.written(broken, "new")


def test_the_command_writes_the_file_and_says_when_there_are_no_rows(tmp_path):
    (tmp_path / "tiers.jsonl").write_text(json.dumps(row("off", 7.0)) + "\n")
    place = tmp_path / "R.md"
    place.write_text(f"{table.BEGIN}\n{table.END}\n")
    command = [sys.executable, "-m", "bench.table", "--results"]
    subprocess.run([*command, tmp_path, "--write", place], cwd=REPO, check=True)
    assert "| Z-Image 1024x1024, Q4_K_M |  | 7 |" in place.read_text()
    (tmp_path / "empty").mkdir()
    done = subprocess.run([*command, tmp_path / "empty"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no rows for the table" in done.stderr
