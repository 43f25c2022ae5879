"""Convolutions of a VAE in the channels-last memory format, where that measures faster.

Changes: strides of activations and of copies of the convolution weights, 4-D as channels_last and
    5-D as channels_last_3d.
Faster because: tensor cores read channels-last; cudnn converts what comes in another format.
Fidelity: rounding (another algorithm sums in another order).
Process-wide: nothing; the weights stay as they are, the copies go with the run.
Declines: where it does not measure faster, without memory for the copies.

It is not faster everywhere: GroupNorm has no channels-last kernel on CUDA and converts back at
every norm. The report says how many convolutions got their input in the plain format. `python -m
bench.vae` times both on a card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from ..patching import Patch, PatchSet, beneath, is_replaced
from . import measured
from .base import Context, Fidelity, Handle


def format_for(ndim: int) -> torch.memory_format | None:
    """The channels-last format of a tensor of so many dimensions, None where there is none."""
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(ndim)


def in_format(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """`tensor` in a channels-last format, with the strides that torch knows it by.

    Where a dimension has length 1 several strides mean the same format, and torch takes some of
    them for the plain one (a 1x1 weight, the batch of one that a reshape leaves): the convolution
    would go back to that.
    """
    tensor = tensor.contiguous(memory_format=memory_format)
    strides, step = [0] * tensor.ndim, 1
    for axis in (1, *range(tensor.ndim - 1, 1, -1), 0):
        strides[axis] = step
        step *= tensor.shape[axis]
    return tensor.as_strided(tensor.shape, strides)


class _Inputs:
    """How the convolutions of one run got their inputs."""

    def __init__(self) -> None:
        self.calls = 0
        self.plain = 0

    def text(self) -> str:
        if self.plain == 0:
            return f"all {self.calls} inputs of convolutions came channels-last"
        return (
            f"{self.plain} of {self.calls} inputs of convolutions came in the plain format and "
            "were converted"
        )


class ConvCall:
    """Stands in for one convolution's `_conv_forward`: the weight is a channels-last copy.

    A weight that the host casts, patches or loads at the call (dynamic VRAM does it to all of them)
    has no copy; the convolution then converts it as well. The module's own `forward` stays in
    charge: the host's interrupt, casts and patched weights, and its way round cudnn's fault with
    3-D convolutions, are in there or beneath.
    """

    def __init__(self, conv: nn.Module, inputs: _Inputs) -> None:
        weight: Any = conv.weight
        memory_format = format_for(weight.ndim)
        assert memory_format is not None
        self._conv: Any = conv
        self._format = memory_format
        self._copy: torch.Tensor | None = None
        self._copied_from: tuple[object, ...] = ()
        if has_own_weight(conv):
            self._copy = in_format(weight.detach(), memory_format)
            self._copied_from = _identity(weight)
        self._inputs = inputs

    def __call__(self, input: torch.Tensor, weight: Any, bias: Any, *a: Any, **kw: Any) -> Any:
        self._inputs.calls += 1
        if input.is_contiguous(memory_format=self._format):
            input = in_format(input, self._format)
        else:
            self._inputs.plain += 1
        if self._copy is not None and _identity(weight) == self._copied_from:
            weight = self._copy
        below = beneath(self._conv, "_conv_forward", self)
        if below is None:
            return type(self._conv)._conv_forward(self._conv, input, weight, bias, *a, **kw)
        return below(input, weight, bias, *a, **kw)


def _identity(weight: torch.Tensor) -> tuple[object, ...]:
    return (weight.data_ptr(), weight.shape, weight.dtype, weight.device)


class FormatKept:
    """Stands in for the forward of a module that pads or resizes: it keeps a format torch knows."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        memory_format = format_for(x.ndim)
        if memory_format is not None and x.is_contiguous(memory_format=memory_format):
            x = in_format(x, memory_format)
        below = beneath(self._module, "forward", self)
        if below is None:
            return type(self._module).forward(self._module, x, *args, **kwargs)
        return below(x, *args, **kwargs)


class _PartCall:
    """Stands in for the forward of the encoder or decoder: converts what goes in and comes out."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        memory_format = format_for(x.ndim)
        if memory_format is not None:
            x = in_format(x, memory_format)
        below = beneath(self._part, "forward", self)
        if below is None:
            return _plain(type(self._part).forward(self._part, x, *args, **kwargs))
        return _plain(below(x, *args, **kwargs))


def _plain(output: Any) -> Any:
    """The strides that the part gives without us."""
    if isinstance(output, torch.Tensor):
        return output.contiguous()
    if isinstance(output, list):  # one host's Wan decoder: a list of chunks
        return [_plain(part) for part in output]
    return output


def _convolutions(part: nn.Module) -> list[nn.Module]:
    kinds = (nn.Conv2d, nn.Conv3d)
    return [module for module in part.modules() if isinstance(module, kinds)]


def has_own_weight(module: nn.Module) -> bool:
    """Whether a module computes with its weight as it is: not cast, patched or loaded anew."""
    patched = getattr(module, "weight_function", None) or getattr(module, "bias_function", None)
    return not patched and not getattr(module, "comfy_cast_weights", False)


@dataclass
class _LayoutHandle(Handle):
    inputs: _Inputs = field(default_factory=_Inputs)
    told: str = ""

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self.inputs.calls:
                self.note = "; ".join(part for part in (self.inputs.text(), self.told) if part)

    def remove(self) -> None:
        self.patches = ()  # and with them the copies


@dataclass(frozen=True)
class ChannelsLast:
    name: ClassVar[str] = "channels_last"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING

    def check(self, context: Context) -> str | None:
        if context.host.compiled_by:
            return f"{context.host.compiled_by} compiles this VAE already"
        part = measured.part_in_use(context)
        if not _convolutions(part):
            return "nothing to do: no convolutions"
        if is_replaced(part, "forward"):
            return "another pack has replaced the forward of this part"
        own: list[Any] = [conv for conv in _convolutions(part) if has_own_weight(conv)]
        needed = sum(conv.weight.numel() * conv.weight.element_size() for conv in own)
        if context.host.spare_bytes is not None:
            spare = context.host.spare_bytes()
            if needed > spare:
                return (
                    f"the copies of the weights need {needed / 2**20:.0f} MiB; "
                    f"{max(0, spare) / 2**20:.0f} are free beside this call"
                )
        return measured.why_not(context, self.name)

    def install(self, context: Context) -> Handle:
        part = measured.part_in_use(context)
        inputs = _Inputs()
        patches = [Patch(part, "forward", _PartCall(part))]
        for conv in _convolutions(part):
            patches.append(Patch(conv, "_conv_forward", ConvCall(conv, inputs)))
        for module in part.modules():
            if isinstance(module, (nn.Upsample, nn.ZeroPad2d, nn.Conv3d)):  # one host's pads itself
                patches.append(Patch(module, "forward", FormatKept(module)))
        handle = _LayoutHandle(patches=patches, inputs=inputs)
        measured.settle(handle, context, self.name, lambda: PatchSet(handle.patches))
        handle.told = handle.note
        inputs.calls = inputs.plain = 0
        return handle

    def release(self, denoiser: nn.Module) -> None:
        """Nothing is kept between runs."""
