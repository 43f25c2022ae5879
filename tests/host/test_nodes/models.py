"""Tiny models of the real classes, random conditioning, LoRA, control and VAE."""

from __future__ import annotations

from typing import Any

import comfy.controlnet
import comfy.model_management as mm
import comfy.model_patcher
import comfy.sd
import comfy.supported_models as supported
import torch
from comfy.ldm.flux.model import FluxParams

from .tracking import track

CATEGORY = "speed tier tests"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Width 256 with heads of 128 keeps the real head size; everything else is as small as it goes.
ZIMAGE = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 16,
    "dim": 256,
    "cap_feat_dim": 64,
    "qk_norm": True,
    "n_heads": 2,
    "n_kv_heads": 2,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}
QWEN = {
    "image_model": "qwen_image",
    "in_channels": 64,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
}
# A family the pack does not know: it must be left alone, and say so.
OTHER = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 64,
    "context_in_dim": 64,
    "hidden_size": 256,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 1,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": False,
}


def make_tiny(arch: str, seed: int, layers: int, dtype: torch.dtype) -> Any:
    """A ModelPatcher around a small model of the host's own class."""
    if arch == "zimage":
        config = supported.ZImage(dict(ZIMAGE, n_layers=layers))
    elif arch == "qwen":
        config = supported.QwenImage(dict(QWEN, num_layers=layers))
    else:
        sizes = dict(OTHER, depth_single_blocks=layers)
        if "txt_ids_dims" in FluxParams.__dataclass_fields__:  # newer hosts only
            sizes["txt_ids_dims"] = []
        config = supported.FluxSchnell(sizes)
    config.set_inference_dtype(dtype, None)
    model = config.get_model({}, "")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and ("norm" in name or "scale" in name) and "bias" not in name:
                fresh = torch.ones(weight.shape)
            else:
                fresh = torch.randn(weight.shape, generator=generator) * 0.05
            weight.data = fresh.to(weight.dtype)
    return comfy.model_patcher.ModelPatcher(
        model, load_device=mm.get_torch_device(), offload_device=mm.unet_offload_device()
    )


class TestTinyModel:
    """Returns a new random model; the same inputs give the same weights."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "arch": (["zimage", "qwen", "other"],),
                "seed": ("INT", {"default": 0}),
                "layers": ("INT", {"default": 2, "min": 1, "max": 64}),
                "dtype": (list(DTYPES),),
            },
            "optional": {"label": ("STRING", {"default": "tiny"})},
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "make"
    CATEGORY = CATEGORY

    def make(self, arch: str, seed: int, layers: int, dtype: str, label: str = "tiny") -> Any:
        patcher = make_tiny(arch, seed, layers, DTYPES[dtype])
        track(label, patcher)
        return (patcher,)


class TestTrack:
    """Passes a model through and remembers it weakly under `label`."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "label": ("STRING", {"default": "model"})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "watch"
    CATEGORY = CATEGORY

    def watch(self, model: Any, label: str) -> Any:
        track(label, model)
        return (model,)


class TestConditioning:
    """Random conditioning; `dim` is 64 for tiny models, 2560 and 3584 for the real widths."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "dim": ("INT", {"default": 64, "min": 1, "max": 16384}),
                "tokens": ("INT", {"default": 12, "min": 1, "max": 4096}),
                "batch": ("INT", {"default": 1, "min": 1, "max": 64}),
                "seed": ("INT", {"default": 1}),
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = CATEGORY

    def make(self, dim: int, tokens: int, batch: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        text = torch.randn(batch, tokens, dim, generator=generator)
        pooled = torch.randn(batch, 64, generator=generator)
        return ([[text, {"pooled_output": pooled}]],)


TARGETS = {
    "attention": ("attention.", "attn."),
    "mlp": ("feed_forward.", "_mlp.", ".mlp"),
    "all": ("attention.", "attn.", "feed_forward.", "_mlp.", ".mlp"),
    "first block": ("layers.0.", "blocks.0."),
}


def lora_state_dict(model: Any, kind: str, target: str, rank: int, seed: int) -> dict[str, Any]:
    """A random adapter file's content, under the names the host's own key map knows."""
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, torch.Tensor] = {}

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    for key, weight in model.model.state_dict().items():
        stem = key.removesuffix(".weight")
        if stem == key or weight.ndim != 2 or not key.startswith("diffusion_model."):
            continue
        if "refiner" in key or not any(part in key for part in TARGETS[target]):
            continue
        rows, columns = weight.shape
        names = {stem: rows}
        if stem.endswith("attention.qkv"):
            # The published names: three adapters that the host adds at offsets of one weight.
            base = stem.removesuffix("qkv")
            names = {base + part: rows // 3 for part in ("to_q", "to_k", "to_v")}
        for name, height in names.items():
            if kind == "loha":
                for part in ("hada_w1", "hada_w2"):
                    out[f"{name}.{part}_a"] = normal(height, rank)
                    out[f"{name}.{part}_b"] = normal(rank, columns)
            elif kind == "lokr":
                out[f"{name}.lokr_w1"] = normal(2, 2)
                out[f"{name}.lokr_w2"] = normal(height // 2, columns // 2)
            else:
                out[f"{name}.lora_up.weight"] = normal(height, rank)
                out[f"{name}.lora_down.weight"] = normal(rank, columns)
            if kind == "dora":
                out[f"{name}.dora_scale"] = normal(height, 1).abs() + 0.5
            out[f"{name}.alpha"] = torch.tensor(float(rank))
    return out


class TestLora:
    """Applies a random adapter through the host's own LoRA loading."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "kind": (["lora", "lokr", "loha", "dora"],),
                "target": (list(TARGETS),),
                "rank": ("INT", {"default": 4, "min": 1, "max": 256}),
                "strength": ("FLOAT", {"default": 1.0, "min": -10.0, "max": 10.0}),
                "seed": ("INT", {"default": 7}),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    CATEGORY = CATEGORY

    def apply(
        self, model: Any, kind: str, target: str, rank: int, strength: float, seed: int
    ) -> Any:
        adapter = lora_state_dict(model, kind, target, rank, seed)
        if not adapter:
            raise ValueError(f"no weight of this model matches LoRA target {target!r}")
        patched, _ = comfy.sd.load_lora_for_models(model, None, adapter, strength, 0)
        if not patched.patches:
            raise ValueError("the host took none of the adapter's keys")
        return (patched,)


class ResidualControl(comfy.controlnet.ControlBase):
    """Adds a random residual to the image tokens after each block, as a ControlNet does."""

    def __init__(self, amount: float, seed: int) -> None:
        super().__init__()
        self.amount, self.seed = amount, seed
        self.width = 0
        self.blocks = 0

    def pre_run(self, model: Any, percent_to_timestep_function: Any) -> None:
        super().pre_run(model, percent_to_timestep_function)
        inner = model.diffusion_model
        self.width = getattr(inner, "inner_dim", 0) or getattr(inner, "dim", 0)
        blocks = getattr(inner, "transformer_blocks", None) or getattr(inner, "layers", ())
        self.blocks = len(blocks)

    def get_control(
        self, x_noisy: Any, t: Any, cond: Any, batched_number: int, transformer_options: Any
    ) -> dict[str, list[Any]]:
        tokens = ((x_noisy.shape[-2] + 1) // 2) * ((x_noisy.shape[-1] + 1) // 2)
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.blocks, 1, tokens, self.width)
        noise = torch.randn(shape, generator=generator) * self.amount
        noise = noise.to(x_noisy.device, x_noisy.dtype).expand(-1, x_noisy.shape[0], -1, -1)
        return {"input": [*noise.clone()], "middle": [], "output": []}

    def copy(self) -> ResidualControl:
        twin = ResidualControl(self.amount, self.seed)
        self.copy_to(twin)
        return twin


class TestControl:
    """Makes `control` reach the model (Qwen-Image adds it; Z-Image in 0.3.75 ignores it)."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "conditioning": ("CONDITIONING",),
                "amount": ("FLOAT", {"default": 0.5, "min": -10.0, "max": 10.0}),
                "seed": ("INT", {"default": 3}),
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "apply"
    CATEGORY = CATEGORY

    def apply(self, conditioning: Any, amount: float, seed: int) -> Any:
        control = ResidualControl(amount, seed)
        extra = {"control": control, "control_apply_to_uncond": True}
        return ([[text, {**options, **extra}] for text, options in conditioning],)


class TestTinyVAE:
    """A narrow AutoencoderKL with 16 latent channels, through the host's VAE class."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "width": ("INT", {"default": 32, "min": 32, "max": 128, "step": 32}),
                "seed": ("INT", {"default": 0}),
            }
        }

    RETURN_TYPES = ("VAE",)
    FUNCTION = "make"
    CATEGORY = CATEGORY

    def make(self, width: int, seed: int) -> Any:
        from comfy.ldm.models.autoencoder import AutoencoderKL

        layout = {
            "double_z": True,
            "z_channels": 16,
            "resolution": 256,
            "in_channels": 3,
            "out_ch": 3,
            "ch": width,
            "ch_mult": [1, 2, 4, 4],
            "num_res_blocks": 1,
            "attn_resolutions": [],
            "dropout": 0.0,
        }
        params = {"ddconfig": layout, "embed_dim": 16}
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, weight in AutoencoderKL(**params).state_dict().items():
            if weight.ndim == 1:
                fill = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                weights[name] = torch.full(weight.shape, fill)
            else:
                fan_in = weight[0].numel()
                fresh = torch.randn(weight.shape, generator=generator)
                weights[name] = fresh * fan_in**-0.5
        vae = comfy.sd.VAE(sd=weights, config={"params": params})
        vae.latent_channels = 16
        return (vae,)


NODES = (
    TestTinyModel,
    TestTrack,
    TestConditioning,
    TestLora,
    TestControl,
    TestTinyVAE,
)
