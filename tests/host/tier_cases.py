"""What the tier tests share: forced features, graphs and what they read off a result."""

from __future__ import annotations

import json
from typing import Any

from speed_tier.tests.host.graphs import Graph, Link
from speed_tier.tests.host.server import PromptResult

# The host's CPU default attention (sub-quadratic) breaks Dynamo's graphs; this one does not.
ARGS = ("--use-pytorch-cross-attention",)
# A CPU gains nothing from these, so they are asked for by name: something must be able to leak.
FORCED = {"tf32": "on", "fused_qkv": "on", "regional_compile": "on"}
ENGAGED = {
    "zimage": {"tf32", "regional_compile"},
    "qwen": {"tf32", "fused_qkv", "regional_compile"},
}
ALLOW_TF32 = "torch.backends.cuda.matmul.allow_tf32"


def digest(result: PromptResult, sink: str = "sink") -> str:
    return str(result.ui(sink, "sha256"))


def report_of(result: PromptResult) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(result.ui("report", "json"))
    return data


def engaged(report: dict[str, Any]) -> set[str]:
    return {f["name"] for f in report["features"] if f["state"] == "engaged"}


def max_graph(arch: str) -> tuple[Graph, Link]:
    graph = Graph()
    return graph, graph.speed_tier_advanced(graph.tiny_model(arch), "max", "tier", **FORCED)
