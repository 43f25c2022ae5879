"""The second size's symbolic code: started once, and open to numbers that do change."""

import pytest
import torch
from speed_tier.speed.optimizations.regional_compile import RegionalCompile
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.optimizations.compiling import graphs, with_config
from torch import nn
from torch._dynamo.utils import counters

pytestmark = pytest.mark.slow  # blocks are compiled


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(tiny.WIDTH, eps=1e-5), nn.Linear(tiny.WIDTH, tiny.WIDTH)

    def forward(self, x, options):
        return x + self.linear(self.norm(x)) * options.get("strength", 1.0)


def normed():
    torch.manual_seed(0)
    return tiny.Toy(Normed(), Normed()).eval().requires_grad_(False)


def test_torch_does_not_begin_the_second_size_again(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = normed()
    before = counters["aot_autograd"]["total"]
    with tiny.engaged(RegionalCompile(), on=model) as run:
        for tokens in (8, 12, 20, 8, 33):
            x = tiny.toy_input(tokens=tokens)
            torch.testing.assert_close(run.call(x), tiny.plain(model, x))
    facts = run.handles[0].compile_facts()
    assert (facts.graphs, facts.recompiles) == (2, 1)
    assert counters["aot_autograd"]["total"] - before == 2


def test_a_number_that_changes_becomes_a_symbol():
    model, before = normed(), graphs()
    with tiny.engaged(with_config(), on=model) as run:
        run.call(tiny.toy_input(), {})
        counts = []
        for strength in (0.5, 0.25, 0.75, 0.3, 0.9):
            x, options = tiny.toy_input(tokens=12), {"strength": strength}
            torch.testing.assert_close(run.call(x, options), tiny.plain(model, x, options))
            counts.append(graphs() - before)
    assert counts == [2, 3, 3, 3, 3]
