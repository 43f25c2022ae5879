"""Every route and event for the page, and the ids that tie a run to a graph."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from ..speed import REPORTS, Report, clear_compile_cache
from ..speed.hosts import comfy

log = logging.getLogger("speed_tier.routes")

EVENT = "speed_tier.update"
# Step events keep this far apart, and stay away where they would be more than five events in one
# second. The others come a few times a run, and a run's last steps are in its report.
_MIN_INTERVAL_S: Final = 0.25
_sent_s: deque[float] = deque([float("-inf")] * 4, maxlen=4)

_live: dict[str, dict[str, Any]] = {}  # the runs that have not ended: all that was said of them
_clients: dict[str, str] = {}  # run id -> the page that queued it
_lock = threading.Lock()
_KEPT_CLIENTS: Final = 128
_PROMPTS_LOOKED_AT: Final = 8  # of those that ended, for what they took from the host's cache


def page_server() -> Any:
    """The host's server; None where it runs without one."""
    from server import PromptServer

    return getattr(PromptServer, "instance", None)


def opener_for(node_id: str, server: Any) -> Any:
    """What a tiered model calls at the start of each sampling run.

    The node may have run in an earlier prompt and be cached now, so prompt, sampler, client and
    workflow are looked up when the run starts, never when the node runs.
    """

    def open_run(report: Report) -> Any:
        running = _running_prompt(server)
        report.node_id = node_id
        report.prompt_id = running.get("prompt_id", "")
        report.sampler_node_id = running.get("node_id", "")
        report.workflow_id = running.get("workflow_id", "")
        if prompt := running.get("prompt"):
            report.graph_signature = graph_signature(prompt, report.sampler_node_id)
        return _Publisher(report, server, running.get("client_id"))

    return open_run


class _Publisher:
    """Sends one run's events to the page that queued it; a late or lost one does no harm."""

    def __init__(self, report: Report, server: Any, client_id: str | None) -> None:
        self._report = report
        self._server = server
        self._client_id = client_id
        self._last_step_s = float("-inf")

    def __call__(self, kind: str, data: dict[str, Any] | Callable[[], dict[str, Any]]) -> None:
        if self._server is None or self._client_id is None:
            return
        now = time.monotonic()
        if kind == "step":
            if now - self._last_step_s < _MIN_INTERVAL_S or now - _sent_s[0] < 1.0:
                return
            self._last_step_s = now
        message = {**self._ids(kind), **(data() if callable(data) else data)}
        with _lock:
            _clients[message["run_id"]] = self._client_id
            while len(_clients) > _KEPT_CLIENTS:
                del _clients[next(iter(_clients))]
            if kind == "report":
                _live.pop(message["run_id"], None)
            else:
                _live[message["run_id"]] = {**_live.get(message["run_id"], {}), **message}
        _sent_s.append(now)
        try:
            self._server.send_sync(EVENT, message, self._client_id)
        except RuntimeError as error:  # the server's loop is closing; the run must not fail for it
            log.debug("event not sent: %s", error)

    def _ids(self, kind: str) -> dict[str, Any]:
        report = self._report
        return {
            "kind": kind,
            "run_id": report.run_id,
            "started_unix_s": report.started_unix_s,
            "prompt_id": report.prompt_id,
            "workflow_id": report.workflow_id,
            "client_id": self._client_id,
            "node_id": report.node_id,
            "sampler_node_id": report.sampler_node_id,
            "operation": report.operation,
            "tier": report.tier,
        }


def _running_prompt(server: Any) -> dict[str, Any]:
    """Ids and graph of the prompt that is executing in this thread; empty outside one."""
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    if context is None:
        return {}
    found: dict[str, Any] = {"prompt_id": context.prompt_id, "node_id": str(context.node_id)}
    for item in _running_items(server):
        if item[1] == context.prompt_id:
            extra = item[3]
            pnginfo = extra.get("extra_pnginfo") or {}
            workflow = pnginfo.get("workflow") or {}
            found["prompt"] = item[2]
            found["client_id"] = extra.get("client_id")
            found["workflow_id"] = str(workflow.get("id", ""))
    return found


def graph_signature(prompt: dict[str, Any], node_id: str) -> str:
    """Hash of a node and everything upstream of it: equal graphs give equal results.

    The id of a node made by expansion is looked up under the node it came from.
    """
    if node_id not in prompt:
        node_id = node_id.split(".")[0]
    seen: dict[str, Any] = {}
    todo = [node_id]
    while todo:
        current = todo.pop()
        node = prompt.get(current)
        if node is None or current in seen:
            continue
        seen[current] = [node.get("class_type"), node.get("inputs")]
        todo += upstream(node)
    text = json.dumps(seen, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def upstream(node: dict[str, Any]) -> list[str]:
    """Ids that a node's inputs link to, in input order."""
    links = node.get("inputs", {}).values()
    return [str(link[0]) for link in links if _is_link(link)]


def _is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def register(server: Any) -> None:
    """Add the pack's routes to the host's server."""
    from aiohttp import web

    @server.routes.get("/speed_tier/report")
    async def report(_: Any) -> Any:
        return web.json_response(snapshot(server))

    # Takes nothing from the request: what is deleted is the pack's own folder.
    @server.routes.post("/speed_tier/compiled/clear")
    async def clear_compiled(_: Any) -> Any:
        cleared = await asyncio.to_thread(clear_compile_cache, comfy.state_folder())
        return web.json_response(asdict(cleared))


def snapshot(server: Any) -> dict[str, Any]:
    """What a page needs after a reload: the runs that ended, newest first, and those that go on."""
    runs = REPORTS.runs()
    running = {item[1] for item in _running_items(server)}
    with _lock:
        for run_id in [i for i, message in _live.items() if message["prompt_id"] not in running]:
            del _live[run_id]
        return {
            "schema": 1,
            "runs": [run.to_dict() for run in runs],
            "texts": {run.run_id: run.to_text() for run in runs},
            "clients": {run.run_id: _clients.get(run.run_id, "") for run in runs},
            "live": list(_live.values()),
            "served": served(server, runs),
        }


def _running_items(server: Any) -> list[Any]:
    queue = getattr(server, "prompt_queue", None)
    return list(queue.currently_running.values()) if queue is not None else []


def served(server: Any, runs: list[Report]) -> list[dict[str, Any]]:
    """Prompts that got an earlier run's result from the host's cache instead of a run of their own.

    The host calls nothing of ours then. What it took from the cache it keeps with a prompt that has
    ended; of one that goes on only the page was told, so the page decides ("ended": False).
    """
    queue = getattr(server, "prompt_queue", None)
    ended = queue.get_history(max_items=_PROMPTS_LOOKED_AT).values() if queue is not None else []
    prompts = [(item, None, time.time()) for item in _running_items(server)]
    for entry in ended:
        messages = dict((entry.get("status") or {}).get("messages", []))
        started_s = messages.get("execution_start", {}).get("timestamp", 0) / 1000
        cached = messages.get("execution_cached", {}).get("nodes", [])
        prompts.append((entry["prompt"], set(cached), started_s))
    found = []
    for item, cached, started_s in prompts:
        signatures: dict[str, str] = {}
        own = {(run.node_id, run.sampler_node_id) for run in runs if run.prompt_id == item[1]}
        for run in runs:  # newest first: an older run of the same graph says nothing more
            sampler = run.sampler_node_id.split(".")[0]
            if run.outcome != "done" or (run.node_id, run.sampler_node_id) in own:
                continue
            if sampler not in (item[2] if cached is None else cached):
                continue
            signature = signatures.setdefault(sampler, graph_signature(item[2], sampler))
            if signature != run.graph_signature:
                continue
            own.add((run.node_id, run.sampler_node_id))
            extra = item[3] or {}
            workflow = (extra.get("extra_pnginfo") or {}).get("workflow") or {}
            found.append(
                {
                    "run_id": run.run_id,
                    "prompt_id": item[1],
                    "workflow_id": str(workflow.get("id", "")),
                    "client_id": extra.get("client_id", ""),
                    "sampler": sampler,
                    "started_unix_s": started_s,
                    "ended": cached is not None,
                }
            )
    return found
