"""Follows a host's websocket in a thread and keeps every event in order."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Event:
    """One message: `type` is the host's, or "binary" for a preview image."""

    t: float
    type: str
    data: Any = field(default=None)


class EventLog:
    """Ordered record of events; safe to read while it is being written."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._news = threading.Condition()
        self._listeners: list[Callable[[Event], None]] = []
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def follow(self, url: str, timeout: float = 20.0) -> None:
        """Connects, and returns once the host has sent its first message."""
        self._thread = threading.Thread(target=self._run, args=(url,), daemon=True)
        self._thread.start()
        self.wait_for(lambda e: e.type == "status", timeout)

    def close(self) -> None:
        if self._loop is not None and self._task is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)
        if self._thread is not None:
            self._thread.join(5)
            self._thread = None

    def add_listener(self, listener: Callable[[Event], None]) -> None:
        """Calls `listener` with every later event, on the log's own thread."""
        self._listeners.append(listener)

    def mark(self) -> int:
        """A position; pass it to `since` to see only what came later."""
        with self._news:
            return len(self._events)

    def since(self, mark: int = 0, type: str | None = None) -> list[Event]:
        with self._news:
            return [e for e in self._events[mark:] if type is None or e.type == type]

    def wait_for(
        self, wanted: Callable[[Event], bool], timeout: float = 30.0, mark: int = 0
    ) -> Event:
        """First event after `mark` that `wanted` accepts."""
        deadline = time.monotonic() + timeout
        with self._news:
            seen = mark
            while True:
                while seen < len(self._events):
                    if wanted(self._events[seen]):
                        return self._events[seen]
                    seen += 1
                left = deadline - time.monotonic()
                if left <= 0:
                    types = [e.type for e in self._events[mark:]][-20:]
                    raise TimeoutError(f"no such event in {timeout} s; last ones: {types}")
                self._news.wait(left)

    def _add(self, event: Event) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()
        for listener in list(self._listeners):
            listener(event)

    def _run(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        try:
            self._task = self._loop.create_task(self._listen(url))
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self._add(Event(time.monotonic(), "closed", repr(error)))
        finally:
            self._loop.close()

    async def _listen(self, url: str) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(url, max_msg_size=0) as socket,
        ):
            async for message in socket:
                if message.type == aiohttp.WSMsgType.TEXT:
                    body = json.loads(message.data)
                    self._add(Event(time.monotonic(), body["type"], body.get("data")))
                elif message.type == aiohttp.WSMsgType.BINARY:
                    self._add(Event(time.monotonic(), "binary", len(message.data)))
        self._add(Event(time.monotonic(), "closed"))
