"""The graphs of one denoiser, what is known of each size, and what makes them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..cuda_graph import Captured, CudaRecorder

_CUDA: Final = CudaRecorder()


@dataclass(frozen=True)
class GraphConfig:
    """When a graph is made and kept.

    Attributes:
        max_graphs: of one model; the one unused for longest goes first.
        min_gain: time without over time with, below which a graph is not worth its memory.
        busy: share of a call's time that Python takes to issue it, below which the card is busy
            all the time.
        recorder: measures and captures; tests put a stand-in here.
    """

    max_graphs: int = 6
    min_gain: float = 1.01
    busy: float = 0.8
    recorder: CudaRecorder = _CUDA


@dataclass
class Entry:
    """What is known of one signature.

    Attributes:
        calls: how often it was called without a graph.
        runs: runs that called it.
        last_run: the newest of them, by number.
        reason: why it has no graph.
        captured: its graph.
        before_ms, graph_ms: a call without and with it.
        measured: calls that before_ms is the shortest of.
        busy: the card was found to be busy all through a call.
    """

    calls: int = 0
    runs: int = 0
    last_run: int = 0
    reason: str = ""
    captured: Captured | None = None
    before_ms: float = 0.0
    measured: int = 0
    busy: bool = False
    graph_ms: float = 0.0


class GraphStore:
    """Graphs of one denoiser between runs. Refers to no weight and to no denoiser."""

    def __init__(self, config: GraphConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.entries: OrderedDict[Hashable, Entry] = OrderedDict()
        # Calls that differ in sizes only run the same operations: one rehearsal for all of them.
        self.rehearsed: dict[Hashable, list[Tensor]] = {}
        self.weights: Hashable = None
        self.runs = 0
        self.wrong = ""  # why this model gets no graph any more
        self.lock = threading.RLock()

    def follow(self, weights: Hashable) -> bool:
        """Forget every graph if the weights are not where they were; returns whether they were."""
        if weights == self.weights:
            return True
        self.drop()
        self.weights = weights
        return False

    def entry(self, signature: Hashable) -> Entry:
        found = self.entries.get(signature)
        if found is None:
            found = self.entries[signature] = Entry()
            while len(self.entries) > 16 * self.config.max_graphs:
                self._forget(next(iter(self.entries)))
        self.entries.move_to_end(signature)
        return found

    def make_room(self) -> None:
        """Keep place for one more graph."""
        graphs = [key for key, entry in self.entries.items() if entry.captured is not None]
        for key in graphs[: max(0, len(graphs) - self.config.max_graphs + 1)]:
            self._forget(key)

    def _forget(self, signature: Hashable) -> None:
        captured = self.entries.pop(signature).captured
        if captured is not None:
            captured.release()

    def drop(self) -> None:
        """Give back every graph's memory."""
        had = self.graphs()
        self.rehearsed.clear()
        while self.entries:
            self._forget(next(iter(self.entries)))
        if had:
            self.config.recorder.trim(self.device)

    def graphs(self) -> int:
        return sum(entry.captured is not None for entry in self.entries.values())

    def pool_bytes(self) -> int:
        found = [e.captured.pool_bytes for e in self.entries.values() if e.captured is not None]
        return sum(found)
