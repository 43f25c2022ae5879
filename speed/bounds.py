"""How far a tier may be from an fp32 forward: the one table that tests and checks share.

Rounding features do not reproduce `off` bit for bit, and `off` in bf16 is itself 1 to 2 % away
from fp32. So the measure is not the distance to `off` but the distance of both to fp32.
"""

from __future__ import annotations

from typing import Final

import torch

ERROR_FACTOR: Final = 1.1

# Relative error that is allowed where off's own is smaller still. fp32 needs it (off is the
# reference there); the half types need it for a forward in which off rounds to nothing.
ERROR_FLOOR: Final[dict[torch.dtype, float]] = {
    torch.float32: 1e-6,
    torch.bfloat16: 1e-6,
    torch.float16: 1e-6,
}


def allowed_error(off_error: float, dtype: torch.dtype) -> float:
    """The largest relative error a tier may have where `off` has `off_error`.

    Args:
        off_error: |off - exact| / |exact|, with exact from an fp32 forward of the same weights.
        dtype: Dtype the model computes in.
    """
    return ERROR_FACTOR * off_error + ERROR_FLOOR[dtype]
