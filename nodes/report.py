"""Speed Tier Report: what the nearest Speed Tier upstream engaged, and what it cost."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from typing import Any

from ..speed import REPORTS, SAMPLING, Report
from .routes import graph_signature, upstream

_TIER_NODES = (
    *("SpeedTier", "SpeedTierAdvanced", "SpeedTierLoader", "SpeedTierCompare"),
    "SpeedTierVAE",
)


class _AnyType(str):
    """Equal to every type name, so that the host lets any link in."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return False

    __eq__ = str.__eq__
    __hash__ = str.__hash__


ANY = _AnyType("*")

# What each report node last showed: (run id, shown as cached). The host serves a repeated prompt
# from its cache; the node must run once more then, to say so.
_shown: dict[str, tuple[str, bool]] = {}


class SpeedTierReport:
    """Pass-through of any type: place it after the sampler or the decoder."""

    CATEGORY = "speed tier"
    DESCRIPTION = "Shows what the Speed Tier upstream engaged, skipped and cost in this run."
    RETURN_TYPES = (ANY, "STRING", "STRING")
    RETURN_NAMES = ("value", "text", "json")
    OUTPUT_NODE = True
    FUNCTION = "report"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        tooltip = "Anything made with the tiered model: a latent, an image. Handed on unchanged."
        return {
            "required": {"value": (ANY, {"tooltip": tooltip})},
            "hidden": {"unique_id": "UNIQUE_ID", "prompt": "PROMPT"},
        }

    @classmethod
    def IS_CHANGED(cls, unique_id: str | None = None, **_: Any) -> str:
        shown = _shown.get(_only(unique_id))
        return f"cached {shown[0]}" if shown else "live"

    def report(
        self, value: Any, unique_id: str | None = None, prompt: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        node_id = str(unique_id or "")
        run, problem = find_run(prompt or {}, node_id)
        if run is None:
            text, data = problem, {"schema": 1, "problem": problem}
        else:
            from_cache = run.prompt_id != _current_prompt_id()
            _shown[node_id] = (run.run_id, from_cache)
            text, data = run.to_text(from_cache), run.to_dict(from_cache)
            decode = find_decode(prompt or {}, node_id)
            if decode is not None and run.operation == SAMPLING:
                timing = replace(run.timing, vae_decode_s=decode.timing.vae_decode_s)
                run = replace(run, timing=timing)
                text = f"{run.to_text(from_cache)}\n{decode.to_text()}"
                data = {**run.to_dict(from_cache), "vae": decode.to_dict()}
        encoded = json.dumps(data)
        return {"ui": {"text": [text], "json": [encoded]}, "result": (value, text, encoded)}


def find_run(prompt: dict[str, Any], node_id: str) -> tuple[Report | None, str]:
    """The run whose result reaches a report node, or the sentence why there is none.

    A sampling run where there is one, else the run of a VAE.
    """
    order = _breadth_first(prompt, node_id)
    tier_id = next((i for i in order if prompt[i].get("class_type") in _TIER_NODES), None)
    if tier_id is None:
        return None, "no Speed Tier node upstream of this report"
    runs = REPORTS.runs()
    for wanted in (
        [run for run in runs if run.operation == SAMPLING],
        [run for run in runs if run.operation != SAMPLING],
    ):
        if (found := _nearest(prompt, order, wanted)) is not None:
            return found, ""
    return None, (
        f"nothing upstream of this report has sampled with Speed Tier node {tier_id} in this "
        "process: connect it after a sampler; a sampler at denoise 0 runs no step"
    )


def find_decode(prompt: dict[str, Any], node_id: str) -> Report | None:
    """The decode of a tiered VAE whose picture reaches a report node."""
    runs = [run for run in REPORTS.runs() if run.operation == "vae decode"]
    return _nearest(prompt, _breadth_first(prompt, node_id), runs)


def _nearest(prompt: dict[str, Any], order: list[str], runs: list[Report]) -> Report | None:
    # By the node that ran first: in a graph with two passes the tier with the fewest hops is often
    # the one of the earlier pass.
    for nearest in order:
        signature = graph_signature(prompt, nearest)
        found = [
            run
            for run in runs
            if run.node_id in order
            and run.sampler_node_id.split(".")[0] == nearest
            and run.graph_signature == signature
        ]
        if found:
            return min(found, key=lambda run: order.index(run.node_id))
    return None


def _breadth_first(prompt: dict[str, Any], node_id: str) -> list[str]:
    """Ids upstream of a node, nearest first."""
    order: list[str] = []
    todo = deque([node_id])
    while todo:
        current = todo.popleft()
        if current in order or current not in prompt:
            continue
        order.append(current)
        todo.extend(upstream(prompt[current]))
    return order[1:]


def _current_prompt_id() -> str:
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    return context.prompt_id if context is not None else ""


def _only(value: Any) -> str:
    # IS_CHANGED gets its inputs as the host's one-element lists in some versions.
    return str(value[0] if isinstance(value, list) else value or "")
