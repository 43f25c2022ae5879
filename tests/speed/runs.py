"""One run of a tiered model made of optimizations that do what a test tells them."""

import contextlib
from dataclasses import dataclass, field

import torch
from speed_tier.speed import Call, Switch, TieredModel, TierRequest, resolve_tier
from speed_tier.speed.optimizations.base import Fidelity, Handle
from speed_tier.speed.report import CompileFacts, GraphFacts
from speed_tier.tests.speed import tiny


@dataclass
class FakeHandle(Handle):
    name: str = ""
    log: list = field(default_factory=list)
    fails_on_remove: bool = False
    facts: CompileFacts | None = None
    graphs: GraphFacts | None = None

    @contextlib.contextmanager
    def scope(self):
        self.log.append(f"enter {self.name}")
        try:
            yield
        finally:
            self.log.append(f"leave {self.name}")

    def compile_facts(self):
        return self.facts

    def graph_facts(self):
        return self.graphs

    def remove(self):
        self.log.append(f"remove {self.name}")
        if self.fails_on_remove:
            raise RuntimeError("cannot be taken out")


@dataclass(frozen=True, eq=False)
class Fake:
    """An optimization that does what it is told and writes down when."""

    name: str
    log: list
    reason: str | None = None
    check_raises: BaseException | None = None
    install_raises: BaseException | None = None
    handle: dict = field(default_factory=dict)
    contexts: list | None = None
    fidelity = Fidelity.ROUNDING

    def check(self, context):
        self.log.append(f"check {self.name}")
        if self.check_raises:
            raise self.check_raises
        return self.reason

    def install(self, context):
        self.log.append(f"install {self.name}")
        if self.contexts is not None:
            self.contexts.append(context)
        if self.install_raises:
            raise self.install_raises
        return FakeHandle(name=self.name, log=self.log, **self.handle)

    def release(self, denoiser):
        self.log.append(f"release {self.name}")


class Session:
    """One run of a tiered model on a tiny denoiser, with everything that was told to the page."""

    def __init__(self, *optimizations, tier="max", switches=None, model=None, check=False):
        on = {row.name: Switch.ON for row in optimizations} if tier == "max" else {}
        request = TierRequest(
            resolve_tier(tier, is_gguf=False), {**on, **(switches or {})}, optimizations, check
        )
        self.model = tiny.qwen_image(layers=1) if model is None else model
        self.tiered = TieredModel(request)
        self.events = []
        self.run = self.tiered.begin(self.tiered.new_report(), tiny.CPU, self.tell)

    def tell(self, kind, data):
        self.events.append((kind, data() if callable(data) else data))

    def call(self, invoke=lambda options: options, model=None):
        shape = (1, 16, 1, 8, 8)
        denoiser = self.model if model is None else model
        return self.run.call(Call(denoiser, tiny.CPU, torch.float32, shape, 5), invoke)

    def finish(self, outcome="done", error=""):
        return self.run.close(outcome, error)
