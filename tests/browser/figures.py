"""What the page must show for a report: the same numbers, written the page's way."""

from __future__ import annotations

from typing import Any

DASH = "\u2013"


def seconds(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value:.{3 if value < 9.9995 else 2 if value < 99.95 else 1}f} s"


def cells(report: dict[str, Any]) -> dict[str, str]:
    """The overlay's cells for a run that has ended."""
    timing = report["timing"]
    steps = timing["steps_s"]
    speedup = report["speedup_against_off"]
    steady = timing["steady_step_s"]
    return {
        "last": f"{int(steps[-1] * 1000 + 0.5)} ms" if steps else DASH,
        "steady": DASH if steady is None else f"{seconds(steady)}/it",
        "tax": seconds(timing["first_step_tax_s"]),
        "total": seconds(timing["total_s"]),
        "speedup": DASH if speedup is None else f"{speedup:.2f}x",
        "recompiles": str(report["compile"]["recompiles"]),
    }
