"""A ComfyUI checkout imported into this process, with random models of the real architecture."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]

Z_IMAGE = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 16,
    "dim": 3840,
    "cap_feat_dim": 2560,
    "n_layers": 30,
    "qk_norm": True,
    "n_heads": 30,
    "n_kv_heads": 30,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}
QWEN_IMAGE = {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60}
TEXT_WIDTH = {"z_image": 2560, "qwen_image": 3584}


def enter_host(comfy: str, allocator: str, host_args: list[str]) -> None:
    """Put a ComfyUI checkout on the path, as its own main.py would start it. Before torch."""
    if allocator == "cudaMallocAsync":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    sys.argv = [sys.argv[0], *host_args]
    os.chdir(comfy)
    sys.path.insert(0, comfy)
    import comfy.options

    comfy.options.enable_args_parsing()
    pack = types.ModuleType("speed_tier")
    pack.__path__ = [str(REPO)]
    sys.modules["speed_tier"] = pack


def empty_model(
    family: str, layers: int | None = None, dtype: Any = None, device: Any = "meta"
) -> Any:
    """The host's own model class at its real size, weights not set."""
    import comfy.supported_models as supported
    import torch

    config = dict(Z_IMAGE if family == "z_image" else QWEN_IMAGE)
    if layers is not None:
        config["n_layers" if family == "z_image" else "num_layers"] = layers
    kind = supported.ZImage if family == "z_image" else supported.QwenImage
    described = kind(config)
    described.set_inference_dtype(dtype or torch.bfloat16, None)
    return described.get_model({}, "", device=device)


def fill_random(model: Any, device: Any, seed: int = 0) -> None:
    """Weights scaled by 0.7 / sqrt(fan in), so that activations neither vanish nor explode."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name and name.endswith("weight"):
            parameter.data.fill_(1.0)
        else:
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 1e4
            parameter.data.normal_(0.0, 0.7 * fan_in**-0.5, generator=generator)


def random_model(family: str, dtype: Any, layers: int | None = None, seed: int = 0) -> Any:
    """A ModelPatcher over a model with random weights on the host's device."""
    import comfy.model_management as management
    import comfy.model_patcher

    device = management.get_torch_device()
    model = empty_model(family, layers, dtype, device)
    fill_random(model, device, seed)
    offload = management.unet_offload_device()
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=offload)


def sample(
    model: Any,
    family: str,
    width: int,
    height: int,
    batch: int = 1,
    steps: int = 8,
    cfg: float = 1.0,
    tokens: int = 64,
    seed: int = 0,
    callback: Any = None,
) -> Any:
    """Latents from the host's own sampling path, (B, 16, [1,] H/8, W/8) float32."""
    import comfy.sample
    import torch

    def condition(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        return [[torch.randn(1, tokens, TEXT_WIDTH[family], generator=generator), {}]]

    with torch.inference_mode():
        latent = torch.zeros(batch, 16, height // 8, width // 8)
        latent = comfy.sample.fix_empty_latent_channels(model, latent)
        noise = comfy.sample.prepare_noise(latent, seed)
        return comfy.sample.sample(
            model,
            noise,
            steps,
            cfg,
            "euler",
            "simple",
            condition(1),
            condition(2),
            latent,
            callback=callback,
            disable_pbar=True,
            seed=seed,
        )
