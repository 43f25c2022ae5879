"""Compiled blocks: kinds, sharing, and how many graphs a session costs."""

import gc
import sys
import weakref
from typing import ClassVar

import pytest
import torch
import torch._dynamo
from speed_tier.speed.optimizations.base import HostFacts
from speed_tier.speed.optimizations.regional_compile import (
    CompileConfig,
    RegionalCompile,
    build_blocks,
    kind_signature,
)
from speed_tier.speed.patching import active_patches
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.optimizations.compiling import (
    EAGER,
    check_same,
    config,
    graphs,
    with_config,
)
from speed_tier.tests.speed.process import full_state
from speed_tier.tests.speed.tiny import Toy, ToyBlock, toy, toy_input
from torch import nn

pytestmark = pytest.mark.slow  # blocks are compiled


@pytest.fixture(autouse=True)
def nothing_leaks():
    before, settings = full_state(), config()
    yield
    assert full_state() == before
    assert config() == settings
    assert active_patches() == 0


def test_kinds_are_class_shapes_and_dtypes():
    alike, wide, half = ToyBlock(), ToyBlock(48), ToyBlock().to(torch.bfloat16)
    signatures = [kind_signature(block) for block in (ToyBlock(), alike, wide, half)]
    assert signatures[0] == signatures[1]
    assert len(set(signatures)) == 3
    assert kind_signature(ToyBlock(bias=False)) not in signatures
    assert kind_signature(type("Other", (ToyBlock,), {})()) not in signatures
    packed = ToyBlock()
    packed.norm.weight = type("Packed", (nn.Parameter,), {})(packed.norm.weight.detach())
    assert kind_signature(packed) not in signatures


def test_blocks_are_sorted_into_kinds_with_names_of_their_own():
    model = Toy(ToyBlock(), ToyBlock(48), ToyBlock(), ToyBlock())
    built = build_blocks(tiny.TOY.repeated_blocks(model), CompileConfig(backend="eager"))
    assert [(kind.name, kind.blocks) for kind in built.kinds] == [("blocks", 3), ("blocks#2", 1)]
    assert built.calls["blocks.1"].kind is built.kinds[1]
    codes = {kind.code_for([torch.ones(1)]).__wrapped__.__code__ for kind in built.kinds}
    assert len(codes) == 2, "the recompile limit would count both kinds together"


def test_the_first_size_has_static_code_and_every_other_shares_one():
    (kind,) = build_blocks(
        tiny.TOY.repeated_blocks(Toy(ToyBlock())), CompileConfig(backend="eager")
    ).kinds
    first, second, third = (kind.code_for([torch.ones(n, 4)]) for n in (3, 5, 7))
    assert first is not second
    assert second is third
    assert kind.code_for([torch.ones(3, 4), "no tensor"]) is first


def test_every_block_of_a_kind_shares_one_artefact():
    model, x = toy(blocks=20), toy_input()
    before = graphs()
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, x)
        check_same(run, x)
        facts = run.handles[0].compile_facts()
    assert graphs() - before == 1
    assert (facts.graphs, facts.recompiles, facts.graph_breaks) == (1, 0, {})
    (kind,) = facts.kinds
    assert (kind.name, kind.blocks, kind.compiles) == ("blocks", 20, 1)
    assert kind.seconds == facts.seconds > 0


@pytest.mark.parametrize("looks_itself_up", [False, True], ids=["delta", "keyed table"])
def test_lora_with_a_key_in_each_block_is_not_a_graph_each(looks_itself_up):
    """The host's LoRA on offloaded weights; it once used up the recompile limit (20 of 20)."""

    class LowVramPatch:
        def __init__(self, key, patches):
            self.key, self.patches = key, patches

        def __call__(self, weight):
            return weight + (self.patches[self.key] if looks_itself_up else self.patches)

    class HostLinear(nn.Linear):
        weight_function: ClassVar[list] = []

        def forward(self, x):
            weight = self.weight
            for function in self.weight_function:
                weight = function(weight)
            return nn.functional.linear(x, weight, self.bias)

    model, table = toy(blocks=20), {}
    for index, block in enumerate(model.blocks):
        block.attention.out = HostLinear(tiny.WIDTH, tiny.WIDTH).requires_grad_(False)
        table[f"blocks.{index}"] = torch.randn(tiny.WIDTH, tiny.WIDTH)
    with tiny.engaged(EAGER, on=model) as run:
        without = check_same(run, toy_input())
        before = graphs()
        for key, block in zip(table, model.blocks, strict=True):
            patches = table if looks_itself_up else table[key]
            block.attention.out.weight_function = [LowVramPatch(key, patches)]
        assert not torch.allclose(check_same(run, toy_input()), without)
        assert graphs() - before <= 2
        assert "20 block calls ran eager: LoRA is applied" in run.handles[0].note
        for block in model.blocks:
            block.attention.out.weight_function = []
        torch.testing.assert_close(run.call(toy_input()), without)
        assert graphs() - before <= 1  # an empty list in the instance is not the class's


def test_sizes_and_batches_walk_within_the_bound():
    """One compile, one more at the second size, one more for batch 2; none on any return."""
    model, new = toy(), []
    with tiny.engaged(EAGER, on=model) as run:
        for batch, tokens in [(1, 8), (1, 12), (1, 40), (2, 8), (3, 12), (1, 300), (1, 8), (2, 40)]:
            before = graphs()
            check_same(run, toy_input(batch, tokens))
            new.append(graphs() - before)
    assert new == [1, 1, 0, 1, 0, 0, 0, 0]


def test_equal_sizes_are_not_taken_for_the_same_size():
    """64 text tokens beside 64 image tokens, then 64 beside 80: no compile of its own."""

    class TwoStreams(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, image, text):
            return self.linear(torch.cat([image, text], 1))

    model = Toy(TwoStreams().requires_grad_(False))
    model.forward = lambda image, text: model.blocks[0](image, text)
    before = graphs()
    with tiny.engaged(EAGER, on=model) as run:
        for image, text in [(4, 6), (8, 8), (8, 16), (24, 8)]:
            check_same(run, torch.ones(1, image, 8), torch.ones(1, text, 8))
    assert graphs() - before == 2


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, table=None, tables=None):
        for part in (table, *(tables or ())):
            if part is not None:
                x = x * part[:, : x.shape[1]]
        return self.linear(x)


@pytest.mark.parametrize("place", ["argument", "keyword", "tuple"])
def test_slices_and_views_are_no_graphs_of_their_own(place):
    model = Toy(Rotary().requires_grad_(False))
    whole = torch.randn(1, 64, 8)

    tables = [
        whole.clone(),
        whole.flatten()[: 16 * 8].view(1, 16, 8),
        *(whole[:, start : start + 16] for start in (4, 9)),
        *(whole.flatten()[start:][: 16 * 8].view(1, 16, 8) for start in (8, 24)),
    ]

    def forward(x, table):
        if place == "argument":
            return model.blocks[0](x, table)
        if place == "keyword":
            return model.blocks[0](x, table=table)
        return model.blocks[0](x, tables=(table, whole))

    model.forward = forward
    before = graphs()
    with tiny.engaged(EAGER, on=model) as run:
        for table in tables:
            check_same(run, torch.ones(1, 16, 8), table)
    assert graphs() - before == 2  # the whole table is the first size


def test_parameters_that_want_gradients_cost_no_graph_and_get_them_back():
    model = toy(blocks=4)
    for block in model.blocks[::2]:
        block.requires_grad_(True)
    wanted = [p.requires_grad for p in model.parameters()]
    before = graphs()
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, toy_input())
        assert not any(p.requires_grad for p in model.parameters())
    assert graphs() - before == 1
    assert [p.requires_grad for p in model.parameters()] == wanted


def test_in_inference_mode_as_the_host_runs():
    """Weights made there, some with gradients on: one graph, and one for the second batch."""
    with torch.inference_mode():
        model, x = toy(blocks=4), toy_input()
        for block in model.blocks[::2]:
            block.requires_grad_(True)
        wanted = [p.requires_grad for p in model.parameters()]
        before = graphs()
        with tiny.engaged(EAGER, on=model) as run:
            for batch in (1, 1, 2, 1):
                x = toy_input(batch)
                torch.testing.assert_close(run.call(x), model(x))
        assert graphs() - before == 2
    assert [p.requires_grad for p in model.parameters()] == wanted


def test_a_block_of_another_dtype_gives_its_own_right_result():
    model = toy(blocks=2)
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, toy_input())
    model.to(torch.bfloat16)
    with tiny.engaged(EAGER, on=model) as run:
        assert check_same(run, toy_input().bfloat16()).dtype == torch.bfloat16


def test_a_swapped_block_gets_fresh_kinds():
    model = toy(blocks=2)
    with tiny.engaged(EAGER, on=model) as run:
        before = check_same(run, toy_input())
    model.blocks[1] = ToyBlock().requires_grad_(False)
    with tiny.engaged(EAGER, on=model) as run:
        assert not torch.allclose(check_same(run, toy_input()), before)


def test_a_second_run_compiles_nothing():
    model = toy()
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, toy_input())
    before = graphs()
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, toy_input())
        facts = run.handles[0].compile_facts()
    assert graphs() == before
    assert (facts.graphs, facts.seconds) == (0, 0)


def test_a_compile_is_announced_once_a_kind():
    told = []
    model = Toy(ToyBlock(), ToyBlock(bias=False), ToyBlock()).requires_grad_(False)

    def compiling(kind, index, count):
        told.append((kind, index, count))

    with tiny.engaged(EAGER, on=model, compiling=compiling) as run:
        for batch in (1, 1, 2):
            run.call(toy_input(batch))
    assert told == [("blocks", 1, 2), ("blocks#2", 2, 2)]


def test_a_nested_run_leaves_the_outer_one_compiled():
    model, x = toy(), toy_input()
    with tiny.engaged(EAGER, on=model) as outer:
        check_same(outer, x)
        with tiny.engaged(EAGER, on=model) as inner:
            check_same(inner, x)
        asked = []
        outer.handles[0].run._interrupt = lambda: asked.append(1)
        check_same(outer, x)
        assert len(asked) == 3, "its blocks ran eager"
    assert all(not call.runs for call in outer.handles[0].blocks.calls.values())


def test_dynamo_is_set_inside_a_call_and_put_back():
    outside, inside = config(), []
    model = toy(blocks=1)
    model.blocks[0].register_forward_hook(lambda *_: inside.append(config()))
    with tiny.engaged(with_config(recompile_limit=5), on=model) as run:
        run.call(toy_input())
        assert config() == outside
    assert inside[0]["recompile_limit"] == 5 != outside["recompile_limit"]
    assert inside[0]["fail_on_recompile_limit_hit"] is True
    assert inside[0]["duck"] is False


def test_a_config_is_validated_and_typed():
    with pytest.raises(ValueError, match="recompile_limit needs to be at least 1; found 0"):
        CompileConfig(recompile_limit=0)
    for mode in ("reduce-overhead", "max-autotune"):  # CUDA graphs overwrite a block's output
        with pytest.raises(ValueError, match="mode needs one of .* found '" + mode):
            CompileConfig(mode=mode)
    assert CompileConfig().options() is None
    assert CompileConfig(emulate_precision_casts=True).options() == {
        "emulate_precision_casts": True
    }
    assert CompileConfig(backend="eager", emulate_precision_casts=True).options() is None
    assert CompileConfig().dynamic is None


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (
            HostFacts(compiled_by="a torch.compile node"),
            "a torch.compile node compiles this model already",
        ),
        (
            HostFacts(dynamic_vram=True),
            "dynamic VRAM loads weights inside the code that would be compiled",
        ),
    ],
)
def test_the_host_can_rule_it_out(host, reason):
    assert EAGER.check(tiny.context(toy(), host=host)) == reason


def test_no_compiler_on_the_path_is_said_before_anything_is_tried(monkeypatch, tmp_path):
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "found no g++ on PATH" in RegionalCompile().check(tiny.context(toy()))
    assert EAGER.check(tiny.context(toy())) is None


def test_no_triton_is_said_on_a_card(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = RegionalCompile().check(tiny.context(toy(), device=torch.device("cuda")))
    assert reason.startswith("Triton is not installed")


@pytest.mark.parametrize("ran", [False, True])
def test_nothing_keeps_the_model_alive(ran):
    model = toy(blocks=2)
    with tiny.engaged(EAGER, on=model) as run:
        if ran:
            run.call(toy_input())
    references = [weakref.ref(model), weakref.ref(model.blocks[0])]
    del model, run
    gc.collect()
    assert [reference() for reference in references] == [None, None]
