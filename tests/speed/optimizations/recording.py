"""A stand-in for a device that captures: a replay calls again, and a test says how long it took."""

from __future__ import annotations

import torch
from speed_tier.speed.cuda_graph import Rehearsal, Timed
from speed_tier.speed.optimizations import call_mode
from speed_tier.tests.speed import tiny


class Recording:
    """A replay calls again, on static inputs, as a graph would."""

    def __init__(self, recorder, call, tensors):
        self.recorder, self.call = recorder, call
        self.inputs = tensors
        self.pool_bytes = 1 << 20
        self.alive = True

    def replay(self, tensors):
        assert self.alive, "a released graph was replayed"
        self.recorder.replays += 1
        for static, tensor in zip(self.inputs, tensors, strict=True):
            if static is not tensor and not self.recorder.stale:
                static.copy_(tensor)
        return self.call(self.inputs) + self.recorder.wrong_by

    def release(self):
        self.alive = False
        self.recorder.released += 1


class Recorder:
    """Says what a test tells it to say."""

    def __init__(self, plain_ms=10.0, graph_ms=5.0, issue=1.0, strict=False):
        self.plain_ms, self.graph_ms, self.issue, self.strict = plain_ms, graph_ms, issue, strict
        self.problem, self.wrong_by, self.fail = "", 0.0, None
        self.stale = False  # a replay does not see new inputs
        self.captures = self.replays = self.released = self.trims = self.rehearsals = 0
        self.modes = []

    def refusal(self, device):
        return ""

    def is_strict(self):
        return self.strict

    def timed(self, call, device):
        before = self.replays
        output = call()
        ms = self.graph_ms if self.replays > before else self.plain_ms
        return Timed(output, ms, self.issue * ms, 1000)

    def peak_bytes(self, device):
        return 7

    def static_copies(self, tensors):
        return [t.clone() for t in tensors]

    def rehearse(self, call, device, known, compiled):
        self.rehearsals += 1
        self.modes.append((compiled, call_mode.MODE.eager_blocks))
        return Rehearsal(call(), self.problem)

    def capture(self, call, inputs, device, keep, like):
        assert call_mode.MODE.uninterrupted
        if self.fail is not None:
            raise self.fail
        self.captures += 1
        recording = Recording(self, call, inputs)
        output = recording.replay(inputs)
        self.replays -= 1
        return recording, output

    def trim(self, device):
        self.trims += 1


def run(graphs, model, calls, **more):
    """One run; the outputs are checked against the model without anything on it."""
    with tiny.engaged(graphs, on=model, **more) as engaged:
        for x in calls:
            arguments = x if isinstance(x, dict) else {"x": x}
            expected = tiny.plain(model, **arguments)
            assert torch.equal(engaged.call(**arguments), expected)
    handle = engaged.handles[0]
    return handle.graph_facts(), handle


def inputs(count, **more):
    return [tiny.toy_input(seed=i, **more) for i in range(count)]
