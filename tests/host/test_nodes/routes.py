"""Routes that show the host's state at any time, also between prompts. Nothing here evaluates."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from aiohttp import web
from server import PromptServer

from .process_flags import read_flags
from .tracking import records, state

routes = PromptServer.instance.routes


def dynamo_counters() -> dict[str, Any]:
    """Dynamo's own counters, which the pack's numbers must agree with."""
    from torch._dynamo.utils import counters

    return {
        group: {str(key): int(value) for key, value in values.items()}
        for group, values in dict(counters).items()
    }


def _collected() -> dict[str, Any]:
    # Twice: objects freed by the first pass can hold finalizers that free more.
    gc.collect()
    gc.collect()
    return state()


@routes.get("/speed_tier_test/flags")
async def get_flags(request: web.Request) -> web.Response:
    return web.json_response(read_flags())


@routes.get("/speed_tier_test/state")
async def get_state(request: web.Request) -> web.Response:
    return web.json_response(state())


@routes.post("/speed_tier_test/collect")
async def post_collect(request: web.Request) -> web.Response:
    return web.json_response(_collected())


@routes.get("/speed_tier_test/records")
async def get_records(request: web.Request) -> web.Response:
    return web.json_response(records())


@routes.post("/speed_tier_test/records/clear")
async def post_clear(request: web.Request) -> web.Response:
    return web.json_response(records(clear=True))


@routes.get("/speed_tier_test/counters")
async def get_counters(request: web.Request) -> web.Response:
    return web.json_response(dynamo_counters())


@routes.post("/speed_tier_test/counters/reset")
async def post_counters_reset(request: web.Request) -> web.Response:
    from torch._dynamo.utils import counters

    counters.clear()
    return web.json_response(dynamo_counters())


@routes.post("/speed_tier_test/dynamo/reset")
async def post_dynamo_reset(request: web.Request) -> web.Response:
    """Forgets all compiled code, so that a test can see a first compile again."""
    torch._dynamo.reset()
    return web.json_response({})


_restore_flags: list[tuple[type, Any]] = []  # the pack's own, while it is switched off


@routes.post("/speed_tier_test/restore/{switch}")
async def post_restore(request: web.Request) -> web.Response:
    """Switches the pack's run-scoped restore off, so that the unload hook is all there is."""
    if request.match_info["switch"] == "off" and not _restore_flags:
        pack = next(m for name, m in sys.modules.items() if name.endswith("speed.apply"))
        _restore_flags.append((pack.Run, pack.Run.restore_flags))
        pack.Run.restore_flags = lambda run: None
    elif request.match_info["switch"] == "on" and _restore_flags:
        owner, original = _restore_flags.pop()
        owner.restore_flags = original
    return web.json_response({"restores": not _restore_flags})
