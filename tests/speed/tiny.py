"""Tiny real models, their inputs, and a toy denoiser for one optimization at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import QwenImageTransformer2DModel, ZImageTransformer2DModel
from speed_tier.speed.env import capabilities
from speed_tier.speed.families.base import (
    AttentionShape,
    Family,
    Projections,
    RepeatedBlock,
    blocks_of,
)
from speed_tier.speed.flags import FLAGS
from speed_tier.speed.optimizations.base import Context, Handle, Optimization
from speed_tier.speed.patching import PatchSet
from torch import nn

CPU = torch.device("cpu")
WIDTH = 32


def z_image(layers: int = 2, refiners: int = 1, seed: int = 0, **more: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = ZImageTransformer2DModel(
        in_channels=4,
        dim=WIDTH,
        n_layers=layers,
        n_refiner_layers=refiners,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[512, 128, 128],
        **more,
    )
    return model.eval()


def qwen_image(layers: int = 2, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
    )
    return model.eval()


def host_next_dit(pad_tokens: bool = True, activation_first: bool = False) -> nn.Module:
    """The parts of the host's NextDiT that detection reads; the class itself is in tests/host."""

    def block() -> nn.Module:
        part = nn.Module()
        part.attention = nn.Module()
        part.attention.qkv = nn.Linear(8, 24)
        part.attention.out = nn.Linear(8, 8)
        part.feed_forward = nn.Module()
        for name in ("w1", "w2", "w3"):
            setattr(part.feed_forward, name, nn.Linear(8, 8))
        linear = nn.Linear(8, 32)
        part.adaLN_modulation = nn.Sequential(*([nn.SiLU()] if activation_first else []), linear)
        return part

    model = nn.Module()
    for name in ("noise_refiner", "context_refiner", "layers"):
        setattr(model, name, nn.ModuleList([block()]))
    for name in ("x_embedder", "cap_embedder", "t_embedder"):
        setattr(model, name, nn.Linear(8, 8))
    if pad_tokens:
        model.x_pad_token = nn.Parameter(torch.zeros(1, 8))
        model.cap_pad_token = nn.Parameter(torch.zeros(1, 8))
    return model


@dataclass(frozen=True)
class Size:
    """Latent height and width, batch, and tokens of the prompt."""

    height: int = 8
    width: int = 8
    batch: int = 1
    text: int = 5


def z_image_inputs(size: Size = Size(), dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "x": [random(4, 1, size.height, size.width) for _ in range(size.batch)],
        "t": torch.full((size.batch,), 0.5, dtype=dtype),
        "cap_feats": [random(size.text, 16) for _ in range(size.batch)],
    }


def qwen_image_inputs(size: Size = Size(), dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    rows, columns = size.height // 2, size.width // 2
    return {
        "hidden_states": torch.randn(size.batch, rows * columns, 16, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(size.batch, size.text, 24, generator=generator).to(
            dtype
        ),
        "timestep": torch.full((size.batch,), 0.5, dtype=dtype),
        "img_shapes": [[(1, rows, columns)]] * size.batch,
    }


def output(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """One forward of a diffusers transformer as one tensor."""
    with torch.no_grad():
        sample = model(**inputs).sample
    return torch.stack(list(sample)) if isinstance(sample, (list, tuple)) else sample


class ToyAttention(nn.Module):
    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, width, bias=bias)
        self.to_k = nn.Linear(width, width, bias=bias)
        self.to_v = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        attend = options.get("attention", F.scaled_dot_product_attention)
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (q, k, v)]
        return self.out(attend(*heads).transpose(1, 2).flatten(2))


class ToyBlock(nn.Module):
    def __init__(self, width: int = WIDTH, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = ToyAttention(width, bias)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        x = x + self.attention(self.norm(x), options)
        for patch in options.get("patches", ()):
            x = patch(x)
        return x + self.mlp(x)


class Toy(nn.Module):
    """Blocks in a list, one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, options: dict[str, Any] | None = None) -> torch.Tensor:
        options = {} if options is None else options
        for block in self.blocks:
            x = block(x, options)
        return x


def toy(blocks: int = 3, seed: int = 0, **more: Any) -> Toy:
    torch.manual_seed(seed)
    return Toy(*(ToyBlock(**more) for _ in range(blocks))).eval().requires_grad_(False)


def toy_input(batch: int = 1, tokens: int = 8, width: int = WIDTH, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(seed))


def _toy_blocks(denoiser: nn.Module) -> list[RepeatedBlock]:
    return list(blocks_of(denoiser, "blocks"))


def _toy_projections(denoiser: nn.Module) -> list[Projections]:
    return [
        Projections(f"{path}.attention", attention.to_q, attention.to_k, attention.to_v)
        for path, attention in ((b.path, b.module.attention) for b in _toy_blocks(denoiser))
    ]


TOY = Family(
    name="toy",
    title="Toy",
    stack=lambda module: "comfyui" if isinstance(module, Toy) else None,
    repeated_blocks=_toy_blocks,
    projections=_toy_projections,
    attention=lambda module: AttentionShape(2, WIDTH // 2),
)


def context(denoiser: nn.Module, **more: Any) -> Context:
    """What apply.py hands to an optimization."""
    given: dict[str, Any] = {
        "family": TOY,
        "stack": "comfyui",
        "device": CPU,
        "dtype": torch.float32,
        "capabilities": capabilities(CPU),
    }
    return Context(denoiser=denoiser, **{**given, **more})


@dataclass
class Engaged:
    """One or more optimizations in place for one run, as apply.py puts them there."""

    handles: list[Handle]
    denoiser: nn.Module

    def call(self, *args: Any, **kwargs: Any) -> Any:
        patches = PatchSet([patch for handle in self.handles for patch in handle.patches])
        with contextlib.ExitStack() as stack, torch.no_grad():
            for handle in self.handles:
                stack.enter_context(handle.scope())
            stack.enter_context(patches)
            return self.denoiser(*args, **kwargs)


@contextlib.contextmanager
def engaged(*optimizations: Optimization, on: nn.Module, **more: Any) -> Iterator[Engaged]:
    """Install `optimizations` on a denoiser for the length of one run."""
    handles, tokens = [], []
    try:
        for optimization in optimizations:
            given = context(on, **more)
            assert optimization.check(given) is None, optimization.check(given)
            handles.append(optimization.install(given))
            tokens.append(FLAGS.acquire(handles[-1].flags))
        yield Engaged(handles, on)
    finally:
        for handle in reversed(handles):
            handle.remove()
        for token in reversed(tokens):
            FLAGS.release(token)


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def plain(denoiser: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return denoiser(*args, **kwargs)
