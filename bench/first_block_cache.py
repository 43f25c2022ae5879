"""First-block cache: a measured note on what skipping blocks between steps gives and costs.

No tier has it, because it is no rounding: where the first block's residual has moved by less than a
threshold since the last full call, the other blocks are not run and their summed residual of that
call is added. How often that happens depends on the weights; random ones say what a hit saves, not
how many there are in a real picture or what they cost it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any


class FirstBlockCache:
    """While entered, a denoiser's blocks are skipped at hits. For one condition a step.

    Attributes:
        calls, hits: Calls of the denoiser, and how many of them skipped blocks.
    """

    def __init__(self, denoiser: Any, threshold: float) -> None:
        blocks = getattr(denoiser, "transformer_blocks", None)
        blocks = list(denoiser.layers if blocks is None else blocks)
        if len(blocks) < 2:
            raise ValueError(f"a first-block cache needs two blocks or more; found {len(blocks)}.")
        self.calls = self.hits = 0
        self._blocks = blocks
        self._threshold = threshold
        self._hit = False
        self._residual: Any = None  # of the first block, at the last full call
        self._rest: tuple[Any, ...] = ()  # of all others together
        self._after_first: tuple[Any, ...] = ()

    def __enter__(self) -> FirstBlockCache:
        for i, block in enumerate(self._blocks):
            block.forward = self._standing_in(i, type(block).forward.__get__(block))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for block in self._blocks:
            del block.forward

    def _standing_in(self, index: int, forward: Any) -> Any:
        last = len(self._blocks) - 1

        def first(*args: Any, **kwargs: Any) -> Any:
            # Copied: a block may add to its input in place.
            before = [stream.clone() for stream in _inputs(args, kwargs)]
            output = forward(*args, **kwargs)
            after = _streams(output)
            self._decide(after[-1] - before[-1])
            if not self._hit:
                self._after_first = tuple(stream.clone() for stream in after)
            return output

        def between(*args: Any, **kwargs: Any) -> Any:
            if self._hit:
                return _like(_inputs(args, kwargs))
            return forward(*args, **kwargs)

        def at_last(*args: Any, **kwargs: Any) -> Any:
            if self._hit:
                inputs = _inputs(args, kwargs)
                return _like([a + b for a, b in zip(inputs, self._rest, strict=True)])
            output = forward(*args, **kwargs)
            pairs = zip(_streams(output), self._after_first, strict=True)
            self._rest = tuple(a - b for a, b in pairs)
            return output

        return first if index == 0 else at_last if index == last else between

    def _decide(self, residual: Any) -> None:
        """Whether this call is near enough to the last full one."""
        self.calls += 1
        kept = self._residual
        self._hit = kept is not None and kept.shape == residual.shape and self._is_near(residual)
        if self._hit:
            self.hits += 1
        else:
            self._residual = residual

    def _is_near(self, residual: Any) -> bool:
        change = (residual - self._residual).abs().mean() / self._residual.abs().mean()
        return float(change) < self._threshold


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a block adds to: Qwen-Image has a text and an image stream, Z-Image one for both."""
    if "hidden_states" in kwargs:
        return kwargs["encoder_hidden_states"], kwargs["hidden_states"]
    return (args[0],)


def _streams(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def _like(streams: Any) -> Any:
    """Streams as a block returns them."""
    return tuple(streams) if len(streams) > 1 else streams[0]
