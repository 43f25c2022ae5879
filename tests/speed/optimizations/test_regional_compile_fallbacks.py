"""Compiled blocks: what falls back with its reason, and what must never be ignored."""

import tempfile

import pytest
import torch
import torch._dynamo
from speed_tier.speed.optimizations import dynamo
from speed_tier.speed.optimizations.base import HostFacts
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
from torch.nn.modules.module import register_module_forward_hook

pytestmark = pytest.mark.slow  # blocks are compiled


@pytest.fixture(autouse=True)
def nothing_leaks():
    before, settings = full_state(), config()
    yield
    assert full_state() == before
    assert config() == settings
    assert active_patches() == 0


class Raises:
    """Something a pack puts into the options, that fails inside the block."""

    def __init__(self, error, opaque=False):
        self.error = error
        self.attend = torch.compiler.disable(self.fail) if opaque else self.fail

    def fail(self, *_):
        raise self.error


def broken_backend(gm, inputs):
    raise RuntimeError("no compiler for you\nand more lines")


def test_a_backend_that_raises_falls_back_and_the_run_goes_on():
    model, x = toy(), toy_input()
    compiled = with_config(backend=broken_backend)
    with tiny.engaged(compiled, on=model) as run:
        for _ in range(3):
            torch.testing.assert_close(run.call(x), tiny.plain(model, x), rtol=0, atol=0)
        reason = run.handles[0].fell_back
        assert "blocks: compile failed: " in reason
        assert "no compiler for you" in reason
        assert "\n" not in reason
        (kind,) = run.handles[0].compile_facts().kinds
        assert (kind.compiles, kind.failed) == (0, 1)
        assert kind.seconds > 0
    # Known to be broken: skipped from now on, not tried again.
    reason = compiled.check(tiny.context(model))
    assert reason.startswith("did not compile earlier in this process: compile failed: ")
    assert "no compiler for you" in reason


def test_a_host_that_hides_compile_errors_does_not_hide_ours():
    model = toy(blocks=1)
    with (
        torch._dynamo.config.patch(suppress_errors=True),
        tiny.engaged(with_config(backend=broken_backend), on=model) as run,
    ):
        check_same(run, toy_input())
        assert "no compiler for you" in run.handles[0].fell_back


def test_a_temporary_folder_that_compile_commands_take_apart(monkeypatch, tmp_path):
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codecache import _precompile_header

    # Scalar code will do: probing the vector units in a new cache takes a minute.
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing built before
    _precompile_header.cache_clear()  # built by an earlier test, it would be taken from there
    model = toy(blocks=1)
    with tiny.engaged(with_config(backend="inductor", dynamic=False), on=model) as run:
        check_same(run, toy_input())
        assert not run.handles[0].fell_back
        (kind,) = run.handles[0].compile_facts().kinds
        assert (kind.compiles, kind.failed) == (1, 0)


def test_one_kind_that_fails_leaves_the_others_compiled():
    def fails_on_wide(gm, inputs):
        if any(getattr(x, "shape", None) == (48,) for x in inputs):
            raise RuntimeError("too wide")
        return gm.forward

    class Wide(ToyBlock):
        def forward(self, x, options):
            return x + super().forward(x.repeat(1, 1, 2)[..., :48], options)[..., : x.shape[-1]]

    model = Toy(ToyBlock(), Wide(48), ToyBlock()).requires_grad_(False)
    before = graphs()
    with tiny.engaged(with_config(backend=fails_on_wide), on=model) as run:
        check_same(run, toy_input())
        check_same(run, toy_input())
        handle = run.handles[0]
        assert handle.fell_back == ""
        assert handle.note.startswith("runs eager in part (blocks#2: compile failed: ")
        assert [kind.compiles for kind in handle.compile_facts().kinds] == [1, 0]
    assert graphs() > before


@pytest.mark.parametrize("lengths", [(8, 9, 10, 11, 12, 13)])
def test_the_recompile_limit_falls_back_with_its_reason_and_goes_on(lengths):
    model = toy(blocks=2)
    compiled = with_config(dynamic=False, recompile_limit=3)
    before = graphs()
    with tiny.engaged(compiled, on=model) as run:
        for tokens in lengths:
            check_same(run, toy_input(tokens=tokens))
        assert run.handles[0].fell_back.startswith("blocks: recompile limit hit (")
        assert run.handles[0].compile_facts().graphs == 3
    assert graphs() - before == 3
    with tiny.engaged(compiled, on=model) as run:  # with a size it knows, compiled code runs
        check_same(run, toy_input(tokens=8))
        assert run.handles[0].fell_back == ""
    assert graphs() - before == 3


def test_the_limit_counts_for_each_kind():
    model = Toy(ToyBlock(), ToyBlock(bias=False), ToyBlock()).requires_grad_(False)
    with tiny.engaged(with_config(recompile_limit=1), on=model) as run:
        check_same(run, toy_input())
        assert run.handles[0].fell_back == ""
        assert run.handles[0].compile_facts().graphs == 2


def test_a_hook_added_after_the_first_compiled_call_is_honoured():
    model, x = toy(), toy_input()
    with tiny.engaged(EAGER, on=model) as run:
        without = check_same(run, x)
        before = graphs()
        hook = model.blocks[1].mlp[0].register_forward_hook(lambda _, __, out: out * 0)
        assert not torch.allclose(check_same(run, x), without)
        assert run.handles[0].note == "1 block calls ran eager: a part has a forward hook"
        assert run.handles[0].fell_back == "", "the other blocks are compiled"
        hook.remove()
        pre = model.blocks[0].norm.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        assert check_same(run, x).shape == x.shape
        pre.remove()
        torch.testing.assert_close(run.call(x), without)
        assert graphs() == before


def test_a_hook_on_the_block_itself_runs_around_compiled_code():
    model, x = toy(), toy_input()
    with tiny.engaged(EAGER, on=model) as run:
        without = check_same(run, x)
        seen = []
        hook = model.blocks[1].register_forward_hook(lambda _, __, out: seen.append(1) or out * 2)
        assert not torch.allclose(check_same(run, x), without)
        assert seen == [1, 1]
        assert run.handles[0].note.startswith("1 kind of block")
        hook.remove()


def test_a_hook_on_every_module_of_the_process_is_honoured():
    model, x = toy(), toy_input()
    with tiny.engaged(EAGER, on=model) as run:
        without = check_same(run, x)
        hook = register_module_forward_hook(
            lambda module, _, out: out * 0 if isinstance(module, nn.SiLU) else None
        )
        try:
            assert not torch.allclose(check_same(run, x), without)
            assert "3 block calls ran eager" in run.handles[0].note
        finally:
            hook.remove()


def test_hooks_on_every_block_are_no_victory():
    model = toy(blocks=2)
    for block in model.blocks:
        block.norm.register_forward_hook(lambda *_: None)
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, toy_input())
        assert run.handles[0].fell_back == "2 block calls ran eager: a part has a forward hook"


def test_a_foreign_forward_on_a_block_is_honoured():
    model, x = toy(), toy_input()
    expected = tiny.plain(model, x)
    model.blocks[1].forward = lambda x, options: x * 3
    with tiny.engaged(EAGER, on=model) as run:
        assert not torch.allclose(check_same(run, x), expected)
        assert "; 1 blocks run eager: another pack has replaced their forward" in (
            run.handles[0].note
        )
    assert "forward" in vars(model.blocks[1]), "it stays"
    for block in model.blocks:
        block.forward = lambda x, options: x
    assert EAGER.check(tiny.context(model)) == (
        "another pack has replaced the forward of every block"
    )


def test_a_foreign_forward_on_a_block_in_mid_run_is_honoured():
    model, x = toy(blocks=2), toy_input()
    with tiny.engaged(EAGER, on=model) as run:
        run.call(x)
        model.blocks[1].forward = lambda x, options: x * 3
        assert torch.equal(run.call(x), tiny.plain(model, x))
        assert "another pack has replaced its forward" in run.handles[0].note


def test_a_foreign_forward_on_a_part_in_mid_run_is_honoured():
    model, x = toy(), toy_input()
    with tiny.engaged(EAGER, on=model) as run:
        without = check_same(run, x)
        model.blocks[1].mlp[0].forward = lambda x: x * 3
        assert not torch.allclose(check_same(run, x), without)
        del model.blocks[1].mlp[0].forward
        torch.testing.assert_close(run.call(x), without)


@pytest.mark.parametrize("name", ["attention", "patches"])
def test_options_added_after_the_first_compiled_call_are_honoured(name):
    """An attention override or a block patch of another node, and its removal."""
    model, x = toy(), toy_input()
    added = {
        "attention": {"attention": lambda q, k, v: v * 2},
        "patches": {"patches": [lambda x: x * 0.5]},
    }[name]
    with tiny.engaged(EAGER, on=model) as run:
        without = check_same(run, x, {})
        assert not torch.allclose(check_same(run, x, added), without)
        torch.testing.assert_close(run.call(x, {}), without)
        other = (
            {"attention": lambda q, k, v: q} if name == "attention" else {"patches": [torch.neg]}
        )
        assert not torch.allclose(check_same(run, x, other), without)
        assert run.handles[0].compile_facts().graph_breaks == {}


def test_an_override_that_breaks_the_graph_is_counted_and_right():
    def attend(q, k, v):
        torch._dynamo.graph_break()
        return v * 2

    with tiny.engaged(EAGER, on=toy(blocks=1)) as run:
        check_same(run, toy_input(), {"attention": attend})
        facts = run.handles[0].compile_facts()
    assert sum(facts.graph_breaks.values()) >= 1
    assert all("\n" not in reason for reason in facts.graph_breaks)


@pytest.mark.parametrize("opaque", [False, True], ids=["traced", "opaque"])
@pytest.mark.parametrize(
    "error", [ValueError("a pack's own"), torch.OutOfMemoryError("pretended"), KeyboardInterrupt()]
)
def test_an_exception_inside_a_block_comes_out_unchanged(error, opaque):
    model, x = toy(blocks=2), toy_input()
    with tiny.engaged(EAGER, on=model) as run:
        check_same(run, x)
        raising = Raises(error, opaque)
        with pytest.raises(type(error)) as raised:
            run.call(x, {"attention": raising.attend})
        assert str(raised.value) == str(error)
        assert active_patches() == 0
        assert run.handles[0].fell_back == ""
        check_same(run, x)
    assert full_state()["matmul.allow_tf32"] is False


def test_a_block_that_fails_by_itself_breaks_no_kind():
    """A wrong LoRA or ControlNet fails while it is traced; that says nothing of the compiler."""
    model = toy(blocks=2)
    with tiny.engaged(EAGER, on=model) as run:
        with pytest.raises(RuntimeError, match="shape") as raised:
            run.call(torch.zeros(1, 8, tiny.WIDTH + 1))
        assert type(raised.value) is RuntimeError
        assert run.handles[0].fell_back == ""
        check_same(run, toy_input())
        assert run.handles[0].compile_facts().graphs == 1


def test_a_fallback_is_kept_when_the_call_then_fails():
    model = toy(blocks=2)
    model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with tiny.engaged(with_config(backend=broken_backend), on=model) as run:
        with pytest.raises(ZeroDivisionError):
            run.call(toy_input())
        assert "no compiler for you" in run.handles[0].fell_back


def test_an_interrupt_is_asked_for_between_blocks():
    asked = []
    host = HostFacts(check_interrupt=lambda: asked.append(1))
    with tiny.engaged(EAGER, on=toy(blocks=5), host=host) as run:
        run.call(toy_input())
    assert len(asked) == 5


def test_an_interrupt_stops_at_the_next_block():
    class InterruptProcessingException(BaseException):
        pass

    asked, ran = [], []

    def check():
        asked.append(1)
        if len(asked) == 3:
            raise InterruptProcessingException

    model = toy(blocks=5)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: ran.append(1))
    with (
        tiny.engaged(EAGER, on=model, host=HostFacts(check_interrupt=check)) as run,
        pytest.raises(InterruptProcessingException),
    ):
        run.call(toy_input())
    assert len(ran) == 2
    assert not any("forward" in vars(block) for block in model.blocks)


def test_only_failures_to_compile_count_as_such():
    failures = dynamo.compile_failures()
    assert issubclass(torch._dynamo.exc.BackendCompilerFailed, failures)
    assert issubclass(torch._dynamo.exc.FailOnRecompileLimitHit, failures)
    for other in (RuntimeError, torch.OutOfMemoryError, ValueError, KeyboardInterrupt):
        assert not issubclass(other, failures)


def test_a_reason_is_one_short_line():
    assert dynamo.plain_reason(ValueError("\n  first \nsecond")) == (
        "compile failed: ValueError: first"
    )
    assert len(dynamo.plain_reason(ValueError("x" * 5000))) < 400
    assert dynamo.plain_reason(ValueError()) == "compile failed: ValueError: no message"
