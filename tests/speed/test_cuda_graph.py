"""What may be captured, told on the CPU; the captures themselves are in tests/gpu."""

import gc
import random
import types

import pytest
import torch
from speed_tier.speed import cuda_graph
from speed_tier.speed.cuda_graph import NotCapturableError, flatten, with_tensors
from speed_tier.speed.flags import FLAGS
from speed_tier.tests.speed.process import full_state

CPU = torch.device("cpu")


def watched(call, *arguments, strict=True):
    storages = {t.untyped_storage().data_ptr() for t in arguments}
    watch = cuda_graph._Watch(CPU, strict, storages)
    with watch:
        call(*arguments)
    return watch


def test_a_signature_tells_apart_everything_but_the_contents():
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    found = []
    assert flatten([a, (1, None)], "x", found) == flatten([b, (1, None)], "x", [])
    assert found == [a]
    others = [
        [a.t().contiguous().t(), (1, None)],
        [a.double(), (1, None)],
        [torch.randn(3, 2), (1, None)],
        [a, (2, None)],
        [a, (True, None)],  # equal to 1, and not the same constant
        [a, [1, None]],
        [a.to("meta"), (1, None)],
    ]
    assert len({flatten(x, "x", []) for x in [[a, (1, None)], *others]}) == len(others) + 1


def test_a_view_that_cannot_be_copied_into_is_refused():
    with pytest.raises(NotCapturableError, match="timesteps is an expanded view"):
        flatten(torch.ones(1).expand(2), "timesteps", [])
    flatten(torch.ones(1, 3).expand(1, 3), "timesteps", [])


@pytest.mark.parametrize("then", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_static_inputs_are_written_in_any_mode(first, then):
    """A prompt encoded in inference mode, and a sampler outside of it."""
    with torch.inference_mode(first):
        x = torch.ones(3)
    with torch.no_grad(), torch.inference_mode(then):
        [static] = copies = cuda_graph.CudaRecorder().static_copies([x])
        assert static.is_inference() is first and torch.equal(static, x)
        graph = types.SimpleNamespace(replay=lambda: None)
        captured = cuda_graph.Captured(graph, copies, static, [])
        assert torch.equal(captured.replay([x * 2]), x * 2)


@pytest.mark.parametrize("value", [{}, object(), [1, {2}], torch.nn.Linear(1, 1), len])
def test_what_is_no_tensor_or_constant_is_refused_by_name(value):
    with pytest.raises(NotCapturableError, match=r"^guidance is a "):
        flatten(value, "guidance", [])


def test_tensor_subclasses_are_refused():
    class Quantised(torch.Tensor):
        pass

    with pytest.raises(NotCapturableError, match="Quantised"):
        flatten(torch.randn(2).as_subclass(Quantised), "x", [])


def test_tensors_are_put_back_where_they_were_found():
    generator = random.Random(0)

    def nested(depth):
        if depth == 0 or generator.random() < 0.3:
            return generator.choice([torch.randn(1), None, 3, "a"])
        parts = [nested(depth - 1) for _ in range(generator.randrange(4))]
        return generator.choice([list, tuple])(parts)

    for _ in range(200):
        value, found = nested(4), []
        flatten(value, "x", found)
        fresh = [torch.randn(1) for _ in found]
        again = []
        rebuilt = with_tensors(value, iter(fresh))
        assert flatten(rebuilt, "x", again) == flatten(value, "x", [])
        assert all(a is b for a, b in zip(again, fresh, strict=True))


def test_plain_operations_can_be_captured():
    def call(x, w):
        x = torch.nn.functional.dropout(x, 0.5, training=False)
        y = torch.nn.functional.scaled_dot_product_attention(x @ w, x, x)
        return torch.cat([y * torch.tensor(2.0), torch.zeros_like(y)]).sort().values

    assert watched(call, torch.randn(1, 2, 4, 8), torch.randn(8, 8)).problem == ""


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: torch.nonzero(x),
        lambda x: x + torch.randn_like(x),
        lambda x: torch.nn.functional.dropout(x, 0.5),
        lambda x: torch.unique(x),
    ],
)
def test_values_read_and_random_numbers_are_refused(call):
    assert (
        "needs the values of its input, or random numbers" in watched(call, torch.rand(4)).problem
    )


def test_work_on_another_device_is_refused():
    watch = watched(lambda x: torch.empty(3, device="meta"), torch.rand(3))
    assert "works on meta" in watch.problem


def test_a_copy_of_a_number_from_elsewhere_is_refused_and_the_number_is_not():
    watch = cuda_graph._Watch(torch.device("meta"), True, set())
    x = torch.empty(3, device="meta")
    with watch:
        _ = x * torch.tensor(2.0)
    assert watch.problem == ""
    with watch:
        torch.tensor(2.0).to("meta", copy=True)
    assert "copy" in watch.problem


def test_foreign_operations_are_refused_only_where_a_failure_ends_the_process():
    library = torch.library.Library("speed_tier_test_foreign", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    call = torch.ops.speed_tier_test_foreign.twice
    assert "not known to capture" in watched(call, torch.rand(3)).problem
    assert watched(call, torch.rand(3), strict=False).problem == ""
    library._destroy()


def test_tensors_from_outside_are_found_and_nothing_else():
    outside, weight = torch.randn(4, 4), torch.randn(4, 4)

    def call(x, weight):
        y = x @ weight
        return (y.view(-1)[2:] * 2).sum() + (outside[1:] @ y).sum()

    watch = watched(call, torch.randn(4, 4), weight)
    assert [t.data_ptr() for t in watch.external.values()] == [outside.data_ptr()]


@pytest.mark.parametrize("kind", ["chain", "attribute"])
def test_launches_by_tritons_own_call_are_named(monkeypatch, kind):
    class Chain(list):
        add = list.append

    runtime = types.SimpleNamespace(launch_enter_hook=Chain() if kind == "chain" else None)
    triton = types.SimpleNamespace(knobs=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(cuda_graph.sys.modules, "triton", triton)
    if kind == "attribute":
        compiler = types.ModuleType("triton.compiler")
        compiler.CompiledKernel = type("CompiledKernel", (), {})
        monkeypatch.setitem(cuda_graph.sys.modules, "triton.compiler", compiler)
    found = []
    with cuda_graph._jit_launches(found):
        hook = runtime.launch_enter_hook
        (hook[0] if kind == "chain" else hook)(types.SimpleNamespace(get=lambda: {"name": "rope"}))
    assert found == ["rope"]
    assert not runtime.launch_enter_hook


def test_no_collection_inside_a_capture_and_the_flag_is_the_tables():
    before = full_state()
    with cuda_graph._no_collection():
        assert not gc.isenabled()
        assert FLAGS.held == ("gc.enabled",)
    with pytest.raises(ValueError), cuda_graph._no_synchronisation():
        assert FLAGS.held == ("cuda.sync_debug_mode",)
        raise ValueError
    assert full_state() == before and FLAGS.held == ()


def test_the_installed_triton_offers_the_hook():
    """Without it a launch that ends the process would go unseen."""
    triton = pytest.importorskip("triton")
    found = []
    with cuda_graph._jit_launches(found):
        assert triton.knobs.runtime.launch_enter_hook.calls
    assert not triton.knobs.runtime.launch_enter_hook.calls
