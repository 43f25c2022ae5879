"""Random sequences of what people do to a tiered model, each output beside the untiered one.

    python tests/gpu/sequences.py /path/to/ComfyUI --count 200

Tiny fp32 models of both families, dense and GGUF, in one process with a real ComfyUI. Between runs
one thing changes: size, batch, prompt length, LoRA, tier or model; or the run is interrupted, fails
in a block, runs out of memory; or everything is unloaded. Prints one JSON line: what differed, what
leaked, and how much was captured and replayed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import types
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
BOUND = 1e-5  # relative, fp32; TF32 is switched off
EVENTS = (
    *("size", "batch", "tokens", "lora", "tier", "model", "again"),
    *("interrupt", "exception", "out of memory", "unload"),
)
STEPS = 4
SETTLED_BYTES = 32 << 20  # cuBLAS workspaces and the like, which torch keeps


@dataclass(frozen=True)
class Setting:
    """What a run depends on."""

    model: str = "zimage dense"
    size: int = 16
    batch: int = 1
    tokens: int = 12
    lora: str = ""
    strength: float = 1.0
    tier: str = "default"


class Session:
    """Models, runs and references."""

    def __init__(self, host: Any, backend: str) -> None:
        self.host = host
        self.backend = backend
        self.torch = host.torch
        self.references: dict[Setting, Any] = {}
        self.pairs = {arch: host.pair(arch) for arch in ("zimage", "qwen")}
        self.seen: Counter[str] = Counter()

    def patcher(self, setting: Setting) -> Any:
        arch, kind = setting.model.split()
        pair = self.pairs[arch]
        patcher = pair.dense if kind == "dense" else pair.quant
        if setting.lora:
            adapter = self.host.lora(pair, setting.lora)
            patcher = self.host.add(patcher, adapter, setting.strength)
        return patcher

    def tiered(self, setting: Setting) -> Any:
        from speed_tier.speed import Switch, TierRequest, configured, resolve_tier
        from speed_tier.speed.hosts import comfy

        table = configured({"regional_compile": {"backend": self.backend}})
        tier = resolve_tier(setting.tier, True)
        request = TierRequest(tier, {"tf32": Switch.OFF}, table)
        return comfy.tier_clone(
            self.patcher(setting), request, lambda report: lambda kind, data: None
        )

    def sample(self, patcher: Any, setting: Setting, callback: Any = None) -> Any:
        import comfy.sample

        def prompt(seed: int) -> list[Any]:
            generator = self.torch.Generator().manual_seed(seed)
            return [[self.torch.randn(1, setting.tokens, 64, generator=generator), {}]]

        latent = self.torch.zeros(setting.batch, 16, setting.size, setting.size)
        latent = comfy.sample.fix_empty_latent_channels(patcher, latent)
        noise = comfy.sample.prepare_noise(latent, 0)
        return comfy.sample.sample(
            patcher, noise, STEPS, 1.0, "euler", "simple", prompt(1), prompt(2), latent,
            disable_pbar=True, callback=callback,
        )  # fmt: skip

    def reference(self, setting: Setting) -> Any:
        key = replace(setting, tier="")
        if key not in self.references:
            self.references[key] = self.sample(self.patcher(key), key)
        return self.references[key]

    def check(self, setting: Setting) -> str:
        """One tiered run beside the untiered one; what is wrong, or ""."""
        from speed_tier.speed import REPORTS

        expected = self.reference(setting)
        got = self.sample(self.tiered(setting), setting)
        newest = REPORTS.runs()[0]
        self.seen["captured"] += newest.graphs.captured
        self.seen["replayed"] += newest.graphs.replayed
        self.seen["compiled"] += newest.compile.graphs
        self.seen["runs"] += 1
        distance = float((got - expected).norm() / expected.norm())
        return "" if distance <= BOUND else f"{setting}: {distance:.2e} from the untiered output"

    # -- what may happen to a run ---------------------------------------------------------------
    def interrupt(self, setting: Setting) -> str:
        patcher = self.tiered(setting)
        cancel = self.host.management.interrupt_current_processing
        at = random.randrange(STEPS - 1)
        return self._fails(
            lambda: self.sample(patcher, setting, lambda step, *_: step == at and cancel()),
            "InterruptProcessingException",
        )

    def exception(self, setting: Setting) -> str:
        return self._fails_in_a_block(setting, ValueError("planted"), "ValueError")

    def out_of_memory(self, setting: Setting) -> str:
        error = self.torch.OutOfMemoryError("planted")
        return self._fails_in_a_block(setting, error, type(error).__name__, times=99)

    def _fails_in_a_block(
        self, setting: Setting, error: Exception, name: str, times: int = 1
    ) -> str:
        patcher = self.tiered(setting)
        denoiser = patcher.model.diffusion_model
        blocks = getattr(denoiser, "layers", None) or denoiser.transformer_blocks
        countdown = [random.randrange(3)]

        def fail(*_: Any) -> None:
            countdown[0] -= 1
            if -times <= countdown[0] + 1 <= 0:
                raise error

        hook = blocks[-1].register_forward_pre_hook(fail)
        try:
            return self._fails(lambda: self.sample(patcher, setting), name)
        finally:
            hook.remove()

    def _fails(self, run: Any, name: str) -> str:
        try:
            run()
        except BaseException as error:
            if type(error).__name__ != name:
                raise
            return ""
        return f"no {name} came out"

    def unload(self) -> None:
        self.host.unload()


def changed(setting: Setting, event: str) -> Setting:
    """`setting` after a change that `event` names."""
    choices: dict[str, Any] = {
        "size": {"size": random.choice((8, 16, 24))},
        "batch": {"batch": random.choice((1, 2))},
        "tokens": {"tokens": random.choice((5, 12, 40))},
        "lora": {
            "lora": random.choice(("", "lora", "lokr")),
            "strength": random.choice((0.5, 1.0)),
        },
        "tier": {"tier": random.choice(("off", "default", "max"))},
        "model": {
            "model": f"{random.choice(('zimage', 'qwen'))} {random.choice(('dense', 'gguf'))}"
        },
    }
    return replace(setting, **choices.get(event, {}))


def run_sequences(session: Session, count: int) -> list[str]:
    from speed_tier.speed.flags import snapshot
    from speed_tier.speed.patching import active_patches

    wrong: list[str] = []
    before = snapshot()
    for number in range(count):
        setting = changed(changed(Setting(), "model"), "tier")
        for event in random.choices(EVENTS, k=4):
            session.seen[event] += 1
            setting = changed(setting, event)
            if event == "unload":
                session.unload()
            elif event in ("interrupt", "exception", "out of memory"):
                wrong.append(getattr(session, event.replace(" ", "_"))(setting))
            wrong.append(session.check(setting))
            if snapshot() != before:
                wrong.append(f"{number}: flags differ after {event}")
            if active_patches():
                wrong.append(f"{number}: {active_patches()} patches are left after {event}")
    return [one for one in wrong if one]


def memory_left(session: Session, at_start: int) -> int:
    torch, management = session.torch, session.host.management
    session.references.clear()
    session.unload()
    gc.collect()
    management.soft_empty_cache()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return at_start - torch.cuda.mem_get_info()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comfy", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="eager", help="of max's compile; inductor is slow")
    parser.add_argument("--allocator", default="cudaMallocAsync")
    parser.add_argument("--host-args", default=[], type=str.split)
    options = parser.parse_args()
    pack = types.ModuleType("speed_tier")
    pack.__path__ = [str(REPO)]
    sys.modules["speed_tier"] = pack
    from speed_tier.bench.host_session import enter_host

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != here]
    enter_host(str(options.comfy.resolve()), options.allocator, options.host_args)
    import torch
    from speed_tier.tests.host.gguf_in_process import Host

    random.seed(options.seed)
    with torch.inference_mode():
        session = Session(Host(), options.backend)
        # What the process keeps for good (CUDA's context, cuBLAS) is there from one run on.
        for model in ("zimage dense", "qwen gguf"):
            for tier in ("default", "max"):
                session.check(Setting(model, tier=tier))
        memory_left(session, 0)
        start = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
        wrong = run_sequences(session, options.count)
        left = memory_left(session, start)
    if left > SETTLED_BYTES:
        wrong.append(f"{left >> 20} MiB of device memory were not given back")
    facts = {"wrong": wrong[:20], "wrong_count": len(wrong), "memory_left_bytes": left}
    print(json.dumps({**facts, "seen": session.seen}), flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
