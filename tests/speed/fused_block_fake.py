"""A stand-in for the toy model's blocks, in torch: what a family's fused block is, without one."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from speed_tier.speed.fused_blocks.base import FusedBlock
from torch import nn


class FusedToy(FusedBlock):
    needles: ClassVar = {
        "forward": ("self.attention(self.norm(x), options)", "return x + self.mlp(x)")
    }
    wrong_by: ClassVar[float] = 0.0
    calls: ClassVar[int] = 0

    def __init__(self, block: Any, read: Any = None) -> None:
        super().__init__(block, [block.norm], [block.attention], read)

    def __call__(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        if options.get("patches") or not self.undisturbed():
            return self.plain(x, options)
        type(self).calls += 1
        block = self.block
        attention = block.attention
        with self.weight(0, x) as weight:
            h = nn.functional.layer_norm(x, x.shape[-1:], weight, block.norm.bias)
        q, k, v = attention.to_q(h), attention.to_k(h), attention.to_v(h)
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (q, k, v)]
        attend = nn.functional.scaled_dot_product_attention
        x = x + attention.out(attend(*heads).transpose(1, 2).flatten(2))
        return (x + block.mlp(x)) * (1 + self.wrong_by)

    def probe_arguments(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        width = self.block.norm.weight.shape[0]
        return {"x": torch.randn(1, 4, width, device=device, dtype=dtype), "options": {}}
