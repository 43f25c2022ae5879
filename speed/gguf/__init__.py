"""GGUF files: a strict reader, what they hold, and their tensors by name."""

from .load import LoadedGGUF, QuantTensorSpec, load_gguf, stays_packed
from .names import Recognised, recognise
from .reader import GGUFFile, TensorInfo

__all__ = [
    "GGUFFile",
    "LoadedGGUF",
    "QuantTensorSpec",
    "Recognised",
    "TensorInfo",
    "load_gguf",
    "recognise",
    "stays_packed",
]
