"""What packed blocks cost in compiles, as LoRAs, sizes and switches change; judges nothing."""

from __future__ import annotations

from typing import Any

from .gguf_in_process import LITTLE, Facts, Host, Pair, relative


class _Walk:
    """Runs in a row on one model; each adds its facts."""

    def __init__(self, host: Host, pair: Pair) -> None:
        self.host, self.pair = host, pair
        self.facts: Facts = {}

    def loras(self, *adapters: tuple[Facts, float]) -> tuple[Any, Any]:
        dense, quant = self.pair.both
        for adapter, strength in adapters:
            dense = self.host.add(dense, adapter, strength)
            quant = self.host.add(quant, adapter, strength)
        return dense, quant

    def step(
        self,
        name: str,
        models: tuple[Any, Any] | None = None,
        switches: dict[str, str] | None = None,
        share: float | None = None,
        **options: Any,
    ) -> None:
        """One run of the dense model as it is and of the packed one in max."""
        from speed_tier.speed import REPORTS
        from torch._dynamo.utils import counters

        dense, quant = models or self.pair.both
        expected = self.host.sample(dense.clone(), **options)
        tiered = _tiered(
            quant, {"gguf_dequant": "on", "regional_compile": "on", **(switches or {})}
        )
        if share is not None:
            self.host.unload()
        self.host.load(tiered, share)
        offloaded = self.pair.offloaded(adapted=True)
        before = counters["stats"]["unique_graphs"]
        got = self.host.sample_as_loaded(tiered, **options)
        report = REPORTS.runs()[0].to_dict()
        compiled = report["compile"] or {"kinds": [], "graph_breaks": {}}
        self.facts[name] = {
            "distance": relative(got, expected),
            "compiles": {kind["name"]: kind["compiles"] for kind in compiled["kinds"]},
            "graphs": counters["stats"]["unique_graphs"] - before,
            "graph_breaks": compiled["graph_breaks"],
            "engaged": [f["name"] for f in report["features"] if f["state"] == "engaged"],
            "eager": [f["note"] for f in report["features"] if "eager" in f["note"]],
            "sum": float(got.double().abs().sum()),
            "offloaded": offloaded,
            "still_fast": next(iter(self.pair.packed.values())).state.fast,
        }


def _tiered(patcher: Any, switches: dict[str, str]) -> Any:
    from speed_tier.speed import Switch, TierRequest, resolve_tier
    from speed_tier.speed.hosts.comfy import tier_clone
    from speed_tier.speed.optimizations import OPTIMIZATIONS
    from speed_tier.speed.optimizations.regional_compile import CompileConfig, RegionalCompile

    # Dynamo traces and guards as it always does, and nothing waits for a code generator.
    eager = RegionalCompile(CompileConfig(backend="eager"))
    rows = tuple(eager if row.name == eager.name else row for row in OPTIMIZATIONS)
    chosen = {name: Switch(value) for name, value in switches.items()}
    request = TierRequest(resolve_tier("max", is_gguf=True), chosen, rows)
    return tier_clone(patcher, request, lambda report: lambda kind, data: None)


def compile_walk(host: Host, pair: Pair) -> Facts:
    """Every way in which a session changes LoRAs, then sizes, switches and loads."""
    import comfy.hooks
    from speed_tier.speed.kernels import dispatch

    # The dequantisation's own compiles are counted elsewhere, and would be counted in here.
    dispatch._faster_reference = lambda row, device: ("reference", "the test says so")
    walk = _Walk(host, pair)
    small = host.lora(pair)
    large = host.lora(pair, target="all", rank=16, seed=8)
    lokr = host.lora(pair, "lokr", "all", seed=9)
    hooks = comfy.hooks.create_hook_lora({**large, **host.plain_lora(pair)}, 1.0, 0.0)
    walk.step("first")
    walk.step("again", steps=3)
    walk.step("lora", walk.loras((small, 1.0)))
    walk.step("weaker", walk.loras((small, 0.3)))
    walk.step("other rank and layers", walk.loras((large, 1.0)))
    walk.step("first block", walk.loras((host.lora(pair, target="first block", rank=32), 1.0)))
    walk.step("two", walk.loras((small, 0.5), (large, 0.8)))
    walk.step("other order", walk.loras((large, 0.8), (small, 0.5)))
    walk.step("lokr", walk.loras((lokr, 1.0)))
    walk.step("dora and lora", walk.loras((host.lora(pair, "dora", "mlp"), 1.0), (small, 1.0)))
    walk.step("plain layers too", walk.loras(({**small, **host.plain_lora(pair)}, 1.0)))
    walk.step("hooks", positive={"hooks": hooks}, negative={"hooks": hooks})
    walk.step("back")
    walk.step("lora again", walk.loras((small, 1.0)))
    walk.step("second size", size=12)
    walk.step("second size, lora", walk.loras((small, 1.0)), size=12)
    walk.step("third size", size=16)
    walk.step("third size, other lora", walk.loras((large, 1.0)), size=16)
    for switched, off in (("regional only", "gguf_dequant"), ("dequant only", "regional_compile")):
        for name in (switched, f"{switched}, again"):
            walk.step(name, switches={off: "off"})
    walk.step("both again")
    walk.step("regional only, lora", walk.loras((small, 1.0)), switches={"gguf_dequant": "off"})
    walk.step("little loaded, lora", walk.loras((large, 1.0)), share=LITTLE)
    walk.step("little loaded, lora, again", walk.loras((small, 0.5)), share=LITTLE)
    walk.step("loaded again", walk.loras((small, 1.0)))
    return walk.facts


PARTS = {"compile": (compile_walk,)}
