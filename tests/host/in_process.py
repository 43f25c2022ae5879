"""Sampling runs inside one process that has imported a real ComfyUI: no server, no HTTP.

Imported by a test it gives `Step` and `run_steps`; started as a script it reads the steps, a JSON
list, from stdin, writes each step's latents to a file and prints one JSON line a step. What is
right or wrong is for the test to say.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
HOST_ARGS = ["--cpu", "--use-pytorch-cross-attention"]
TIMEOUT_S = 600


@dataclass(frozen=True)
class Lora:
    """A random adapter; `target` is a name in test_nodes/models.py."""

    target: str
    strength: float = 1.0
    seed: int = 7
    rank: int = 4


@dataclass(frozen=True)
class Step:
    """One sampling run.

    Attributes:
        name: Of the step in the test, and of its file of latents.
        tier: off, default, max, or "" for a model that never met a Speed Tier node.
        height, width: Of the latent; an eighth of the picture's pixels.
        loras, loras_after_tier: Whether the LoRA loader is before or after Speed Tier.
        rounded: Weights are rounded to bf16 before they are used in `dtype`.
        switches: Per-feature auto, on or off, as in the Advanced node.
        compile: Fields of CompileConfig.
        in_fp32: The benchmark's reference: the model's own weights, cast layer by layer.
        graphs: A stand-in for a device that captures CUDA graphs (recording.py).
        stale: Its replays do not see new inputs.
        check: With the self-check.
        fault: Fields of a Fault (faults.py) that is planted among the optimizations.
        warm_up: Sizes in pixels, as in the Advanced node.
    """

    name: str
    arch: str
    tier: str = "max"
    height: int = 64
    width: int = 64
    batch: int = 1
    tokens: int = 12
    cfg: float = 1.0
    steps: int = 1
    loras: tuple[Lora, ...] = ()
    loras_after_tier: bool = False
    layers: int = 2
    dtype: str = "fp32"
    rounded: bool = False
    switches: dict[str, str] = field(default_factory=dict)
    compile: dict[str, Any] = field(default_factory=lambda: {"backend": "eager"})
    in_fp32: bool = False
    graphs: bool = False
    stale: bool = False
    check: bool = True
    fault: dict[str, Any] = field(default_factory=dict)
    warm_up: str = ""


@dataclass(frozen=True)
class Seen:
    """What one step showed.

    Attributes:
        latents: The sampler's output.
        graphs: Graphs that Dynamo's own counter rose by.
        report: The run's report as data, None without a tier.
    """

    latents: Any
    graphs: int
    report: dict[str, Any] | None

    @property
    def compiles(self) -> dict[str, int]:
        """Compiles in this run by kind of block."""
        assert self.report is not None
        return {kind["name"]: kind["compiles"] for kind in self.report["compile"]["kinds"]}

    @property
    def engaged(self) -> list[str]:
        assert self.report is not None
        return [f["name"] for f in self.report["features"] if f["state"] == "engaged"]

    def feature(self, name: str) -> dict[str, Any]:
        assert self.report is not None
        return next(f for f in self.report["features"] if f["name"] == name)


def run_steps(
    steps: list[Step], folder: Path, environment: dict[str, str] | None = None
) -> dict[str, Seen]:
    """Go through `steps` in one fresh process; latents are left in `folder`."""
    import torch

    from .provision import lines_of

    assert len({step.name for step in steps}) == len(steps), "two steps share a name"
    lines = lines_of(
        __file__,
        str(folder),
        first_key="name",
        timeout_s=TIMEOUT_S,
        stdin=json.dumps([asdict(step) for step in steps]),
        environment=environment,
    )
    assert [line["name"] for line in lines] == [step.name for step in steps]
    return {
        line["name"]: Seen(torch.load(line["latents"]), line["graphs"], line["report"])
        for line in lines
    }


def run_each(
    steps_of: Callable[[str], list[Step]],
    archs: Iterable[str],
    make_folder: Callable[[str], Path],
    environment: dict[str, str] | None = None,
) -> dict[str, dict[str, Seen]]:
    """Go through `steps_of(arch)` for every model at once, each in a process of its own."""
    with ThreadPoolExecutor() as pool:
        running = {
            arch: pool.submit(run_steps, steps_of(arch), make_folder(arch), environment)
            for arch in archs
        }
        return {arch: future.result() for arch, future in running.items()}


class Session:
    """The host's side: models that were made stay, as they do in a server.

    Args:
        recorder: Captures the graphs of steps that ask for them; its `stale` is the step's.
    """

    def __init__(self, recorder: Any) -> None:
        # The folder's own __init__ registers routes on a server, and there is none.
        name = "speed_tier.tests.host.test_nodes"
        folder = types.ModuleType(name)
        folder.__path__ = [str(Path(__file__).parent / "test_nodes")]
        sys.modules[name] = folder
        from speed_tier.tests.host.test_nodes import models

        self.factory = models
        from speed_tier.speed.optimizations.graph_capture import GraphCapture, GraphConfig

        self.recorder = recorder
        self.graphs: Any = GraphCapture(GraphConfig(recorder=recorder))
        self.models: dict[tuple[Any, ...], Any] = {}
        self.weights: list[Any] = []

    def _keep_weights(self) -> None:
        """No address is used twice: a graph made for other weights then never fits by chance."""
        for model in self.models.values():
            self.weights += [weight.detach() for weight in model.model.parameters()]

    def _model(self, step: Step) -> Any:
        import torch

        # What the self-check finds at fault is dropped for a model: one of its own then.
        key = (step.arch, step.layers, step.dtype, step.rounded, str(step.fault), step.stale)
        if key not in self.models:
            dtype = self.factory.DTYPES[step.dtype]
            model = self.factory.make_tiny(step.arch, 0, step.layers, dtype)
            if step.rounded:
                for weight in model.model.parameters():
                    weight.data = weight.data.to(torch.bfloat16).to(weight.dtype)
            self.models[key] = model
        return self.models[key]

    def _patched(self, step: Step) -> Any:
        """The MODEL that reaches the sampler."""
        model = self._model(step)
        if not step.loras_after_tier:
            model = self._with_loras(model, step)
        if step.tier:
            model = self._tiered(model, step)
        if step.loras_after_tier:
            model = self._with_loras(model, step)
        return model

    def _with_loras(self, model: Any, step: Step) -> Any:
        import comfy.sd

        for lora in step.loras:
            adapter = self.factory.lora_state_dict(model, "lora", lora.target, lora.rank, lora.seed)
            before = len(model.patches)
            model, _ = comfy.sd.load_lora_for_models(model, None, adapter, lora.strength, 0)
            assert len(model.patches) > before or before, "the host took no key of the adapter"
        return model

    def _tiered(self, model: Any, step: Step) -> Any:
        from speed_tier.speed import Switch, TierRequest, resolve_tier
        from speed_tier.speed.hosts.comfy import tier_clone
        from speed_tier.speed.optimizations import OPTIMIZATIONS
        from speed_tier.speed.optimizations.regional_compile import CompileConfig, RegionalCompile
        from speed_tier.speed.warm_up import parse_sizes

        compiled = RegionalCompile(CompileConfig(**step.compile))
        own = {compiled.name: compiled}
        if step.graphs:
            own[self.graphs.name] = self.graphs
            self.recorder.stale = step.stale
        rows = tuple(own.get(row.name, row) for row in OPTIMIZATIONS)
        switches = {name: Switch(value) for name, value in step.switches.items()}
        if step.fault:
            from speed_tier.tests.speed.faults import Fault

            rows = (*rows[:-1], Fault("planted", **step.fault), rows[-1])
            switches["planted"] = Switch.ON
        tier, sizes = resolve_tier(step.tier, is_gguf=False), parse_sizes(step.warm_up)
        request = TierRequest(tier, switches, rows, step.check, warm_up=sizes)
        return tier_clone(model, request, lambda report: lambda kind, data: None)

    def seen(self, step: Step) -> Seen:
        """Run one step."""
        from speed_tier.speed import REPORTS
        from torch._dynamo.utils import counters

        before, last = counters["stats"]["unique_graphs"], REPORTS.runs()[:1]
        latents = self._sample(step)
        self._keep_weights()
        ran = REPORTS.runs()[:1]
        report = ran[0].to_dict() if ran and ran != last else None
        return Seen(latents.clone(), counters["stats"]["unique_graphs"] - before, report)

    def _sample(self, step: Step) -> Any:
        import comfy.sample
        import torch

        def prompt(seed: int) -> list[Any]:
            generator = torch.Generator().manual_seed(seed)
            return [[torch.randn(1, step.tokens, 64, generator=generator), {}]]

        from speed_tier.bench.exact import in_fp32

        with torch.inference_mode(), contextlib.ExitStack() as stack:
            model = self._patched(step)
            if step.in_fp32:
                stack.enter_context(in_fp32(model))
            latent = torch.zeros(step.batch, 16, step.height, step.width)
            latent = comfy.sample.fix_empty_latent_channels(model, latent)
            noise = comfy.sample.prepare_noise(latent, 0)
            conditions = (prompt(1), prompt(2))
            return comfy.sample.sample(
                model,
                noise,
                step.steps,
                step.cfg,
                "euler",
                "simple",
                *conditions,
                latent,
                disable_pbar=True,
                seed=0,
            )


def _read_steps(text: str) -> list[Step]:
    steps = []
    for data in json.loads(text):
        data["loras"] = tuple(Lora(**lora) for lora in data["loras"])
        steps.append(Step(**data))
    return steps


def main(host: str, folder: str) -> None:
    steps = _read_steps(sys.stdin.read())
    pack = types.ModuleType("speed_tier")
    pack.__path__ = [str(REPO)]
    sys.modules["speed_tier"] = pack
    from speed_tier.bench.host_session import enter_host

    # Our own folder is on the path because we are a script, and has a `server` of its own.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != here]
    enter_host(host, "native", HOST_ARGS)
    import torch

    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from speed_tier.tests.triton_interpreter import round_to_nearest

        round_to_nearest()
    from speed_tier.tests.speed.optimizations.recording import Recorder

    session = Session(Recorder())
    for step in steps:
        seen = session.seen(step)
        path = Path(folder) / f"{step.name}.pt"
        torch.save(seen.latents, path)
        line = {"name": step.name, "latents": str(path)}
        print(json.dumps({**line, "graphs": seen.graphs, "report": seen.report}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
