"""What a model family is, to the engine: where its parts are, found by structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class RepeatedBlock:
    """One transformer block.

    Attributes:
        path: Dotted path from the denoiser, "layers.3".
        module: The block.
    """

    path: str
    module: nn.Module


@dataclass(frozen=True)
class Projections:
    """Separate q, k and v projections that read the same input.

    Attributes:
        path: Dotted path of the attention module.
        q, k, v: The three Linear modules, called in this order on one input.
    """

    path: str
    # Any: Linear classes of every stack, with `weight` and `bias`.
    q: Any
    k: Any
    v: Any


@dataclass(frozen=True)
class AttentionShape:
    """Heads and width of one head of the joint attention."""

    heads: int
    head_dim: int


@dataclass(frozen=True)
class Family:
    """One model family, in every stack it comes in.

    Attributes:
        name: Name in reports, "z_image".
        title: The name people use.
        stack: Stack of a denoiser ("comfyui" or "diffusers"), or None if it is another family.
        repeated_blocks: All transformer blocks, in the order of one forward.
        projections: Groups of separate q, k and v; empty where the stack has them fused.
        attention: Shape of the joint attention.
        patch_area: Latent positions that make one image token.
    """

    name: str
    title: str
    stack: Callable[[nn.Module], str | None]
    repeated_blocks: Callable[[nn.Module], list[RepeatedBlock]]
    projections: Callable[[nn.Module], list[Projections]]
    attention: Callable[[nn.Module], AttentionShape]
    patch_area: int = 4

    def tokens(self, latent_shape: tuple[int, ...], text_tokens: int) -> int:
        """Length of the joint sequence for a latent of shape (B, C, [T,] H, W)."""
        frames = latent_shape[2] if len(latent_shape) == 5 else 1
        positions = frames * latent_shape[-2] * latent_shape[-1]
        return -(-positions // self.patch_area) + text_tokens


def has(module: nn.Module, *paths: str) -> bool:
    """Whether every dotted path leads to something that is not None."""
    return all(reach(module, path) is not None for path in paths)


def reach(module: nn.Module, path: str) -> Any:
    """What a dotted path leads to; numbers index containers. None where it leads nowhere."""
    found: Any = module
    for part in path.split("."):
        if part.isdigit() and isinstance(found, (nn.ModuleList, nn.Sequential)):
            found = found[int(part)] if int(part) < len(found) else None
        else:
            found = getattr(found, part, None)
        if found is None:
            return None
    return found


def blocks_of(module: nn.Module, *lists: str) -> Iterator[RepeatedBlock]:
    """Blocks of the named ModuleLists, in order."""
    for name in lists:
        container = getattr(module, name)
        for index, block in enumerate(container):
            yield RepeatedBlock(f"{name}.{index}", block)


def is_linear(module: object) -> bool:
    """Whether a module has the parts of a Linear, whichever class it is."""
    weight = getattr(module, "weight", None)
    return (
        isinstance(module, nn.Module)
        and isinstance(weight, torch.Tensor)
        and hasattr(module, "bias")
    )
