"""What the fused Z-Image block reads of the host's code. The block itself is in tests/host."""

import pytest
import torch
from speed_tier.speed.fused_blocks import ZImageBlock
from torch import nn


class Attention(nn.Module):
    n_local_heads, head_dim = 2, 4

    def __init__(self, eps):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(4, eps=eps), nn.RMSNorm(4, eps=eps)
        self.qkv = self.out = nn.Identity()

    def forward(self, x):
        return self.q_norm(x)


class NewerAttention(Attention):
    def forward(self, x):
        epsilon = self.q_norm.eps if self.q_norm.eps is not None else torch.finfo(torch.float32).eps
        return x + epsilon


def block_with(attention):
    block = nn.Module()
    block.attention, block.feed_forward, block.modulation = attention, nn.Module(), False
    for name in ("w1", "w2", "w3"):
        setattr(block.feed_forward, name, nn.Identity())
    for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
        setattr(block, name, nn.RMSNorm(8))
    return ZImageBlock(block)


@pytest.mark.parametrize(
    ("kind", "eps", "expected"),
    [
        (Attention, None, None),  # torch's own, which depends on its version
        (Attention, 1e-5, 1e-5),
        (NewerAttention, None, torch.finfo(torch.float32).eps),
        (NewerAttention, 1e-5, 1e-5),
    ],
)
def test_the_epsilon_of_q_and_k(kind, eps, expected):
    assert block_with(kind(eps)).qk_eps == expected


def test_heads_that_the_kernels_cannot_take():
    """Lumina's are 96 wide; Triton would say so in twenty lines."""
    attention = Attention(None)
    attention.n_local_kv_heads = 2
    assert block_with(attention).problem(torch.device("cpu")) == ""
    attention.head_dim = 96
    assert block_with(attention).problem(torch.device("cpu")).endswith("found 96")
