"""How far a tier may be from an fp32 forward: the one table that tests and checks share.

Rounding features do not reproduce `off` bit for bit, and `off` in bf16 is itself 1 to 2 % away
from fp32. So the measure is not the distance to `off` but the distance of both to fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class CheckBounds:
    """How far the self-check lets a tiered tensor be from the untiered one.

    Attributes:
        stream: Of a block, share of its output's norm: both round a residual stream.
        update: Of a block, in addition, share of the norm of what it adds to its input.
        gain: Of a block, how far its scale may be off: rounding goes both ways, a fault does not.
        output: Of the whole forward, relative; two right answers drift apart over the depth.
    """

    stream: float
    update: float
    gain: float
    output: float


# Activations are quantised before a product: one rounding before that moves a value by a step of
# the quantiser. Only gross faults can be told here.
_QUANTISED: Final = CheckBounds(stream=2e-2, update=5e-1, gain=1e-1, output=5e-1)
_TF32: Final = CheckBounds(stream=1e-3, update=1e-2, gain=2e-3, output=3e-2)
CHECK_BOUNDS: Final[dict[torch.dtype, CheckBounds]] = {
    torch.float32: CheckBounds(stream=1e-5, update=1e-4, gain=2e-5, output=1e-3),
    torch.float16: CheckBounds(stream=1e-3, update=1e-2, gain=2e-3, output=3e-2),
    torch.bfloat16: CheckBounds(stream=8e-3, update=4e-2, gain=8e-3, output=1.5e-1),
}


def check_bounds(
    dtype: torch.dtype, with_tf32: bool, with_quantised_activations: bool = False
) -> CheckBounds:
    """The self-check's bounds for a model that computes in `dtype`."""
    if with_quantised_activations:
        return _QUANTISED
    if dtype == torch.float32 and with_tf32:
        return _TF32
    return CHECK_BOUNDS.get(dtype, CHECK_BOUNDS[torch.bfloat16])
