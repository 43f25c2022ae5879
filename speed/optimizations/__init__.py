"""The optimizations of transformers and of VAEs, in install order.

A new one is a file, a row here and a name in tiers.py.
"""

from __future__ import annotations

from typing import Final

from .attention_backend import AttentionBackend
from .base import Optimization
from .channels_last import ChannelsLast
from .cudnn_benchmark import CudnnBenchmark
from .dequant_cache import DequantCache
from .eager_patches import EagerPatches
from .fused_qkv import FusedQkv
from .gguf_dequant import GgufDequant
from .graph_capture import GraphCapture
from .regional_compile import RegionalCompile
from .tf32 import Tf32
from .vae_compile import VaeCompile

# Flags first, then what changes modules, then the compile, which traces what the others put in, and
# the graph last, which records what they all come to.
OPTIMIZATIONS: Final[tuple[Optimization, ...]] = (
    Tf32(),
    CudnnBenchmark(),
    AttentionBackend(),
    EagerPatches(),
    GgufDequant(),
    DequantCache(),
    FusedQkv(),
    RegionalCompile(),
    GraphCapture(),
)

# The layout last: it is measured with compiled norms in place, which keep it, where a card's own
# GroupNorm converts back.
VAE_OPTIMIZATIONS: Final[tuple[Optimization, ...]] = (
    Tf32(),
    CudnnBenchmark(),
    VaeCompile(),
    ChannelsLast(),
)
