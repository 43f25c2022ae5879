"""The README's speed table, printed from the rows in bench/results.

    python -m bench.table                      print it
    python -m bench.table --write README.md    put it between the two marker comments

One line a model, size and format, one cell a tier: the newest row there is. A ratio stands only
where both of its figures come from one run of the benchmark, and a cell that was measured at
another commit than its line names that commit. Rows of fewer layers, another batch, two conditions
a step or no card are not for this table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "bench" / "results"
BEGIN, END = "<!-- table: bench -->", "<!-- end of table: bench -->"
Row = dict[str, Any]

NAMES = {"z_image": "Z-Image", "qwen_image": "Qwen-Image"}
# Columns of the table, with the runner that fills each: of GGUF files, and of dense weights.
COLUMNS = (
    ("ComfyUI-GGUF", "comfyui-gguf", ""),
    ("off", "off", "dense off"),
    ("default", "default", "dense default"),
    ("max", "max", "dense max"),
)
# What the ratios are against.
BASELINES = {"gguf": "comfyui-gguf", "dense": "dense off"}
DEFAULT_STEPS = 8  # of rows from before the field


def read(folder: Path = RESULTS) -> list[Row]:
    """Rows of every benchmark of whole models, oldest first."""
    rows = []
    for path in sorted(folder.glob("tiers*.jsonl")):
        rows += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [row for row in rows if _belongs(row)]


def _belongs(row: Row) -> bool:
    return (
        row["gpu"] != "cpu"
        and "ms_p50" in row
        and row.get("layers") is None
        and row["batch"] == 1
        and row.get("cfg") in (None, 1.0)
        and row["width"] == row["height"]
    )


def run_of(row: Row) -> tuple[str, ...]:
    """What two rows share that were measured in one process."""
    facts = ("gpu", "commit", "allocator", "host", "command", "started")
    return (*(str(row.get(name, "")) for name in facts), row["versions"]["torch"])


def _newest(rows: Iterable[Row], runner: str) -> Row | None:
    return next((row for row in reversed(list(rows)) if row["runner"] == runner), None)


def milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def ratio(value: float) -> str:
    return f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"


def _line(rows: list[Row], title: str, is_dense: bool) -> tuple[str, list[Row]]:
    """One line of the table, and the rows it shows."""
    first = BASELINES["dense" if is_dense else "gguf"]
    wanted = [dense if is_dense else gguf for _, gguf, dense in COLUMNS]
    found = {runner: row for runner in wanted if (row := _newest(rows, runner)) is not None}
    runs = {run_of(row) for runner, row in found.items() if runner != first}
    # Of several, the one that the newest ratio is against.
    if (beside := _newest((row for row in rows if run_of(row) in runs), first)) is not None:
        found[first] = beside
    shown = list(found.values())
    commit = max(shown, key=rows.index)["commit"]

    def cell(runner: str) -> str:
        row = found.get(runner)
        if row is None:
            return ""
        text = milliseconds(row["ms_p50"])
        against = _newest((other for other in rows if run_of(other) == run_of(row)), first)
        if against is not None and runner != first:
            text += f" ({ratio(against['ms_p50'] / row['ms_p50'])})"
        return text + _elsewhere(row, commit)

    def tax(runner: str) -> str:
        row = found.get(runner)
        if row is None:
            return ""
        return f"{max(0.0, row['first_run_tax_s']):.1f}{_elsewhere(row, commit)}"

    cells = [*map(cell, wanted), *map(tax, wanted[-2:])]
    return f"| {' | '.join([title, *cells])} | `{commit}` |", shown


def _elsewhere(row: Row, commit: str) -> str:
    return "" if row["commit"] == commit else f" at `{row['commit']}`"


def table(rows: list[Row]) -> str:
    """The whole table in Markdown, one for each card."""
    parts = []
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        parts.append(_table_of(gpu, [row for row in rows if row["gpu"] == gpu]))
    return "\n\n".join(parts)


def _table_of(gpu: str, rows: list[Row]) -> str:
    names = [name for name, *_ in COLUMNS]
    head = [f"{gpu}, ms a step", *names, "first run of default, +s", "of max, +s", "commit"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    shown: list[Row] = []
    kinds = dict.fromkeys((r["family"], r["width"], r["format"]) for r in rows)
    order = {name: i for i, name in enumerate(NAMES)}
    for family, size, format_ in sorted(kinds, key=lambda k: (order[k[0]], -k[1], k[2] == "bf16")):
        same = [
            r for r in rows if (r["family"], r["width"], r["format"]) == (family, size, format_)
        ]
        known = {runner for _, *runners in COLUMNS for runner in runners}
        if not any(row["runner"] in known for row in same):
            continue
        title = f"{NAMES[family]} {size}x{size}, {format_}"
        line, used = _line(same, title, format_ == "bf16")
        lines.append(line)
        shown += used
    return "\n".join([*lines, "", _conditions(shown)])


def _conditions(shown: list[Row]) -> str:
    def all_of(values: Iterable[str]) -> str:
        return " and ".join(dict.fromkeys(values))

    torch = all_of(row["versions"]["torch"] for row in shown)
    host = all_of(row["host"] for row in shown)
    allocator = all_of(row["allocator"] for row in shown)
    steps = all_of(str(row.get("steps") or DEFAULT_STEPS) for row in shown)
    return (
        f"torch {torch}, ComfyUI {host}, `{allocator}`, random weights at the real architecture, "
        f"one image, {steps} Euler steps through the host's sampler, third run of a size. In "
        "brackets: against ComfyUI-GGUF's own loader on the same file, for bf16 against `off`, "
        "both measured in one process; a figure without brackets comes from another one. A first "
        "run: what it takes longer than a later one, loading included."
    )


def written(text: str, table_text: str) -> str:
    """`text` with the table between its marker comments.

    Raises:
        ValueError: The markers are not there once each, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"needs one {BEGIN} and one {END} after it; found others.")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table_text}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put it into this file")
    options = parser.parse_args()
    rows = read(options.results)
    if not rows:
        sys.exit(f"no rows for the table in {options.results}; run bench.tiers on a CUDA card")
    text = table(rows)
    if options.write is None:
        print(text)
    else:
        old = options.write.read_text(encoding="utf-8")
        options.write.write_text(written(old, text), encoding="utf-8")


if __name__ == "__main__":
    main()
