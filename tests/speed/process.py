"""An independent reading of torch's process-wide settings, to check the engine's own table by."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch

RAISES = "raises"


def _read(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (RuntimeError, AttributeError) as error:
        return RAISES if isinstance(error, RuntimeError) else "absent"


def full_state() -> dict[str, Any]:
    """Every setting that a tier, or writing one of them, could touch. Plain data."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    readers: dict[str, Callable[[], Any]] = {
        "matmul.allow_tf32": lambda: cuda.matmul.allow_tf32,
        "matmul.fp32_precision": lambda: cuda.matmul.fp32_precision,
        "cudnn.allow_tf32": lambda: cudnn.allow_tf32,
        "cudnn.fp32_precision": lambda: cudnn.fp32_precision,
        "cudnn.conv": lambda: cudnn.conv.fp32_precision,
        "cudnn.rnn": lambda: cudnn.rnn.fp32_precision,
        "generic.fp32_precision": lambda: torch.backends.fp32_precision,
        "mkldnn": lambda: mkldnn.fp32_precision,
        "mkldnn.matmul": lambda: mkldnn.matmul.fp32_precision,
        "mkldnn.conv": lambda: mkldnn.conv.fp32_precision,
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "cudnn.benchmark": lambda: cudnn.benchmark,
        "cudnn.deterministic": lambda: cudnn.deterministic,
        "cudnn.enabled": lambda: cudnn.enabled,
        "fp16_reduced": lambda: cuda.matmul.allow_fp16_reduced_precision_reduction,
        "bf16_reduced": lambda: cuda.matmul.allow_bf16_reduced_precision_reduction,
        "fp16_accumulation": lambda: cuda.matmul.allow_fp16_accumulation,
        "sdp.flash": cuda.flash_sdp_enabled,
        "sdp.mem_efficient": cuda.mem_efficient_sdp_enabled,
        "sdp.math": cuda.math_sdp_enabled,
        "sdp.cudnn": cuda.cudnn_sdp_enabled,
        "sync_debug_mode": lambda: torch._C._cuda_get_sync_debug_mode(),
        "gc": gc.isenabled,
        "grad": torch.is_grad_enabled,
        "inference": torch.is_inference_mode_enabled,
        "threads": torch.get_num_threads,
        "default_dtype": lambda: str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "env": lambda: {k: v for k, v in os.environ.items() if k.startswith(("TORCH", "TRITON"))},
    }
    return {name: _read(reader) for name, reader in readers.items()}
