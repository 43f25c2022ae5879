"""Transformer blocks of the host in a few fused kernels, in place of many torch operations."""

from .base import FusedBlock
from .qwen_image import QwenImageBlock
from .z_image import ZImageBlock

# By family. Only for the host's own classes: diffusers' blocks are other code.
FUSED_BLOCKS: dict[str, type[FusedBlock]] = {
    "z_image": ZImageBlock,
    "qwen_image": QwenImageBlock,
}

__all__ = ["FUSED_BLOCKS", "FusedBlock"]
