"""Builders for API-format graphs; each call adds nodes and returns links to their outputs."""

from __future__ import annotations

from typing import Any

Link = list[Any]
FEATURES = (
    "attention_backend",
    "cudnn_benchmark",
    "eager_patches",
    "gguf_dequant",
    "dequant_cache",
    "tf32",
    "fused_qkv",
    "regional_compile",
    "graph_capture",
)
TEXT_WIDTH = {"tiny": 64, "zimage": 2560, "qwen": 3584}


class Graph:
    """An API prompt under construction; `prompt` is what the host takes."""

    def __init__(self) -> None:
        self.prompt: dict[str, dict[str, Any]] = {}

    def add(self, class_type: str, node_id: str | None = None, /, **inputs: Any) -> Link:
        """Adds a node and returns a link to its first output."""
        node_id = node_id or str(len(self.prompt) + 1)
        if node_id in self.prompt:
            raise ValueError(f"node id {node_id} is taken")
        self.prompt[node_id] = {"class_type": class_type, "inputs": inputs}
        return [node_id, 0]

    def tiny_model(
        self,
        arch: str = "zimage",
        *,
        seed: int = 0,
        layers: int = 2,
        dtype: str = "fp32",
        label: str = "tiny",
    ) -> Link:
        inputs = {"arch": arch, "seed": seed, "layers": layers, "dtype": dtype, "label": label}
        return self.add("TestTinyModel", **inputs)

    def unet(self, name: str, weight_dtype: str = "default") -> Link:
        return self.add("UNETLoader", unet_name=name, weight_dtype=weight_dtype)

    def speed_tier(self, model: Link, tier: str, node_id: str | None = None) -> Link:
        return self.add("SpeedTier", node_id, model=model, tier=tier)

    def speed_tier_advanced(
        self, model: Link, tier: str, node_id: str | None = None, **features: str
    ) -> Link:
        """`features` as in `regional_compile="on"`; the others are "auto"."""
        choices = {name: features.pop(name, "auto") for name in FEATURES}
        choices.update(features)
        return self.add("SpeedTierAdvanced", node_id, model=model, tier=tier, **choices)

    def lora(
        self,
        model: Link,
        *,
        kind: str = "lora",
        target: str = "all",
        rank: int = 4,
        strength: float = 1.0,
        seed: int = 7,
    ) -> Link:
        inputs = {"kind": kind, "target": target, "rank": rank, "strength": strength, "seed": seed}
        return self.add("TestLora", model=model, **inputs)

    def conditioning(
        self, *, dim: int = 64, tokens: int = 12, batch: int = 1, seed: int = 1
    ) -> Link:
        return self.add("TestConditioning", dim=dim, tokens=tokens, batch=batch, seed=seed)

    def sample(
        self,
        model: Link,
        *,
        positive: Link | None = None,
        negative: Link | None = None,
        width: int = 64,
        height: int = 64,
        batch: int = 1,
        steps: int = 2,
        cfg: float = 1.0,
        seed: int = 0,
        dim: int = 64,
        tokens: int = 12,
        sampler: str = "euler",
        node_id: str | None = None,
    ) -> Link:
        """A stock KSampler; conditioning and an empty 16-channel latent come with it."""
        positive = positive or self.conditioning(dim=dim, tokens=tokens, seed=1)
        negative = negative or self.conditioning(dim=dim, tokens=tokens, seed=2)
        size = {"width": width, "height": height, "batch_size": batch}
        return self.add(
            "KSampler",
            node_id,
            model=model,
            positive=positive,
            negative=negative,
            latent_image=self.add("EmptySD3LatentImage", **size),
            seed=seed,
            steps=steps,
            cfg=cfg,
            sampler_name=sampler,
            scheduler="simple",
            denoise=1.0,
        )

    def compare(self, model: Link, tier: str, node_id: str | None = None, **more: Any) -> Link:
        """A Speed Tier Compare with conditioning and an empty latent of its own."""
        inputs = {
            "seed": 0,
            "steps": 3,
            "cfg": 1.0,
            "sampler_name": "euler",
            "scheduler": "simple",
            "denoise": 1.0,
            "repeats": 0,
            "amplify": 10.0,
        }
        return self.add(
            "SpeedTierCompare",
            node_id,
            model=model,
            tier=tier,
            positive=self.conditioning(seed=1),
            negative=self.conditioning(seed=2),
            latent_image=self.add("EmptySD3LatentImage", width=64, height=64, batch_size=1),
            **{**inputs, **more},
        )

    def sink(self, latent: Link, name: str = "latent", node_id: str | None = None) -> Link:
        return self.add("TestSink", node_id, latent=latent, name=name)

    def save_image(self, latent: Link, vae: Link, prefix: str, node_id: str | None = None) -> Link:
        image = self.add("VAEDecode", samples=latent, vae=vae)
        return self.add("SaveImage", node_id, images=image, filename_prefix=prefix)


def tiny_run(
    arch: str = "zimage",
    tier: str | None = None,
    *,
    lora: dict[str, Any] | None = None,
    advanced: dict[str, str] | None = None,
    model: dict[str, Any] | None = None,
    report: bool = False,
    **sample: Any,
) -> dict[str, Any]:
    """tiny model -> [tier] -> [LoRA] -> KSampler -> TestSink, with ids "tier", "sampler", "sink".

    Args:
        tier: None leaves the node out, for hosts without the pack.
        advanced: feature choices; uses the Advanced node.
        report: adds a SpeedTierReport node with the id "report".
    """
    graph = Graph()
    link = graph.tiny_model(arch, **(model or {}))
    if tier is not None and advanced is not None:
        link = graph.speed_tier_advanced(link, tier, "tier", **advanced)
    elif tier is not None:
        link = graph.speed_tier(link, tier, "tier")
    if lora is not None:
        link = graph.lora(link, **lora)
    latent = graph.sample(link, node_id="sampler", **sample)
    if report:
        latent = graph.add("SpeedTierReport", "report", value=latent)
    graph.sink(latent, node_id="sink")
    return graph.prompt


def two_branches(
    arch: str = "zimage",
    tiers: tuple[str | None, str | None] = (None, "max"),
    *,
    loras: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None),
    **sample: Any,
) -> dict[str, Any]:
    """One model, two samplers, each with its own tier (None: no tier node); sinks "sink0/1"."""
    graph = Graph()
    model = graph.tiny_model(arch)
    for i, (tier, lora) in enumerate(zip(tiers, loras, strict=True)):
        link = model
        if tier is not None:
            link = graph.speed_tier(link, tier, f"tier{i}")
        if lora is not None:
            link = graph.lora(link, **lora)
        latent = graph.sample(link, node_id=f"sampler{i}", **sample)
        graph.sink(latent, f"branch{i}", node_id=f"sink{i}")
    return graph.prompt


def demo_run(
    unet: str, vae: str, family: str, tier: str, *, size: int, steps: int, seed: int, prefix: str
) -> dict[str, Any]:
    """Stock loader -> Speed Tier -> KSampler -> report -> VAE decode -> PNG, as users build it."""
    graph = Graph()
    link = graph.speed_tier(graph.unet(unet), tier, "tier")
    shape = {"width": size, "height": size, "steps": steps, "seed": seed}
    latent = graph.sample(link, node_id="sampler", dim=TEXT_WIDTH[family], **shape)
    reported = graph.add("SpeedTierReport", "report", value=latent)
    graph.sink(reported, prefix, node_id="sink")
    graph.save_image(reported, graph.add("VAELoader", vae_name=vae), prefix, node_id="save")
    return graph.prompt
