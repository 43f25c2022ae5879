"""The cache of the note: exact while it misses, and at a hit the last full call's residuals."""

import pytest
import torch
from speed_tier.bench.first_block_cache import FirstBlockCache
from torch import nn


class Block(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + x @ self.weight


class TwoStreams(Block):
    def forward(self, hidden_states, encoder_hidden_states):
        self.calls += 1
        text = encoder_hidden_states + hidden_states.mean(0) @ self.weight
        hidden_states += hidden_states @ self.weight  # in place, as a host may
        return text, hidden_states


class OneList(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.layers = nn.ModuleList([Block(i) for i in range(count)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x,)


class TwoLists(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.transformer_blocks = nn.ModuleList([TwoStreams(i) for i in range(count)])

    def forward(self, x):
        x, text = x.clone(), torch.ones(4)
        for block in self.transformer_blocks:
            text, x = block(hidden_states=x, encoder_hidden_states=text)
        return x, text


def blocks_of(model):
    return model.layers if isinstance(model, OneList) else model.transformer_blocks


@pytest.mark.parametrize("make", [OneList, TwoLists])
def test_a_threshold_of_zero_changes_nothing(make):
    model, x = make(), torch.randn(5, 4)
    expected = model(x)
    with FirstBlockCache(model, 0.0) as cache:
        for _ in range(2):
            assert all(map(torch.equal, model(x), expected))
    assert (cache.calls, cache.hits) == (2, 0)


@pytest.mark.parametrize("make", [OneList, TwoLists])
def test_an_equal_call_is_a_hit_and_runs_the_first_block_only(make):
    model, x = make(), torch.randn(5, 4)
    expected = model(x)
    with FirstBlockCache(model, 0.1) as cache:
        model(x)
        before = [block.calls for block in blocks_of(model)]
        again = model(x)
        ran = [block.calls - n for block, n in zip(blocks_of(model), before, strict=True)]
    assert (cache.calls, cache.hits) == (2, 1)
    assert ran == [1, 0, 0]
    for got, wanted in zip(again, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_change_above_the_threshold_is_computed():
    model, x = OneList(), torch.randn(5, 4)
    with FirstBlockCache(model, 0.1) as cache:
        model(x)
        (other,) = model(2 * x)
        assert cache.hits == 0
        # Against the last full call, not the first one.
        model(2.05 * x)
    assert cache.hits == 1
    torch.testing.assert_close(other, model(2 * x)[0])


def test_another_size_is_computed():
    model = OneList()
    with FirstBlockCache(model, 10.0) as cache:
        model(torch.randn(5, 4))
        x = torch.randn(6, 4)
        got = model(x)
    assert cache.hits == 0
    assert torch.equal(got[0], model(x)[0])


def test_nothing_is_left_on_the_blocks():
    model = OneList()
    with pytest.raises(KeyError), FirstBlockCache(model, 0.1):
        raise KeyError
    assert all("forward" not in vars(block) for block in model.layers)


def test_one_block_is_too_few():
    with pytest.raises(ValueError, match="needs two blocks or more; found 1"):
        FirstBlockCache(OneList(1), 0.1)
