"""What fused blocks of every family share: when they may run, and how they prove themselves."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..patching import body_drift, foreign, is_replaced

# A fused block may differ from the plain one by this much, relative: room for both to round, in a
# single block. Coarse on purpose; the tests hold it to the table of bounds.
_BOUND = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
PROBE_TOKENS = 48


class FusedBlock:
    """Stands in for one block's forward while a tiered call runs.

    A family's class says which lines of the host's code it was written for (`needles`), which
    modules it reads past (`norms`, `bypassed`), and computes the block when called.

    Attributes:
        block: the host's block.
        norms: its norms with weights: read here, not called.
        bypassed: other modules whose forward is not called, while their parts are.
        read: brings a norm's weight to an input, where the host keeps it elsewhere.
        plain_calls: how often the block ran as it is.
    """

    needles: ClassVar[dict[str, tuple[str, ...]]]
    head_dim = 0

    def __init__(
        self,
        block: Any,
        norms: Iterable[Any],
        bypassed: Iterable[Any],
        read: Callable[[Any, Tensor], AbstractContextManager[Tensor]] | None,
    ) -> None:
        self.block = block
        self.read = read
        self.norms: list[Any] = list(norms)
        self.bypassed: list[Any] = list(bypassed)
        parts = [*self.norms, *self.bypassed]
        self.plain_calls = 0
        self._hooks = [p._forward_hooks for p in parts] + [p._forward_pre_hooks for p in parts]
        self._attributes = [(part, vars(part)) for part in parts]
        self._parameters = [norm._parameters for norm in self.norms]
        self._patchable = [norm for norm in self.norms if hasattr(norm, "weight_function")]

    @classmethod
    def drift(cls, block: Any) -> str | None:
        """Why the host's code is not what this class was written for, or None."""
        for path, needles in cls.needles.items():
            module, _, method = path.rpartition(".")
            try:
                owner = block.get_submodule(module) if module else block
            except AttributeError:
                return f"{type(block).__name__} has no part {module}"
            if problem := drift_of(getattr(type(owner), method, None), needles):
                return problem
        return None

    def problem(self, device: torch.device) -> str:
        """Why this block runs as it is in this run, or ""."""
        if self.head_dim & (self.head_dim - 1):
            return f"the kernels need heads as wide as a power of two; found {self.head_dim}"
        for part in (self.block, *self.norms, *self.bypassed):
            if is_replaced(part, "forward"):
                return "another pack has replaced a part's forward"
        for norm in self.norms:
            weight = norm._parameters.get("weight")
            if weight is None or (self.read is None and weight.device != device):
                return f"the weight of a norm is not on {device}"
        return ""

    def undisturbed(self) -> bool:
        """Whether nothing has come between since: asked at every call, so with plain look-ups."""
        return not (
            any(self._hooks)
            or any("forward" in own and is_replaced(p, "forward") for p, own in self._attributes)
            or any(norm.weight_function for norm in self._patchable)
            or is_replaced(self.block, "forward")
        )

    def weight(self, index: int, like: Tensor) -> AbstractContextManager[Tensor]:
        """Of the norm at `index`, where `like` is, as long as the context is entered."""
        weight = self._parameters[index]["weight"]
        assert weight is not None
        if weight.device == like.device:
            return contextlib.nullcontext(weight)
        assert self.read is not None
        return self.read(self.norms[index], like)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        self.plain_calls += 1
        if (theirs := foreign(self.block, "forward")) is not None:  # since the run began
            return theirs(*args, **kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def probe_arguments(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Random arguments of the block's forward, for one comparison."""
        raise NotImplementedError

    def disagreement(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why not to use this, after one comparison with the host's own code; or None."""
        with torch.inference_mode():
            arguments = self.probe_arguments(device, dtype)
            expected = _together(self.plain(**arguments))
            got = _together(self(**arguments))
        self.plain_calls = 0
        error = float((got - expected).norm() / expected.norm())
        if not error <= _BOUND[dtype]:
            return f"the fused block is {error:.1%} from the host's own on a random input"
        return None


def _together(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.cat([part.double().flatten() for part in parts])


@functools.lru_cache(maxsize=64)
def drift_of(function: Any, needles: Sequence[str]) -> str | None:
    return "a method is missing" if function is None else body_drift(function, needles)


def attention_of(module: nn.Module) -> Any:
    """The attention function that the host's code of `module` would call."""
    return vars(sys.modules[type(module).__module__])["optimized_attention_masked"]


def turns(
    tokens: int, head_dim: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A random rotary table, `(1, 1, tokens, head_dim / 2, 2, 2)`."""
    angle = torch.rand(1, 1, tokens, head_dim // 2, device=device) * 6.28
    table = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
    return table.unflatten(-1, (2, 2)).to(dtype)


def is_table(table: Any, batch: int, tokens: int, head_dim: int) -> bool:
    """Whether a `(batch or 1, tokens, 1, head_dim / 2, 2, 2)` table lies as the kernel reads it."""
    return (
        isinstance(table, Tensor)
        and table.ndim == 6
        and table.shape[0] in (1, batch)
        and tuple(table.shape[1:]) == (tokens, 1, head_dim // 2, 2, 2)
        and table.stride()[3:] == (4, 2, 1)
    )


@functools.cache
def rms_eps(eps: float | None, dtype: torch.dtype, device: torch.device) -> float:
    """What torch adds under the root for an RMSNorm with this `eps`.

    For None it depends on torch's version (the epsilon of the input's dtype, or of float32), so it
    is read from what torch computes.
    """
    if eps is not None:
        return float(eps)
    x = torch.full((1, 64), 2.0**-4, dtype=dtype, device=device)
    root = float(x[0, 0]) / float(torch.nn.functional.rms_norm(x, (64,))[0, 0])
    implied = root**2 - 2.0**-8
    candidates = [float(torch.finfo(d).eps) for d in (torch.float32, dtype)]
    return min(candidates, key=lambda candidate: abs(candidate - implied))
