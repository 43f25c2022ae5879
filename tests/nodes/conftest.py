"""A stand-in for what the nodes ask of the host: what is executing, the queue, the page."""

import sys
import types
from types import SimpleNamespace

import pytest
from speed_tier.speed.report import REPORTS, Report


class Host:
    """The host's executing context, queue and websocket."""

    def __init__(self):
        self.context = None
        self.sent = []
        self.history = {}
        self.prompt_queue = SimpleNamespace(
            currently_running={},
            get_history=lambda max_items: dict(list(self.history.items())[-max_items:]),
        )

    def execute(self, prompt_id, node_id, prompt, client_id="page", workflow_id="wf"):
        """As if `node_id` of a queued prompt were executing in this thread."""
        self.context = SimpleNamespace(prompt_id=prompt_id, node_id=node_id)
        extra = {"client_id": client_id, "extra_pnginfo": {"workflow": {"id": workflow_id}}}
        self.prompt_queue.currently_running = {
            0: (0, "another prompt", {}, {"client_id": "another page"}, []),
            1: (1, prompt_id, prompt, extra, []),
        }

    def end(self, cached=(), started_ms=1000):
        """As if the running prompt had ended, with some nodes' outputs taken from the cache."""
        item = self.prompt_queue.currently_running.pop(1)
        messages = [
            ("execution_start", {"prompt_id": item[1], "timestamp": started_ms}),
            ("execution_cached", {"nodes": list(cached), "prompt_id": item[1]}),
        ]
        self.history[item[1]] = {"prompt": item, "status": {"messages": messages}}
        self.context = None

    def send_sync(self, event, data, client_id):
        self.sent.append((event, data, client_id))


@pytest.fixture
def host(monkeypatch):
    host = Host()
    package, utils = types.ModuleType("comfy_execution"), types.ModuleType("comfy_execution.utils")
    utils.get_executing_context = lambda: host.context
    monkeypatch.setitem(sys.modules, "comfy_execution", package)
    monkeypatch.setitem(sys.modules, "comfy_execution.utils", utils)
    server = types.ModuleType("server")
    server.PromptServer = SimpleNamespace(instance=host)
    monkeypatch.setitem(sys.modules, "server", server)
    return host


@pytest.fixture
def book(monkeypatch):
    """An empty book of runs."""
    monkeypatch.setattr(REPORTS, "_runs", type(REPORTS._runs)(maxlen=64))
    return REPORTS


def graph(seed=1, tier="max"):
    """Loader, tier, sampler, decoder and report, as the API format has them."""
    return {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "z.safetensors"}},
        "2": {"class_type": "SpeedTier", "inputs": {"model": ["1", 0], "tier": tier}},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"text": "a cat"}},
        "4": {
            "class_type": "KSampler",
            "inputs": {"model": ["2", 0], "positive": ["3", 0], "seed": seed, "steps": 4},
        },
        "5": {"class_type": "VAEDecode", "inputs": {"samples": ["4", 0]}},
        "6": {"class_type": "SpeedTierReport", "inputs": {"value": ["5", 0]}},
    }


@pytest.fixture
def run(host, book):
    """Files a run as a tiered model does, and gives its report."""
    from speed_tier.nodes.routes import opener_for

    def sample(prompt, prompt_id="p1", tier_id="2", sampler_id="4", **more):
        host.execute(prompt_id, sampler_id, prompt, **more)
        report = Report("max", "max", "as asked", outcome="done")
        opener_for(tier_id, host)(report)
        book.add(report)
        return report

    return sample
