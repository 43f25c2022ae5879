"""How repeated blocks are compiled: the fields of regional compile, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch

_MODES: Final = (None, "default", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class CompileConfig:
    """How blocks are compiled.

    Attributes:
        backend: torch.compile backend.
        dynamic: None = code of its own for the first size, symbolic sizes for every other. On one
            H200 at 1024 px static code is 0.5 % (Z-Image) to 2.6 % (Qwen-Image) faster than
            symbolic; at 512 the launches decide, and neither wins (bench/results/levers.jsonl).
            True = symbolic from the start, False = one compile per size.
        recompile_limit: Variants per kind before a kind runs eager. The stated bound is 4 per
            kind; the rest is room for partial loads and mixed LoRA targets.
        emulate_precision_casts: Round between fused operations as eager does.
        mode: torch.compile mode; not together with emulate_precision_casts.
    """

    backend: str = "inductor"
    dynamic: bool | None = None
    recompile_limit: int = 32
    emulate_precision_casts: bool = False
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(
                f"mode needs one of {', '.join(map(str, _MODES))}; found {self.mode!r}. Modes with "
                "CUDA graphs overwrite a block's output between blocks"
            )
        if self.mode is not None and self.emulate_precision_casts:
            raise ValueError(
                "torch.compile takes a mode or options; found mode and precision casts"
            )
        if self.recompile_limit < 1:
            raise ValueError(
                f"recompile_limit needs to be at least 1; found {self.recompile_limit}"
            )

    def for_dtype(self, dtype: torch.dtype) -> CompileConfig:
        """What blocks that compute in `dtype` are compiled with.

        Hosts clamp fp16 where it overflows. Fused code holds 1e5 in fp32, where nothing is to be
        clamped, and makes infinity of it when it stores the fp16; so every rounding stays.
        """
        if dtype != torch.float16 or self.backend != "inductor" or self.mode is not None:
            return self
        return replace(self, emulate_precision_casts=True)

    def options(self) -> dict[str, Any] | None:
        if self.backend != "inductor" or not self.emulate_precision_casts:
            return None
        return {"emulate_precision_casts": True}
