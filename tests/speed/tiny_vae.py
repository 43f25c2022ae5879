"""Small VAEs with the parts of the host's two, and what the engine asks of a host for them."""

from __future__ import annotations

from typing import Any

import torch
from speed_tier.speed.families.vae import KL_VAE, WAN_VAE
from speed_tier.speed.optimizations.base import Context, HostFacts
from speed_tier.speed.probe import Trial
from speed_tier.tests.speed import tiny
from torch import nn

WIDTH = 8


class Resnet(nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.swish = nn.SiLU(inplace=True)
        self.norm1 = nn.GroupNorm(2, columns)
        self.conv1 = nn.Conv2d(columns, rows, 3, padding=1)
        self.norm2 = nn.GroupNorm(2, rows)
        self.conv2 = nn.Conv2d(rows, rows, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(columns, rows, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(self.swish(self.norm1(x)))
        h = self.conv2(self.swish(self.norm2(h)))
        return self.nin_shortcut(x) + h


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        for name in ("q", "k", "v", "proj_out"):
            setattr(self, name, nn.Conv2d(width, width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.proj_out(self.q(h) * self.k(h).sigmoid() + self.v(h))


class KlPart(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, level: str, resize: nn.Module) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(channels_in, 2 * WIDTH, 3, padding=1)
        self.mid = nn.Module()
        self.mid.block_1 = Resnet(2 * WIDTH, 2 * WIDTH)
        self.mid.attn_1 = Attention(2 * WIDTH)
        stage = nn.Module()
        stage.block = nn.ModuleList([Resnet(2 * WIDTH, WIDTH)])
        setattr(self, level, nn.ModuleList([stage]))
        self.resize = resize
        self.norm_out = nn.GroupNorm(2, WIDTH)
        self.conv_out = nn.Conv2d(WIDTH, channels_out, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mid.attn_1(self.mid.block_1(self.conv_in(x)))
        stage = self.up if hasattr(self, "up") else self.down
        h = self.resize(stage[0].block[0](h))
        return self.conv_out(nn.functional.silu(self.norm_out(h)))


class KlVae(nn.Module):
    """As the Flux kind of AutoencoderKL, at a factor of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = KlPart(3, 4, "down", nn.AvgPool2d(8))
        self.decoder = KlPart(4, 3, "up", nn.Upsample(scale_factor=8.0))

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.decoder(z)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


class Rms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x, dim=1) * x.shape[1] ** 0.5 * self.gamma.to(x)


class WanBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *(Rms(width), nn.SiLU(), nn.Conv3d(width, width, 3, padding=1)),
            *(Rms(width), nn.SiLU(), nn.Dropout(0.0), nn.Conv3d(width, width, 3, padding=1)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.residual(x)


class WanPart(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, level: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(channels_in, WIDTH, 3, padding=1)
        self.middle = nn.Sequential(WanBlock(WIDTH))
        setattr(self, level, nn.Sequential(WanBlock(WIDTH)))
        out = nn.Conv3d(WIDTH, channels_out, 3, padding=1)
        self.head = nn.Sequential(Rms(WIDTH), nn.SiLU(), out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = self.upsamples if hasattr(self, "upsamples") else self.downsamples
        return self.head(levels(self.middle(self.conv1(x))))


class WanVae(nn.Module):
    """As the Wan 2.1 VAE, without its resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = WanPart(3, 8, "downsamples")
        self.decoder = WanPart(4, 3, "upsamples")
        self.conv1 = nn.Conv3d(8, 8, 1)
        self.conv2 = nn.Conv3d(4, 4, 1)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.conv2(z))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv1(self.encoder(x)).chunk(2, dim=1)[0]


def kl(seed: int = 0) -> KlVae:
    torch.manual_seed(seed)
    return KlVae().eval().requires_grad_(False)


def wan(seed: int = 0) -> WanVae:
    torch.manual_seed(seed)
    return WanVae().eval().requires_grad_(False)


MAKERS = {"kl": kl, "wan": wan}
FAMILIES = {"kl": KL_VAE, "wan": WAN_VAE}


def latent(kind: str, height: int = 8, width: int = 12, seed: int = 1) -> torch.Tensor:
    shape = (1, 4, height, width) if kind == "kl" else (1, 4, 1, height, width)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trial_of(vae: Any, z: torch.Tensor, **more: Any) -> Trial:
    def run(height: int, width: int) -> object:
        with torch.no_grad():
            return vae.decode(z[..., :height, :width].contiguous())

    given = {"what": "vae decode", "size": (z.shape[-2], z.shape[-1]), "step": 4, "pixels": 8}
    return Trial(run=run, **{**given, **more})


def context(kind: str, vae: nn.Module, z: torch.Tensor | None = None, **more: Any) -> Context:
    facts = {name: more.pop(name) for name in list(more) if name in HostFacts.__annotations__}
    if z is not None:
        facts.setdefault("trial", trial_of(vae, z))
    return tiny.context(vae, family=FAMILIES[kind], host=HostFacts(**facts), **more)
