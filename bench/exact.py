"""The forward that a tier's error is measured against: fp32, from the very same weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

REFERENCE = "fp32 activations, each layer's weight cast to fp32 when it is called"


@contextlib.contextmanager
def in_fp32(patcher: Any) -> Iterator[Any]:
    """The model computes in fp32 while this is entered; its weights stay as they are.

    A second copy in fp32 would take 24 GB (Z-Image) to 80 GB (Qwen-Image). The host can cast one
    layer's weight at a time instead, as it does for weights that were left off the card. Packed
    GGUF layers dequantise in the dtype of their input, by the eager reference.
    """
    import torch

    model = patcher.model
    kept_dtype = model.manual_cast_dtype
    layers = [m for m in model.diffusion_model.modules() if hasattr(m, "comfy_cast_weights")]
    kept = [module.__dict__.get("comfy_cast_weights") for module in layers]
    try:
        model.manual_cast_dtype = torch.float32
        for module in layers:
            module.comfy_cast_weights = True
        yield patcher
    finally:
        model.manual_cast_dtype = kept_dtype
        for module, flag in zip(layers, kept, strict=True):
            if flag is None:
                del module.comfy_cast_weights
            else:
                module.comfy_cast_weights = flag


def tf32_is_off() -> bool:
    """Whether fp32 products are that here; a reference under TF32 is none."""
    import torch

    return torch.get_float32_matmul_precision() == "highest"
