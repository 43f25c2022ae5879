"""Qwen-Image (Image, 2512, Edit, 2509, 2511, Layered): double-stream blocks, joint attention.

Qwen-Image-2.1 is another architecture under the same name and is not taken for this one.
"""

from __future__ import annotations

from torch import nn

from .base import AttentionShape, Family, Projections, RepeatedBlock, blocks_of, has, reach

_BLOCK_PARTS = (
    "img_mod.1",
    "txt_mod.1",
    "img_mlp",
    "txt_mlp",
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)


def _stack(module: nn.Module) -> str | None:
    if not has(module, "transformer_blocks", "img_in", "txt_in", "txt_norm", "time_text_embed"):
        return None
    if not has(module, *(f"transformer_blocks.0.{part}" for part in _BLOCK_PARTS)):
        return None
    if has(module, "pe_embedder"):
        return "comfyui"
    if has(module, "pos_embed"):
        return "diffusers"
    return None


def _repeated_blocks(module: nn.Module) -> list[RepeatedBlock]:
    return list(blocks_of(module, "transformer_blocks"))


def _projections(module: nn.Module) -> list[Projections]:
    groups = []
    for block in _repeated_blocks(module):
        attn = reach(block.module, "attn")
        path = f"{block.path}.attn"
        groups.append(Projections(path, attn.to_q, attn.to_k, attn.to_v))
        groups.append(Projections(f"{path}.add", attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
    return groups


def _attention(module: nn.Module) -> AttentionShape:
    attn = reach(module, "transformer_blocks.0.attn")
    head_dim = int(attn.norm_q.weight.shape[0])
    return AttentionShape(int(attn.to_q.weight.shape[0]) // head_dim, head_dim)


QWEN_IMAGE = Family(
    name="qwen_image",
    title="Qwen-Image",
    stack=_stack,
    repeated_blocks=_repeated_blocks,
    projections=_projections,
    attention=_attention,
)
