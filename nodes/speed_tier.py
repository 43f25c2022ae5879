"""Speed Tier and Speed Tier (Advanced): put a tier between a loader and a sampler."""

from __future__ import annotations

from typing import Any, ClassVar

from ..speed import Switch, Tier, TierRequest, configured, resolve_tier
from ..speed.hosts import comfy
from ..speed.warm_up import Size, parse_sizes
from . import routes

TIERS = tuple(tier.value for tier in Tier)
DEQUANT_CACHE_GIB = 4.0
_SWITCHES = tuple(switch.value for switch in Switch)

_TIER_TOOLTIP = (
    "off: the host's own path, bit for bit. default: faster without waiting. "
    "max: as fast as the card allows after one short compile; rounds differently."
)
_CHECK_TOOLTIP = (
    "Compare the first call of every size with the untiered path, and drop what is at fault. "
    "Costs about two calls once."
)
_WARM_UP_TOOLTIP = (
    "Sizes in pixels, such as 1024x1024, 832x1216, that the first run prepares in its first step, "
    "so that changing to them compiles nothing later. Empty: a size is prepared when it is used."
)
FEATURE_TOOLTIPS = {
    "attention_backend": "Run attention with the fused kernel that measures fastest on this card.",
    "cudnn_benchmark": "Let cudnn measure its convolution algorithms. The transformer has none.",
    "eager_patches": "Run the pointwise parts of every block in a few fused kernels.",
    "gguf_dequant": "Dequantise GGUF weights with one kernel a type.",
    "dequant_cache": "Keep the largest GGUF layers dequantised, up to dequant_cache_gib.",
    "tf32": "fp32 matrix products in TF32: faster on compute capability 8.0 and up, rounds more.",
    "fused_qkv": "One matrix product for q, k and v where the model has three.",
    "regional_compile": "Compile the repeated blocks, once per kind of block.",
    "graph_capture": "Replay a whole call as one CUDA graph, where that measures faster.",
}


def apply_tier(
    model: Any,
    tier: str,
    switches: dict[str, Switch],
    unique_id: str | None,
    is_gguf: bool = False,
    settings: dict[str, dict[str, Any]] | None = None,
    self_check: bool = True,
    warm_up: tuple[Size, ...] = (),
) -> Any:
    """A clone of `model` in a tier, whose runs report to the node `unique_id`."""
    table = configured(settings or {})
    resolved = resolve_tier(tier, is_gguf)
    request = TierRequest(resolved, switches, table, self_check, warm_up=warm_up)
    opener = routes.opener_for(str(unique_id or ""), routes.page_server())
    return comfy.tier_clone(model, request, opener)


def _sizes(text: str | None) -> tuple[Size, ...]:
    return () if text is None else parse_sizes(text)  # None: a workflow saved without the value


class SpeedTier:
    """One dropdown. Replaces every Speed Tier before it; LoRA may come before or after."""

    CATEGORY = "speed tier"
    DESCRIPTION = "Run Z-Image or Qwen-Image in a speed tier and leave nothing behind."
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    SEARCH_ALIASES: ClassVar = ["compile", "speed", "torch.compile", "tf32"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "From any loader."}),
                "tier": (list(TIERS), {"default": "default", "tooltip": _TIER_TOOLTIP}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def apply(self, model: Any, tier: str, unique_id: str | None = None) -> tuple[Any]:
        return (apply_tier(model, tier, {}, unique_id),)


class SpeedTierAdvanced:
    """The same with one switch per feature, for people who measure."""

    CATEGORY = "speed tier"
    DESCRIPTION = "Speed Tier with a switch per feature: auto, on (even unmeasured) or off."
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"

    @classmethod
    def VALIDATE_INPUTS(cls, warm_up_sizes: str = "") -> bool | str:
        """Before anything is loaded; what comes over a link is refused in `apply`."""
        try:
            _sizes(warm_up_sizes)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        switches = {
            name: (list(_SWITCHES), {"default": "auto", "tooltip": tooltip})
            for name, tooltip in FEATURE_TOOLTIPS.items()
        }
        required = SpeedTier.INPUT_TYPES()["required"]
        budget = {
            "default": DEQUANT_CACHE_GIB,
            "min": 0.0,
            "max": 1024.0,
            "step": 0.5,
            "tooltip": "Most device memory, in GiB, for dequant_cache when that is on.",
        }
        return {
            "required": {**required, **switches},
            "optional": {
                "dequant_cache_gib": ("FLOAT", budget),
                "self_check": ("BOOLEAN", {"default": True, "tooltip": _CHECK_TOOLTIP}),
                "warm_up_sizes": ("STRING", {"default": "", "tooltip": _WARM_UP_TOOLTIP}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def apply(
        self,
        model: Any,
        tier: str,
        unique_id: str | None = None,
        dequant_cache_gib: float = DEQUANT_CACHE_GIB,
        self_check: bool = True,
        warm_up_sizes: str = "",
        **switches: str,
    ) -> tuple[Any]:
        chosen = {name: Switch(value) for name, value in switches.items()}
        settings = {"dequant_cache": {"budget_gib": dequant_cache_gib}}
        tiered = apply_tier(
            model,
            tier,
            chosen,
            unique_id,
            settings=settings,
            self_check=self_check,
            warm_up=_sizes(warm_up_sizes),
        )
        return (tiered,)
