"""Launching by raw pointer, against a stand-in for what Triton compiles and Triton's source."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from speed_tier.speed.kernels import launch


class Compiled:
    """Records how it is run, as Triton's CompiledKernel is run."""

    function, packed_metadata = 7, b"metadata"

    def __init__(self):
        self.calls = []

    def run(self, *args):
        self.calls.append(args)


@pytest.fixture
def raw(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 1000 + i, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    compiled = Compiled()
    return launch._RawLaunch(compiled, 0, tile=8, mantissa=True), compiled


def test_raw_launch_passes_integers_in_triton_order(raw):
    raw_launch, compiled = raw
    raw_launch.run(4096, 8192, 17)
    (args,) = compiled.calls
    assert args == (3, 1, 1, 1000, 7, b"metadata", None, None, None, 4096, 8192, 17, 8, True)


def test_order_is_what_this_triton_calls():
    """The installed Triton's launch passes the same arguments in the same order."""
    from triton.runtime.jit import JITFunction

    source = " ".join(inspect.getsource(JITFunction.run).split())
    assert (
        "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, "
        "launch_metadata, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, "
        "*bound_args.values())"
    ) in source


def test_known_triton_has_no_refusal(monkeypatch):
    assert launch.raw_launch_refusal(Compiled()) is None
    import triton

    monkeypatch.setattr(triton, "__version__", "99.0")
    assert "found 99.0" in launch.raw_launch_refusal(Compiled())


def test_missing_attributes_are_a_refusal():
    assert "packed_metadata" in launch.raw_launch_refusal(SimpleNamespace(run=1, function=2))


@pytest.mark.parametrize(
    ("error", "reason"), [(TypeError("no integers"), "no integers"), (None, "another result")]
)
def test_a_raw_launch_that_fails_or_differs_is_not_kept(raw, monkeypatch, error, reason):
    """The stand-in writes nothing, so its result differs from what Triton's own launch wrote."""

    def run(*args):
        if error is not None:
            raise error

    _, compiled = raw
    monkeypatch.setattr(compiled, "run", run)
    jit = SimpleNamespace(__name__="_kernel")
    kernel = launch.DequantKernel(jit, 32, 34, tile=8, num_warps=1, mantissa=False, sweep=())
    packed, out = torch.zeros(34, dtype=torch.uint8), torch.ones(1, 32)
    kernel._keep_raw(compiled, packed, out)
    assert reason in kernel.raw_refusal
    assert kernel._compiled == {}


def test_no_kernel_for_old_cards(monkeypatch):
    launch.kernel_refusal.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert launch.kernel_refusal(torch.device("cuda", 0)) == "compute capability 7.5, needs 8.0"
    launch.kernel_refusal.cache_clear()


def test_a_first_launch_inside_a_capture_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    jit = SimpleNamespace(__name__="_kernel")
    kernel = launch.DequantKernel(jit, 32, 34, tile=8, num_warps=1, mantissa=False, sweep=())
    packed = SimpleNamespace(
        dtype=torch.uint8, is_contiguous=lambda: True, data_ptr=lambda: 64, is_cuda=True
    )
    with pytest.raises(launch.KernelConstraintError, match="one run before it can be captured"):
        kernel.first_launch(packed, torch.ones(1, 32))
