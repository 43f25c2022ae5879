"""Blocks that hosts clamp where fp16 overflows, compiled."""

import pytest
import torch
import torch.nn.functional as F
from speed_tier.speed.optimizations.regional_compile import CompileConfig, RegionalCompile
from speed_tier.tests.speed import tiny
from torch import nn

pytestmark = pytest.mark.slow  # blocks are compiled


class Clamps(nn.Module):
    """A feed-forward whose gate leaves fp16's range; what follows needs finite numbers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(tiny.WIDTH, 64), nn.Linear(64, tiny.WIDTH)

    def forward(self, x, options):
        gate = F.silu(self.up(x) * 100) * (self.up(x) * 100)
        gate = torch.nan_to_num(gate, nan=0.0, posinf=65504, neginf=-65504)
        return x + self.down(gate / 1000)


def loud():
    torch.manual_seed(0)
    model = tiny.Toy(Clamps(), Clamps()).eval().requires_grad_(False).half()
    for block in model.blocks:
        block.up.weight.data *= 10
    return model


def test_a_clamp_of_the_host_survives_the_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = loud(), tiny.toy_input().half()
    gate = model.blocks[0].up(x).float() * 100
    assert (F.silu(gate) * gate).abs().max() > 65504
    expected = tiny.plain(model, x)
    assert expected.isfinite().all()
    with tiny.engaged(RegionalCompile(), on=model, dtype=torch.float16) as run:
        got = run.call(x)
    assert got.isfinite().all()
    assert tiny.relative_error(got, expected) < 2e-3
    # Without the rounding it is not: otherwise this test would say nothing.
    monkeypatch.setattr(CompileConfig, "for_dtype", lambda self, dtype: self)
    with tiny.engaged(RegionalCompile(), on=loud(), dtype=torch.float16) as run:
        assert not run.call(x).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_fp16_needs_it(dtype):
    config = CompileConfig()
    assert config.for_dtype(dtype) is config
    assert config.for_dtype(torch.float16).emulate_precision_casts
    chosen = CompileConfig(mode="default")
    assert chosen.for_dtype(torch.float16) is chosen  # torch takes a mode or options
