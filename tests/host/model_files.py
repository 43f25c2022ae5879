"""Writes the smallest files that the stock loaders take as Z-Image, Qwen-Image and their VAEs.

Widths are fixed by the hosts' detection (Z-Image needs 3840, Qwen-Image 3072), so one layer of
each is what small means here. The weights are random but the same for a given seed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from .provision import cache_dir, write_once

# Part of every file name: files of another layout are simply not found, never misread.
LAYOUT = "v1"
Weights = dict[str, torch.Tensor]


class _Writer:
    """Collects named weights scaled so that activations neither die nor explode."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.weights: Weights = {}
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, name: str, *shape: int, scale: float) -> None:
        # Drawing in bf16 halves the time and the memory; these are not weights to be proud of.
        fresh = torch.empty(shape, dtype=torch.bfloat16)
        fresh.normal_(0.0, scale, generator=self.generator)
        self.weights[name] = fresh.to(self.dtype)

    def constant(self, name: str, *shape: int, value: float) -> None:
        self.weights[name] = torch.full(shape, value, dtype=torch.bfloat16)

    def linear(self, name: str, rows: int, columns: int, bias: bool = True) -> None:
        self.normal(name + ".weight", rows, columns, scale=0.7 / columns**0.5)
        if bias:
            self.constant(name + ".bias", rows, value=0.0)

    def norm(self, name: str, width: int, bias: bool = False) -> None:
        self.constant(name + ".weight", width, value=1.0)
        if bias:
            self.constant(name + ".bias", width, value=0.0)

    def conv(self, name: str, rows: int, columns: int, *kernel: int) -> None:
        fan_in = columns
        for size in kernel:
            fan_in *= size
        self.normal(name + ".weight", rows, columns, *kernel, scale=fan_in**-0.5)
        self.constant(name + ".bias", rows, value=0.0)


def zimage_weights(seed: int = 0, layers: int = 1, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """Z-Image with two refiner blocks of each kind, as the hosts always build it."""
    w = _Writer(seed, dtype)
    width, hidden, modulation, text = 3840, 10240, 256, 2560
    w.linear("x_embedder", width, 64)
    w.norm("cap_embedder.0", text)
    w.linear("cap_embedder.1", width, text)
    w.linear("t_embedder.mlp.0", 1024, 256)
    w.linear("t_embedder.mlp.2", modulation, 1024)
    w.constant("x_pad_token", 1, width, value=0.0)
    w.constant("cap_pad_token", 1, width, value=0.0)
    w.linear("final_layer.adaLN_modulation.1", width, modulation)
    w.linear("final_layer.linear", 64, width)
    # 0.3.75 builds this parameter and warns when it is missing.
    w.norm("norm_final", width)
    blocks = [f"noise_refiner.{i}" for i in range(2)] + [f"layers.{i}" for i in range(layers)]
    for name in [*blocks, "context_refiner.0", "context_refiner.1"]:
        w.linear(f"{name}.attention.qkv", 3 * width, width, bias=False)
        w.linear(f"{name}.attention.out", width, width, bias=False)
        w.norm(f"{name}.attention.q_norm", 128)
        w.norm(f"{name}.attention.k_norm", 128)
        w.linear(f"{name}.feed_forward.w1", hidden, width, bias=False)
        w.linear(f"{name}.feed_forward.w2", width, hidden, bias=False)
        w.linear(f"{name}.feed_forward.w3", hidden, width, bias=False)
        for part in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
            w.norm(f"{name}.{part}", width)
        if name in blocks:
            w.linear(f"{name}.adaLN_modulation.0", 4 * width, modulation)
    return w.weights


def qwen_weights(seed: int = 0, layers: int = 1, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """Qwen-Image; the hosts read only the number of layers from the file."""
    w = _Writer(seed, dtype)
    width, text = 3072, 3584
    w.linear("img_in", width, 64)
    w.norm("txt_norm", text)
    w.linear("txt_in", width, text)
    w.linear("time_text_embed.timestep_embedder.linear_1", width, 256)
    w.linear("time_text_embed.timestep_embedder.linear_2", width, width)
    w.linear("norm_out.linear", 2 * width, width)
    w.linear("proj_out", 64, width)
    for i in range(layers):
        block = f"transformer_blocks.{i}."
        for side in ("img", "txt"):
            w.linear(f"{block}{side}_mod.1", 6 * width, width)
            w.linear(f"{block}{side}_mlp.net.0.proj", 4 * width, width)
            w.linear(f"{block}{side}_mlp.net.2", width, 4 * width)
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            w.linear(f"{block}attn.{part}", width, width)
        for part in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            w.linear(f"{block}attn.{part}", width, width)
        for part in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            w.norm(f"{block}attn.{part}", 128)
    return w.weights


def kl_vae_weights(seed: int = 0) -> Weights:
    """The decoder of a 16-channel AutoencoderKL; detection fixes its width at 128.

    Nothing here encodes, and the hosts load without an encoder.
    """
    w = _Writer(seed, torch.bfloat16)
    base, latent = 128, 16
    widths = [base * m for m in (1, 2, 4, 4)]

    def resnet(name: str, columns: int, rows: int) -> None:
        w.norm(f"{name}.norm1", columns, bias=True)
        w.conv(f"{name}.conv1", rows, columns, 3, 3)
        w.norm(f"{name}.norm2", rows, bias=True)
        w.conv(f"{name}.conv2", rows, rows, 3, 3)
        if columns != rows:
            w.conv(f"{name}.nin_shortcut", rows, columns, 1, 1)

    top = widths[-1]
    w.conv("decoder.conv_in", top, latent, 3, 3)
    resnet("decoder.mid.block_1", top, top)
    w.norm("decoder.mid.attn_1.norm", top, bias=True)
    for part in ("q", "k", "v", "proj_out"):
        w.conv(f"decoder.mid.attn_1.{part}", top, top, 1, 1)
    resnet("decoder.mid.block_2", top, top)
    columns = top
    for level in reversed(range(4)):
        for i in range(3):
            resnet(f"decoder.up.{level}.block.{i}", columns, widths[level])
            columns = widths[level]
        if level:
            w.conv(f"decoder.up.{level}.upsample.conv", columns, columns, 3, 3)
    w.norm("decoder.norm_out", columns, bias=True)
    w.conv("decoder.conv_out", 3, columns, 3, 3)
    return w.weights


def wan_vae_weights(seed: int = 0, width: int = 16) -> Weights:
    """The decoder of the video VAE that Qwen-Image uses; the hosts read its width from the file."""
    w = _Writer(seed, torch.bfloat16)
    latent = 16
    widths = [width * m for m in (4, 4, 4, 2, 1)]

    def gamma(name: str, size: int, dims: int) -> None:
        w.constant(f"{name}.gamma", size, *([1] * dims), value=1.0)

    def residual(name: str, columns: int, rows: int) -> None:
        gamma(f"{name}.residual.0", columns, 3)
        w.conv(f"{name}.residual.2", rows, columns, 3, 3, 3)
        gamma(f"{name}.residual.3", rows, 3)
        w.conv(f"{name}.residual.6", rows, rows, 3, 3, 3)
        if columns != rows:
            w.conv(f"{name}.shortcut", rows, columns, 1, 1, 1)

    top = widths[0]
    w.conv("encoder.conv1", width, 3, 3, 3, 3)  # 0.33 counts the colours on it
    w.conv("conv1", 2 * latent, 2 * latent, 1, 1, 1)
    w.conv("conv2", latent, latent, 1, 1, 1)
    w.conv("decoder.conv1", top, latent, 3, 3, 3)
    residual("decoder.middle.0", top, top)
    gamma("decoder.middle.1.norm", top, 2)
    w.conv("decoder.middle.1.to_qkv", 3 * top, top, 1, 1)
    w.conv("decoder.middle.1.proj", top, top, 1, 1)
    residual("decoder.middle.2", top, top)
    position = 0
    for level in range(4):
        columns, rows = widths[level], widths[level + 1]
        columns = columns // 2 if level else columns  # the upsampling before it halves the width
        for _ in range(3):
            residual(f"decoder.upsamples.{position}", columns, rows)
            columns = rows
            position += 1
        if level < 3:
            w.conv(f"decoder.upsamples.{position}.resample.1", rows // 2, rows, 3, 3)
            if level < 2:
                w.conv(f"decoder.upsamples.{position}.time_conv", 2 * rows, rows, 3, 1, 1)
            position += 1
    gamma("decoder.head.0", width, 3)
    w.conv("decoder.head.2", 3, width, 3, 3, 3)
    return w.weights


_RECIPES: dict[str, tuple[str, Callable[[], Weights]]] = {
    "zimage": ("diffusion_models/speedtier_zimage_1_layer.safetensors", zimage_weights),
    "qwen": ("diffusion_models/speedtier_qwen_1_layer.safetensors", qwen_weights),
    "zimage_vae": ("vae/speedtier_zimage_vae.safetensors", kl_vae_weights),
    "qwen_vae": ("vae/speedtier_qwen_vae_2.safetensors", wan_vae_weights),
}


def file_name(kind: str) -> str:
    """The name that the loader nodes' dropdowns show."""
    return _RECIPES[kind][0].partition("/")[2]


def model_files(*kinds: str) -> dict[str, Path]:
    """Writes what is missing and returns {"folder/name": path}, ready for HostServer(models=)."""
    found = {}
    for kind in kinds or tuple(_RECIPES):
        place, make = _RECIPES[kind]
        path = cache_dir() / f"models-{LAYOUT}" / place
        if not path.is_file():
            weights = make()
            n_bytes = sum(weight.nbytes for weight in weights.values())
            write_once(path, n_bytes, partial(save_file, weights))
        found[place] = path
    return found
