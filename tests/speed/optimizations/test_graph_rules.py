"""What a graph cannot follow in the model itself, before a run and in mid-run."""

import pytest
import torch
from speed_tier.speed.optimizations.graph_rules import sizeless
from speed_tier.tests.speed import tiny
from torch import nn


class Scaled(tiny.Toy):
    """A model with a part that has no weights, like a rotary embedding."""

    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.embedder = Embedder(1.0)

    def forward(self, x):
        return self._forward(x)

    def _forward(self, x):
        return super().forward(self.embedder(x))


class Embedder(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class ForeignEmbedder(Embedder):
    """Another pack's, whose factor follows the timestep."""

    __module__ = "/packs/other.nodes"


class ForeignLinear(nn.Linear):
    """Not the host's by descent."""

    __module__ = "/packs/loader.ops"


def model():
    return Scaled(*tiny.toy().blocks)


def run(graphs, on, count=4, change=None):
    """Calls of one run, each checked against the model itself; `change` comes before the last."""
    with tiny.engaged(graphs, on=on) as engaged:
        for index in range(count):
            if change is not None and index == count - 1:
                change(on)
            x = tiny.toy_input(seed=index)
            assert torch.equal(engaged.call(x), tiny.plain(on, x))
    return engaged.handles[0].graph_facts()


def test_a_part_exchanged_between_runs_drops_the_graphs(graphs, recorder):
    """No weight has moved: another rotary embedding has none."""
    toy = model()
    assert run(graphs, toy).captured == 1
    toy.embedder = Embedder(2.0)
    assert run(graphs, toy).captured == 1
    assert recorder.released == 1
    assert run(graphs, toy).captured == 0


def test_parts_of_another_pack_are_not_captured(graphs):
    toy = model()
    toy.embedder = ForeignEmbedder(2.0)
    assert graphs.check(tiny.context(toy)) == (
        "another pack has put parts into the model (ForeignEmbedder)"
    )


def test_layers_of_another_packs_loader_are(graphs):
    class HostLinear(nn.Linear):
        pass

    layer = type("Layer", (HostLinear,), {"__module__": "/packs/loader.ops"})
    toy = model()
    toy.spare = layer(2, 2)
    assert graphs.check(tiny.context(toy)) is None
    toy.spare = ForeignLinear(2, 2)
    assert "parts into the model (ForeignLinear)" in graphs.check(tiny.context(toy))


def patched(x):
    return x * 5


@pytest.mark.parametrize(
    "change",
    [
        lambda toy: setattr(toy, "forward", patched),
        lambda toy: setattr(toy, "_forward", patched),
        lambda toy: setattr(toy.blocks[1], "forward", lambda x, options: x),
        lambda toy: setattr(toy.embedder, "forward", patched),
    ],
    ids=["model", "method", "block", "part"],
)
def test_code_replaced_in_mid_run_is_run(graphs, change):
    facts = run(graphs, model(), count=6, change=change)
    assert facts.replayed == 3
    assert facts.not_replayed["another pack replaces code of the model at this call"] == 1


def test_a_method_replaced_before_the_run(graphs):
    toy = model()
    toy._forward = patched
    assert graphs.check(tiny.context(toy)) == "another pack has replaced the model's _forward"


def test_weights_that_leave_the_card_in_mid_run(graphs):
    toy = model()
    toy.register_buffer("spare", torch.zeros(1))
    facts = run(graphs, toy, count=6, change=lambda m: setattr(m, "spare", m.spare.to("meta")))
    assert facts.not_replayed["1 weights are not on cpu"] == 1


def test_weights_made_of_other_tensors(graphs):
    class Quantised(torch.Tensor):
        @staticmethod
        def __new__(cls, values):
            return torch.Tensor._make_wrapper_subclass(cls, values.shape)

        __torch_dispatch__ = None

    toy = model()
    toy.register_buffer("spare", Quantised(torch.zeros(2)))
    reason = graphs.check(tiny.context(toy))
    assert reason == "weights are of a special type (Quantised)"


def test_hooks_on_every_module_are_seen(graphs):
    hooks = []

    def change(toy):
        hook = nn.modules.module.register_module_forward_hook(lambda m, i, o: None)
        hooks.append(hook)

    try:
        facts = run(graphs, model(), count=6, change=change)
    finally:
        hooks[0].remove()
    assert facts.not_replayed["a part of the model has a forward hook"] == 1


def test_autocast_is_not_captured(graphs):
    toy = model()
    with torch.autocast("cpu", torch.bfloat16):
        facts = run(graphs, toy)
    assert facts.not_replayed == {"autocast is on": 4}


def test_signatures_without_sizes():
    def of(x, guidance=(int, 3)):
        return sizeless(("state", (x.shape, x.dtype, x.stride(), x.device), guidance))

    x = torch.ones(2, 8)
    assert of(x) == of(torch.ones(3, 9))
    others = [of(torch.ones(2, 0)), of(torch.ones(1, 8)), of(x.double()), of(x, (int, 4))]
    assert len({of(x), *others}) == 5
