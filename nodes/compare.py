"""Speed Tier Compare: one setting at off and in a tier, what differs and what each costs."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from ..speed import Tier, TierRequest, resolve_tier
from ..speed.comparison import Comparison
from ..speed.hosts import comfy_compare
from ..speed.metrics import difference, image_difference, latent_difference
from . import routes

AMPLIFY = 10.0
REPEATS = 1
# The tiers one compares with off; off itself is the control.
TIERS = (Tier.DEFAULT.value, Tier.MAX.value, Tier.OFF.value)

_TIER_TOOLTIP = "What runs beside off. off itself is a control: both are the same, byte for byte."
_REPEATS_TOOLTIP = (
    "Runs of the tier after the first, which pays for compile and warm-up. The speed is the last "
    "run's. A CUDA graph that gains little is made in the second run: 2 measures it too."
)


class SpeedTierCompare:
    """A KSampler that samples twice; replaces every Speed Tier before it."""

    CATEGORY = "speed tier"
    DESCRIPTION = "Samples at off and in a tier with the same seed and shows what differs."
    RETURN_TYPES = ("LATENT", "LATENT", "IMAGE", "STRING")
    RETURN_NAMES = ("off", "tier", "difference", "numbers")
    OUTPUT_TOOLTIPS = (
        "The latent of off.",
        "The latent of the last run in the tier.",
        "The absolute difference, amplified; of decoded pictures where a VAE is connected.",
        "The text on the node.",
    )
    OUTPUT_NODE = True
    FUNCTION = "compare"
    SEARCH_ALIASES: ClassVar = ["psnr", "quality", "difference", "benchmark"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        samplers, schedulers = comfy_compare.sampler_names()
        seed = {"default": 0, "min": 0, "max": 2**64 - 1, "control_after_generate": True}
        cfg = {"default": 1.0, "min": 0.0, "max": 100.0, "step": 0.1, "round": 0.01}
        denoise = {"default": 1.0, "min": 0.0, "max": 1.0, "step": 0.01}
        amplify = {"default": AMPLIFY, "min": 1.0, "max": 1e6, "step": 1.0, "round": 0.1}
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "From any loader; a tier that it has is replaced."}),
                "tier": (list(TIERS), {"default": TIERS[0], "tooltip": _TIER_TOOLTIP}),
                "seed": ("INT", {**seed, "tooltip": "Of the noise; every run starts from it."}),
                "steps": ("INT", _whole(8, 1, 10000, "Sampling steps of every run.")),
                "cfg": ("FLOAT", {**cfg, "tooltip": "Guidance, as in KSampler."}),
                "sampler_name": (samplers, {"tooltip": "As in KSampler."}),
                "scheduler": (schedulers, {"tooltip": "As in KSampler."}),
                "positive": ("CONDITIONING", {"tooltip": "What the picture shall show."}),
                "negative": ("CONDITIONING", {"tooltip": "What it shall not show."}),
                "latent_image": ("LATENT", {"tooltip": "Where every run begins."}),
                "denoise": ("FLOAT", {**denoise, "tooltip": "As in KSampler."}),
                "repeats": ("INT", _whole(REPEATS, 0, 20, _REPEATS_TOOLTIP)),
                "amplify": (
                    "FLOAT",
                    {**amplify, "tooltip": "How many times the picture magnifies a difference."},
                ),
            },
            "optional": {
                "vae": ("VAE", {"tooltip": "Compares decoded pictures too, and shows those."}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def compare(
        self,
        model: Any,
        tier: str,
        seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        positive: Any,
        negative: Any,
        latent_image: Any,
        denoise: float = 1.0,
        repeats: int = REPEATS,
        amplify: float = AMPLIFY,
        vae: Any = None,
        unique_id: str | None = None,
    ) -> dict[str, Any]:
        setting = comfy_compare.Setting(
            seed=seed,
            steps=steps,
            cfg=cfg,
            sampler_name=sampler_name,
            scheduler=scheduler,
            positive=positive,
            negative=negative,
            latent=latent_image,
            denoise=denoise,
        )
        opener = routes.opener_for(str(unique_id or ""), routes.page_server())
        sample = comfy_compare.sample_in_tier
        (off,), off_reports = sample(model, _request("off"), setting, opener)
        runs, reports = sample(model, _request(tier), setting, opener, times=1 + repeats)
        first, *later = [run["samples"] for run in runs]
        found = Comparison(
            tier=tier,
            setting=setting.words(),
            off=off_reports[0] if off_reports else None,
            runs=reports,
            latents=difference(off["samples"], runs[-1]["samples"]),
            repeats=[difference(first, again) for again in later],
        )
        if vae is None:
            picture = latent_difference(off["samples"], runs[-1]["samples"], amplify)
            shown = "latents, mean over the channels in units of the range of off"
        else:
            images = [comfy_compare.decode(vae, latent) for latent in (off, runs[-1])]
            found.images = difference(*images, peak=1.0)
            picture = image_difference(*images, amplify)
            shown = "decoded pictures"
        found.picture = _about(picture, f"|{tier} - off| of {shown}", amplify)
        text, encoded = found.to_text(), json.dumps(found.to_dict())
        return {
            "ui": {"text": [text], "json": [encoded]},
            "result": (off, runs[-1], picture, text),
        }


def _whole(default: int, least: int, most: int, tooltip: str) -> dict[str, Any]:
    return {"default": default, "min": least, "max": most, "tooltip": tooltip}


def _request(tier: str) -> TierRequest:
    return TierRequest(resolve_tier(tier, is_gguf=False))


def _about(picture: Any, what: str, amplify: float) -> str:
    clipped = float((picture >= 1).float().mean())
    text = f"{what}, times {amplify:.10g}; brightest {float(picture.max()):.2f} of 1"
    return text + (f", {clipped:.1%} of it at the limit" if clipped else "")
