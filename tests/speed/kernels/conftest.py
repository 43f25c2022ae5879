"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def device_rounding(monkeypatch):
    """Make the interpreter round fp32 to bf16 to nearest even, as every device does.

    Triton's interpreter truncates there (its cast passes no rounding mode).
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data, input_dtype, output_dtype, rounding_mode):
        if input_dtype == tl.float32 and output_dtype == tl.bfloat16:
            rounded = torch.from_numpy(data.copy().view("float32")).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view("uint16")
        return original(data, input_dtype, output_dtype, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
