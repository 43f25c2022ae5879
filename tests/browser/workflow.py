"""API-format graphs as the page saves them: ids as numbers, links, widget values, positions."""

from __future__ import annotations

import uuid
from typing import Any

WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
COLUMN, ROW = 330, 210
REPORT_PLACE = ([20, 640], [460, 300])  # below the others, wide enough for its lines


def to_workflow(prompt: dict[str, Any], object_info: dict[str, Any]) -> dict[str, Any]:
    """A workflow with an id of its own; seeds are held still."""
    ids = {old: new for new, old in enumerate(prompt, 1)}
    nodes, links = [], []
    for at, (old, call) in enumerate(prompt.items()):
        info = object_info[call["class_type"]]
        inputs, values = [], []
        for name, spec in _specs(info):
            value = call["inputs"].get(name)
            if _is_link(value):
                source, slot = value
                kind = object_info[prompt[source]["class_type"]]["output"][slot]
                links.append([len(links) + 1, ids[source], slot, ids[old], len(inputs), kind])
                inputs.append({"name": name, "type": kind, "link": len(links)})
            elif isinstance(spec[0], list) or spec[0] in WIDGET_TYPES:
                values.append(value)
                if name in ("seed", "noise_seed"):
                    values.append("fixed")  # the page's own control_after_generate
        reports = call["class_type"] == "SpeedTierReport"
        nodes.append(
            {
                "id": ids[old],
                "type": call["class_type"],
                "pos": REPORT_PLACE[0] if reports else [20 + at % 4 * COLUMN, 60 + at // 4 * ROW],
                "size": REPORT_PLACE[1] if reports else [300, 100],
                "flags": {},
                "order": at,
                "mode": 0,
                "inputs": inputs,
                "outputs": _outputs(info),
                "properties": {"Node name for S&R": call["class_type"]},
                "widgets_values": values,
            }
        )
    for link, source, slot, *_ in links:
        nodes[source - 1]["outputs"][slot]["links"].append(link)
    return {
        "id": str(uuid.uuid4()),
        "revision": 0,
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": [],
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def _specs(info: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    return [
        item for part in ("required", "optional") for item in info["input"].get(part, {}).items()
    ]


def _outputs(info: dict[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(info["output_name"], info["output"], strict=True)
    return [{"name": name, "type": kind, "links": []} for name, kind in pairs]


def _is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
