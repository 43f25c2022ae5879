"""The VAEs of Z-Image (the Flux kind of AutoencoderKL) and of Qwen-Image (the Wan 2.1 VAE).

Both have an `encoder` and a `decoder` of convolutions with a norm and a SiLU between them. Such a
pair is a *chain* here: what a VAE spends beside its convolutions, it spends in the chains.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from .base import AttentionShape, Family, has, reach

DOWNSCALE: Final = 8  # pixels to a latent position, of both


@dataclass(frozen=True)
class Chain:
    """A norm, and the SiLU that alone reads its output.

    Attributes:
        path: Dotted path of the norm from the part.
        norm: The norm.
        activation: The SiLU, None where it is no module of its own.
    """

    path: str
    norm: nn.Module
    activation: nn.Module | None


@dataclass(frozen=True)
class VaeFamily(Family):
    """One kind of VAE.

    Attributes:
        chains: The chains of one part, in the order of its modules.
    """

    chains: Callable[[nn.Module], list[Chain]] = lambda part: []


def part_of(vae: nn.Module, operation: str) -> Any:
    """The half of a VAE that an operation runs."""
    return reach(vae, "encoder" if operation == "vae encode" else "decoder")


def _kl_stack(module: nn.Module) -> str | None:
    for part in ("encoder", "decoder"):
        if not has(module, *(f"{part}.{name}" for name in ("conv_in", "mid.block_1", "norm_out"))):
            return None
    if not has(module, "decoder.up.0.block.0.norm1", "encoder.down.0.block.0.norm1"):
        return None
    weight = reach(module, "decoder.conv_in.weight")
    return "comfyui" if weight is not None and weight.ndim == 4 else None  # not a video VAE


def _kl_chains(part: nn.Module) -> list[Chain]:
    chains = []
    for path, module in part.named_modules():
        if has(module, "norm1", "norm2", "swish", "conv1", "conv2"):
            # With a time embedding the same SiLU reads that as well.
            swish = None if has(module, "temb_proj") else reach(module, "swish")
            for name in ("norm1", "norm2"):
                chains.append(Chain(f"{path}.{name}", reach(module, name), swish))
        elif has(module, "norm", "q", "k", "v", "proj_out"):
            chains.append(Chain(f"{path}.norm", reach(module, "norm"), None))
    chains.append(Chain("norm_out", reach(part, "norm_out"), None))
    return chains


def _wan_stack(module: nn.Module) -> str | None:
    for part in ("encoder", "decoder"):
        if not has(module, *(f"{part}.{name}" for name in ("conv1", "middle.0.residual", "head"))):
            return None
    # Wan 2.2 has blocks of blocks there.
    if not has(module, "conv1", "conv2", "decoder.upsamples.0.residual"):
        return None
    return "comfyui"


def _wan_chains(part: nn.Module) -> list[Chain]:
    return list(_pairs(part))


def _pairs(part: nn.Module) -> Iterator[Chain]:
    for path, module in part.named_modules():
        if isinstance(module, nn.Sequential):
            steps = list(module.named_children())
            for (name, norm), (_, activation) in itertools.pairwise(steps):
                if hasattr(norm, "gamma") and isinstance(activation, nn.SiLU):
                    yield Chain(f"{path}.{name}", norm, activation)
        elif has(module, "norm.gamma", "to_qkv"):
            yield Chain(f"{path}.norm", reach(module, "norm"), None)


def _none(module: nn.Module) -> list[Any]:
    return []


def _no_attention(module: nn.Module) -> AttentionShape:
    return AttentionShape(1, 1)


KL_VAE = VaeFamily(
    name="kl_vae",
    title="AutoencoderKL",
    stack=_kl_stack,
    repeated_blocks=_none,
    projections=_none,
    attention=_no_attention,
    patch_area=1,
    chains=_kl_chains,
)
WAN_VAE = VaeFamily(
    name="wan_vae",
    title="Wan VAE",
    stack=_wan_stack,
    repeated_blocks=_none,
    projections=_none,
    attention=_no_attention,
    patch_area=1,
    chains=_wan_chains,
)
