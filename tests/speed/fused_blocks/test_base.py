"""What fused blocks share."""

import pytest
import torch
from speed_tier.speed.fused_blocks import FUSED_BLOCKS
from speed_tier.speed.fused_blocks.base import is_table, rms_eps, turns
from speed_tier.tests.speed import tiny
from torch import nn

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [None, 1e-5, 0.3])
def test_the_epsilon_is_what_torch_adds(dtype, eps):
    x = (torch.randn(4, 64) * 0.02).to(dtype)
    expected = torch.nn.functional.rms_norm(x, (64,), None, eps).double()
    root = (x.double().square().mean(-1, keepdim=True) + rms_eps(eps, dtype, CPU)).sqrt()
    torch.testing.assert_close(x.double() / root, expected, rtol=0.02, atol=0.02)


def test_a_rotary_table_is_told_by_its_shape_and_layout():
    table = turns(6, 8, CPU).movedim(1, 2)
    assert is_table(table, 1, 6, 8) and is_table(table, 3, 6, 8)
    assert is_table(turns(9, 8, CPU).movedim(1, 2)[:, 3:], 1, 6, 8)
    for other in (
        None,
        table[..., 0],
        table.transpose(-1, -2),
        table[:, :5],
        torch.cat([table, table]),
        (table, table),
    ):
        assert not is_table(other, 1, 6, 8)
    rotation = table[0, 0, 0]
    torch.testing.assert_close(rotation @ rotation.transpose(-1, -2), torch.eye(2).expand(4, 2, 2))


@pytest.mark.parametrize("family", FUSED_BLOCKS)
def test_another_stacks_block_is_other_code(family):
    """diffusers' blocks have other methods, or the same names with other lines."""
    model = tiny.z_image() if family == "z_image" else tiny.qwen_image()
    blocks = model.layers if family == "z_image" else model.transformer_blocks
    assert FUSED_BLOCKS[family].drift(blocks[0])


def test_drift_names_the_line_that_is_gone():
    class Block(nn.Module):
        def forward(self, x):
            return x

    assert "no longer contains" in FUSED_BLOCKS["z_image"].drift(Block())
