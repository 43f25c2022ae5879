"""Dequantisation of GGUF weights: one call, a kernel a type, a torch twin of each."""

from .dispatch import (
    BY_ID,
    PATHS,
    QUANT_TYPES,
    QuantType,
    check_packed,
    chosen_path,
    dequantize,
    forget_choices,
)

__all__ = [
    "BY_ID",
    "PATHS",
    "QUANT_TYPES",
    "QuantType",
    "check_packed",
    "chosen_path",
    "dequantize",
    "forget_choices",
]
