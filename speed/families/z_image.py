"""Z-Image (Turbo and Base): single-stream blocks behind two noise and two context refiners.

The host's NextDiT class also serves Lumina 2; Z-Image is told apart by its pad tokens and by a
modulation that starts with the Linear (Lumina 2 has an activation before it).
"""

from __future__ import annotations

from torch import nn

from .base import (
    AttentionShape,
    Family,
    Projections,
    RepeatedBlock,
    blocks_of,
    has,
    is_linear,
    reach,
)

# Order of one forward. The context refiners have no modulation: a kind of their own.
_LISTS = ("context_refiner", "noise_refiner", "layers")
_BLOCK_PARTS = ("attention", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")


def _stack(module: nn.Module) -> str | None:
    if not has(module, *_LISTS, "cap_embedder", "t_embedder", "x_pad_token", "cap_pad_token"):
        return None
    if not has(module, *(f"layers.0.{part}" for part in _BLOCK_PARTS)):
        return None
    if not is_linear(reach(module, "layers.0.adaLN_modulation.0")):
        return None
    if has(module, "layers.0.attention.qkv", "layers.0.attention.out", "x_embedder"):
        return "comfyui"
    if has(module, "layers.0.attention.to_q", "layers.0.attention.to_out", "all_x_embedder"):
        return "diffusers"
    return None


def _repeated_blocks(module: nn.Module) -> list[RepeatedBlock]:
    return list(blocks_of(module, *_LISTS))


def _projections(module: nn.Module) -> list[Projections]:
    if _stack(module) != "diffusers":
        return []  # the host's own class carries one fused qkv projection
    groups = []
    for block in _repeated_blocks(module):
        attention = reach(block.module, "attention")
        path = f"{block.path}.attention"
        groups.append(Projections(path, attention.to_q, attention.to_k, attention.to_v))
    return groups


def _attention(module: nn.Module) -> AttentionShape:
    norm = reach(module, "layers.0.attention.q_norm") or reach(module, "layers.0.attention.norm_q")
    head_dim = int(norm.weight.shape[0])
    width = int(reach(module, "layers.0.attention_norm1").weight.shape[0])
    return AttentionShape(width // head_dim, head_dim)


Z_IMAGE = Family(
    name="z_image",
    title="Z-Image",
    stack=_stack,
    repeated_blocks=_repeated_blocks,
    projections=_projections,
    attention=_attention,
)
