"""Triton's interpreter, made to round as every device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def round_to_nearest(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make the interpreter round fp32 to bf16 to nearest even.

    Triton's interpreter truncates there (its cast passes no rounding mode).
    """
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        if input_dtype == tl.float32 and output_dtype == tl.bfloat16:
            rounded = torch.from_numpy(data.copy().view("float32")).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view("uint16")
        return original(data, input_dtype, output_dtype, rounding_mode)

    replace(interpreter, "_convert_float", convert)
