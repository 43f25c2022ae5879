"""Reads every process-wide switch one by one, with no help from the pack under test."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

ATTRIBUTES = (
    "torch.backends.fp32_precision",
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_fp16_accumulation",
    "torch.backends.cudnn.enabled",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.benchmark_limit",
    "torch.backends.cudnn.deterministic",
    "torch.backends.cudnn.allow_tf32",
    "torch.backends.cudnn.fp32_precision",
    "torch.backends.cudnn.conv.fp32_precision",
    "torch.backends.cudnn.rnn.fp32_precision",
    "torch.backends.mkldnn.fp32_precision",
    "torch.backends.mkldnn.matmul.fp32_precision",
    "torch.backends.opt_einsum.enabled",
    "torch._dynamo.config.recompile_limit",
    "torch._dynamo.config.accumulated_recompile_limit",
    "torch._dynamo.config.fail_on_recompile_limit_hit",
    "torch._dynamo.config.suppress_errors",
    "torch._dynamo.config.assume_static_by_default",
    "torch._dynamo.config.automatic_dynamic_shapes",
    "torch._dynamo.config.force_parameter_static_shapes",
    "torch._dynamo.config.allow_unspec_int_on_nn_module",
    "torch._dynamo.config.inline_inbuilt_nn_modules",
    "torch._inductor.config.emulate_precision_casts",
    "torch._inductor.config.cpp_wrapper",
    "torch._inductor.config.fx_graph_cache",
    "torch._inductor.config.compile_threads",
    "torch._inductor.config.triton.cudagraphs",
    "torch._inductor.config.coordinate_descent_tuning",
    "torch._inductor.config.max_autotune",
    "torch._functorch.config.donated_buffer",
    "torch.fx.experimental._config.use_duck_shape",
)
CALLS = {
    "float32_matmul_precision": "torch.get_float32_matmul_precision",
    "num_threads": "torch.get_num_threads",
    "default_dtype": "torch.get_default_dtype",
    "deterministic_algorithms": "torch.are_deterministic_algorithms_enabled",
    "sdp_flash": "torch.backends.cuda.flash_sdp_enabled",
    "sdp_mem_efficient": "torch.backends.cuda.mem_efficient_sdp_enabled",
    "sdp_math": "torch.backends.cuda.math_sdp_enabled",
    "sdp_cudnn": "torch.backends.cuda.cudnn_sdp_enabled",
    "sdp_fp16_bf16_reduction_math": "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
    "linalg_library": "torch.backends.cuda.preferred_linalg_library",
    "blas_library": "torch.backends.cuda.preferred_blas_library",
}
# PATH is left out: a first compile may legitimately look for a compiler there.
ENVIRONMENT = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_FX_GRAPH_CACHE",
    "NVIDIA_TF32_OVERRIDE",
    "DISABLE_ADDMM_CUDA_LT",
    "PYTORCH_CUDA_ALLOC_CONF",
)


def read_flags() -> dict[str, Any]:
    """Every flag that exists in this torch, as JSON values; an unreadable one says why."""
    flags: dict[str, Any] = {}
    for path in ATTRIBUTES:
        _read(flags, path, path, call=False)
    for name, path in CALLS.items():
        _read(flags, name, path, call=True)
    for name in ENVIRONMENT:
        flags["env." + name] = os.environ.get(name)
    return flags


def _read(flags: dict[str, Any], name: str, path: str, call: bool) -> None:
    # Once somebody used the fp32_precision names, reading the older allow_tf32 raises: that is
    # a reading as well, and it must come back to what it was.
    try:
        value = _resolve(path)
        if call:
            value = value()
    except (AttributeError, ImportError):
        return
    except Exception as error:
        flags[name] = f"unreadable: {type(error).__name__}"
        return
    plain = value is None or isinstance(value, bool | int | float | str)
    flags[name] = value if plain else str(value)


def _resolve(path: str) -> Any:
    value: Any = torch
    names = path.split(".")[1:]
    for i, name in enumerate(names):
        if not hasattr(value, name):
            # A config module that nothing has imported yet; reading it must not be what fails.
            importlib.import_module(".".join(["torch", *names[: i + 1]]))
        value = getattr(value, name)
    return value
