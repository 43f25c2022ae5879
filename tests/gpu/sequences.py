"""Random sequences of what people do to a tiered model, each output beside the untiered one.

    python tests/gpu/sequences.py /path/to/ComfyUI --count 200
    python tests/gpu/sequences.py /path/to/ComfyUI --count 10 --real-size

Tiny fp32 models of both families, dense and GGUF, in one process with a real ComfyUI; or models of
the real size, in bf16 and Q4_K_M. Between runs one thing changes: size, batch, prompt length, LoRA,
tier or model; or the run is interrupted, fails in a block, runs out of memory; or everything is
unloaded. Prints one JSON line: what differed, what leaked, and how much was captured and replayed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import entry

MODELS = ("zimage dense", "zimage gguf", "qwen dense", "qwen gguf")
FAMILIES = {"zimage": "z_image", "qwen": "qwen_image"}
EVENTS = (
    *("size", "batch", "tokens", "lora", "tier", "model", "again"),
    *("interrupt", "exception", "out of memory", "unload"),
)
STEPS = 4
SETTLED_BYTES = 32 << 20  # cuBLAS workspaces and the like, which torch keeps


@dataclass(frozen=True)
class Setting:
    """What a run depends on."""

    model: str
    size: int
    batch: int = 1
    tokens: int = 12
    lora: str = ""
    strength: float = 1.0
    tier: str = "default"


class Tiny:
    """Small fp32 models; a packed one has the weights of its dense twin."""

    sizes = (8, 16, 24)
    text_width = dict.fromkeys(FAMILIES, 64)
    bound = 1e-5  # relative, fp32; TF32 is switched off

    def __init__(self, host: Any, models: Sequence[str], options: argparse.Namespace) -> None:
        self.host = host
        self.pairs = {arch: host.pair(arch) for arch in FAMILIES}

    def patcher(self, setting: Setting) -> Any:
        arch, kind = setting.model.split()
        pair = self.pairs[arch]
        patcher = pair.dense if kind == "dense" else pair.quant
        if setting.lora:
            adapter = self.host.lora(pair, setting.lora)
            patcher = self.host.add(patcher, adapter, setting.strength)
        return patcher


class Real:
    """Models of the real size with random weights, bf16 and Q4_K_M."""

    sizes = (64, 96, 128)
    ranks: ClassVar = {"lora": 16, "lokr": 32}  # of LoRAs, both: the other kind is for tiny models

    def __init__(self, host: Any, models: Sequence[str], options: argparse.Namespace) -> None:
        from speed_tier.bench.host_session import TEXT_WIDTH
        from speed_tier.speed.bounds import check_bounds

        self.text_width = {arch: TEXT_WIDTH[family] for arch, family in FAMILIES.items()}
        self.bound = check_bounds(host.torch.bfloat16, with_tf32=False).output
        self.patchers = {name: self._load(name, options) for name in models}

    def _load(self, name: str, options: argparse.Namespace) -> Any:
        from speed_tier.bench import gguf_file, tiers

        arch, kind = name.split()
        family = FAMILIES[arch]
        if kind == "dense":
            return tiers.load_dense(Path(), family, options)
        path = options.folder / f"speed_tier_sequences_{family}.gguf"
        try:
            gguf_file.write_model(path, family, "Q4_K_M", options.layers)
            return tiers.load_ours(path, family, options)
        finally:
            gguf_file.remove(path)  # what is mapped stays readable

    def patcher(self, setting: Setting) -> Any:
        from speed_tier.bench.tiers import with_lora

        patcher = self.patchers[setting.model]
        if setting.lora:
            patcher = with_lora(patcher, self.ranks[setting.lora], setting.strength)
        return patcher


class Session:
    """Runs and references."""

    def __init__(self, host: Any, zoo: Tiny | Real, backend: str) -> None:
        self.host = host
        self.zoo = zoo
        self.backend = backend
        self.torch = host.torch
        self.references: dict[Setting, Any] = {}
        self.seen: Counter[str] = Counter()
        self.largest = 0.0

    def tiered(self, setting: Setting) -> Any:
        from speed_tier.speed import Switch, TierRequest, configured, resolve_tier
        from speed_tier.speed.hosts import comfy

        table = configured({"regional_compile": {"backend": self.backend}})
        tier = resolve_tier(setting.tier, True)
        request = TierRequest(tier, {"tf32": Switch.OFF}, table)
        return comfy.tier_clone(
            self.zoo.patcher(setting), request, lambda report: lambda kind, data: None
        )

    def sample(self, patcher: Any, setting: Setting, callback: Any = None) -> Any:
        import comfy.sample

        width = self.zoo.text_width[setting.model.split()[0]]

        def prompt(seed: int) -> list[Any]:
            generator = self.torch.Generator().manual_seed(seed)
            return [[self.torch.randn(1, setting.tokens, width, generator=generator), {}]]

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
            self.references[key] = self.sample(self.zoo.patcher(key), key)
        return self.references[key]

    def check(self, setting: Setting) -> str:
        """One tiered run beside the untiered one; what is wrong, or ""."""
        from speed_tier.speed import REPORTS
        from speed_tier.speed.report import State

        expected = self.reference(setting)
        got = self.sample(self.tiered(setting), setting)
        newest = REPORTS.runs()[0]
        self.seen["captured"] += newest.graphs.captured
        self.seen["replayed"] += newest.graphs.replayed
        self.seen["compiled"] += newest.compile.graphs
        self.seen["runs"] += 1
        fell = {f.name: f.reason for f in newest.features if f.state is State.FELL_BACK}
        # What ran out of memory may step aside; what gave something else may not exist.
        alarms = {name: why for name, why in fell.items() if "check" in why or "replay" in why}
        distance = float((got - expected).norm() / expected.norm())
        self.largest = max(self.largest, distance)
        if distance > self.zoo.bound:
            return f"{setting}: {distance:.2e} from the untiered output"
        return f"{setting}: {alarms}" if alarms else ""

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


def changed(setting: Setting, event: str, models: Sequence[str], sizes: Sequence[int]) -> Setting:
    """`setting` after a change that `event` names."""
    choices: dict[str, Any] = {
        "size": {"size": random.choice(sizes)},
        "batch": {"batch": random.choice((1, 2))},
        "tokens": {"tokens": random.choice((5, 12, 40))},
        "lora": {
            "lora": random.choice(("", "lora", "lokr")),
            "strength": random.choice((0.5, 1.0)),
        },
        "tier": {"tier": random.choice(("off", "default", "max"))},
        "model": {"model": random.choice(models)},
    }
    return replace(setting, **choices.get(event, {}))


def run_sequences(session: Session, models: Sequence[str], count: int) -> list[str]:
    from speed_tier.speed.flags import snapshot
    from speed_tier.speed.patching import active_patches

    wrong: list[str] = []
    before = snapshot()
    sizes = session.zoo.sizes
    for number in range(count):
        setting = Setting(random.choice(models), sizes[1])
        setting = changed(setting, "tier", models, sizes)
        for event in random.choices(EVENTS, k=4):
            session.seen[event] += 1
            setting = changed(setting, event, models, sizes)
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


def _absolute(path: str) -> Path:
    return Path(path).resolve()  # the host's folder is the working one later


def main() -> None:
    parser = entry.parser(__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real-size", action="store_true")
    parser.add_argument("--models", default=MODELS, type=lambda s: s.split(","))
    parser.add_argument("--folder", type=_absolute, default=Path(tempfile.gettempdir()))
    parser.add_argument("--backend", default="eager", help="of max's compile; inductor is slow")
    options = parser.parse_args()
    entry.enter(options)
    import torch
    from speed_tier.tests.host.gguf_in_process import Host

    random.seed(options.seed)
    with torch.inference_mode():
        host = Host()
        zoo = (Real if options.real_size else Tiny)(host, options.models, options)
        session = Session(host, zoo, options.backend)
        # What the process keeps for good (CUDA's context, cuBLAS) is there from one run on.
        for model in options.models:
            for tier in ("default", "max"):
                session.check(Setting(model, zoo.sizes[1], tier=tier))
        memory_left(session, 0)
        start = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
        wrong = run_sequences(session, options.models, options.count)
        left = memory_left(session, start)
    if left > SETTLED_BYTES:
        wrong.append(f"{left >> 20} MiB of device memory were not given back")
    facts = {"wrong": wrong[:20], "wrong_count": len(wrong), "memory_left_bytes": left}
    seen = {"seen": session.seen, "largest_distance": session.largest}
    print(json.dumps({**facts, **seen}), flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
