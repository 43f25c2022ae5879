"""Which launches share a compiled kernel, against a stand-in for Triton."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from speed_tier.speed.kernels import raw


class Tensor:
    """What the launcher asks of a CUDA tensor."""

    is_cuda, device = True, "cuda:0"

    def __init__(self, pointer=256, dtype=torch.bfloat16):
        self.pointer, self.dtype = pointer, dtype

    def get_device(self):
        return 0

    def data_ptr(self):
        return self.pointer


class Jit:
    """Compiles one kernel a call, and notes what is launched by it."""

    __name__ = "kernel"

    def __init__(self):
        self.compiled = 0
        self.raw = []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.compiled += 1
            return SimpleNamespace(
                run=lambda *args: self.raw.append(args), function=1, packed_metadata=b""
            )

        return launch


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(raw, "raw_launch_refusal", lambda compiled: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 1000 + i, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return raw.RawKernel(Jit(), num_warps=4)


def test_the_second_launch_is_by_raw_pointer(kernel):
    for count in (3, 7):
        kernel((count, 1), (Tensor(512),), (count, 1e-6), {"BLOCK": 8})
    assert kernel.jit.compiled == 1
    assert kernel.jit.raw == [(7, 1, 1, 1000, 1, b"", None, None, None, 512, 7, 1e-6, 8)]


@pytest.mark.parametrize(
    ("tensor", "number", "block"),
    [
        (Tensor(264), 3, 8),
        (Tensor(dtype=torch.float32), 3, 8),
        (Tensor(), 2**31, 8),  # 64 bits to Triton
        (Tensor(), 3, 16),
    ],
    ids=["alignment", "dtype", "width of a number", "constant"],
)
def test_what_needs_a_kernel_of_its_own(kernel, tensor, number, block):
    kernel((1, 1), (Tensor(),), (3, 1e-6), {"BLOCK": 8})
    for _ in range(2):
        kernel((1, 1), (tensor,), (number, 1e-6), {"BLOCK": block})
    assert kernel.jit.compiled == 2 and len(kernel.jit.raw) == 1
