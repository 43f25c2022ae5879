"""One matrix product for q, k and v where a model has three.

Changes: an attention's three projections become one product over weights side by side.
Faster because: one launch and one pass over the input in place of three.
Fidelity: rounding (a product of another shape may sum in another order).
Process-wide: nothing. Weights keep their names, shapes and values; they become views of one
storage, so no second copy is kept and LoRA reaches them as before.
Declines: per group, on mixed dtypes, offloaded, cast or quantised weights, a foreign forward;
as a whole where it does not measure faster.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import nn

from .. import probe
from ..families.base import Projections
from ..patching import Patch, is_replaced, point_at, signature_drift
from ..probe import Figures
from .base import Context, Fidelity, Handle

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_MIN_GAIN: Final = 1.05  # under that a tie; fusing must be worth a changed rounding
_BUCKET: Final = 256


class FusedGroup:
    """q, k and v of one attention over one weight.

    The module that owns the projections still calls q, then k, then v on one input; the first
    call computes all three and the other two hand out their part. A call on another input falls
    through to the plain projection.
    """

    def __init__(self, projections: Projections) -> None:
        self.projections = projections
        self.modules = (projections.q, projections.k, projections.v)
        self.sizes = [int(module.weight.shape[0]) for module in self.modules]
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self._holders = 0  # open runs; one may be nested in another
        self._bound: list[torch.Tensor | None] = []
        self._input: torch.Tensor | None = None
        self._k: torch.Tensor | None = None
        self._v: torch.Tensor | None = None

    def forward_q(self, input: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            return self._plain(0, input)
        fused = F.linear(input, self.weight, self.bias)
        q, k, v = fused.split(self.sizes, dim=-1)
        self._input, self._k, self._v = input, k, v
        return q

    def forward_k(self, input: torch.Tensor) -> torch.Tensor:
        if input is self._input and self._k is not None:
            k, self._k = self._k, None
            return k
        return self._plain(1, input)

    def forward_v(self, input: torch.Tensor) -> torch.Tensor:
        if input is self._input and self._v is not None:
            v, self._v, self._input = self._v, None, None
            return v
        return self._plain(2, input)

    def _plain(self, index: int, input: torch.Tensor) -> torch.Tensor:
        module = self.modules[index]
        output: torch.Tensor = type(module).forward(module, input)
        return output

    def patches(self) -> list[Patch]:
        forwards = (self.forward_q, self.forward_k, self.forward_v)
        return [Patch(m, "forward", f) for m, f in zip(self.modules, forwards, strict=True)]

    def bind(self) -> None:
        """Make the current weights views of one storage, unless they are already."""
        weight = _side_by_side([module.weight for module in self.modules])
        biases = [module.bias for module in self.modules]
        bias = None if biases[0] is None else _side_by_side(biases)
        self.weight, self.bias = weight, bias
        self._bound = self._parameters()

    def _parameters(self) -> list[torch.Tensor | None]:
        return [p for module in self.modules for p in (module.weight, module.bias)]

    def hold(self) -> None:
        """A run uses the group, until it lets go."""
        self.bind()
        self._holders += 1

    def refresh(self) -> None:
        """Follow a host that swapped a weight for another one since the last call."""
        now = self._parameters()
        if self.weight is None or all(a is b for a, b in zip(now, self._bound, strict=True)):
            return
        if group_problem(self.projections, self.weight.device):
            self._drop()
        else:
            self.bind()

    def let_go(self) -> None:
        """Keep no tensor between runs: not the shared weight (the host may move the model away),
        nor what an exception between q and v left behind."""
        self._holders -= 1
        if self._holders <= 0:
            self._holders = 0
            self._drop()

    def _drop(self) -> None:
        self.weight = self.bias = self._input = self._k = self._v = None
        self._bound = []

    def unbind(self) -> None:
        """Give every weight its own storage again."""
        for name in ("weight", "bias"):
            parameters = [getattr(module, name) for module in self.modules]
            if parameters[0] is not None and _adjacent(parameters) is not None:
                for parameter in parameters:
                    # An unload comes outside inference mode; an inference weight must stay one.
                    with torch.inference_mode(parameter.is_inference()):
                        point_at(parameter, parameter.data.clone())


def _side_by_side(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of `parameters` as one tensor that shares storage with each of them."""
    if (shared := _adjacent(parameters)) is not None:
        return shared
    # Weights loaded outside inference mode must stay normal tensors, and the other way round.
    with torch.inference_mode(parameters[0].is_inference()):
        joined = torch.cat([parameter.detach() for parameter in parameters])
        start = 0
        for parameter in parameters:
            rows = parameter.shape[0]
            point_at(parameter, joined[start : start + rows])
            start += rows
    return joined


def _adjacent(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view over `parameters` if they follow each other in one storage, else None."""
    first = parameters[0].detach()
    storage = first.untyped_storage().data_ptr()
    expected = first.storage_offset()
    for parameter in parameters:
        if (
            parameter.untyped_storage().data_ptr() != storage
            or parameter.storage_offset() != expected
            or not parameter.is_contiguous()
        ):
            return None
        expected += parameter.numel()
    rows = sum(parameter.shape[0] for parameter in parameters)
    return torch.as_strided(first, (rows, *first.shape[1:]), first.stride(), first.storage_offset())


def group_problem(projections: Projections, device: torch.device) -> str | None:
    """Why q, k and v of one attention cannot be fused now, or None."""
    modules = (projections.q, projections.k, projections.v)
    weights = [module.weight for module in modules]
    types = {type(weight) for weight in weights} - {nn.Parameter, torch.Tensor}
    if types or any(weight.dtype not in _DTYPES for weight in weights):
        names = sorted({t.__name__ for t in types} | {str(w.dtype) for w in weights})
        return f"weights are quantised or of a special type ({', '.join(names)})"
    if len({weight.dtype for weight in weights}) > 1:
        return f"weights differ in dtype ({', '.join(str(w.dtype) for w in weights)})"
    if any(weight.ndim != 2 or weight.shape[1] != weights[0].shape[1] for weight in weights):
        return f"weights differ in width ({[tuple(w.shape) for w in weights]})"
    if any(weight.device != device for weight in weights):
        return f"weights are not all on {device}"
    if len({module.bias is None for module in modules}) > 1:
        return "only some of the three have a bias"
    return _module_problem(modules)


def _module_problem(modules: Sequence[Any]) -> str | None:
    for module in modules:
        # The host's own markers for "this weight is cast, patched or loaded at every call".
        if getattr(module, "comfy_cast_weights", False):
            return "weights are cast or loaded at every call"
        if getattr(module, "weight_function", None) or getattr(module, "bias_function", None):
            return "weights are patched at every call"
        if is_replaced(module, "forward"):
            return "another pack has replaced a projection's forward"
        if module._forward_hooks or module._forward_pre_hooks:
            return "a projection has a forward hook"
        if drift := signature_drift(type(module).forward, ()):
            return drift
    if len({type(module) for module in modules}) > 1:
        return (
            f"the three are of different classes ({', '.join(type(m).__name__ for m in modules)})"
        )
    return None


def _measured(
    context: Context, dtype: torch.dtype, rows: tuple[int, ...], columns: int, tokens: int
) -> Figures:
    """Three products and one, on random data."""
    x = torch.randn(context.batch, tokens, columns, device=context.device, dtype=dtype)
    joined = torch.randn(sum(rows), columns, device=context.device, dtype=dtype)
    parts = joined.split(rows)
    precision = "tf32" if dtype == torch.float32 and "tf32" in context.engaged else dtype
    what = ("fused_qkv", precision, f"{context.batch}x{tokens}x{columns}", rows)
    return probe.choose(
        probe.key(context.device, *what),
        context.host.state_folder,
        lambda: [F.linear(x, part) for part in parts],
        lambda: F.linear(x, joined),
        context.device,
    )


@dataclass
class _FusedHandle(Handle):
    groups: list[FusedGroup] = field(default_factory=list)

    def scope(self) -> contextlib.AbstractContextManager[object]:
        for group in self.groups:
            group.refresh()
        return contextlib.nullcontext()

    def remove(self) -> None:
        while self.groups:
            self.groups.pop().let_go()


# Groups outlive a run so that compiled blocks meet the same objects again; the values never
# refer to the denoiser itself, so it can die.
_groups: weakref.WeakKeyDictionary[nn.Module, dict[str, FusedGroup]] = weakref.WeakKeyDictionary()


_decided: weakref.WeakKeyDictionary[nn.Module, dict[bool, Figures]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class FusedQkv:
    name: ClassVar[str] = "fused_qkv"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING

    def check(self, context: Context) -> str | None:
        candidates = context.family.projections(context.denoiser)
        if not candidates:
            return "nothing to do: this model's q, k and v are one projection already"
        if context.host.dynamic_vram:
            return "dynamic VRAM may move weights at any call"
        if context.host.compiled_by:
            return f"{context.host.compiled_by} compiles this model; its projections stay"
        problems = Counter(group_problem(group, context.device) for group in candidates)
        if None not in problems:
            return f"no group can be fused: {problems.most_common(1)[0][0]}"
        for stream, figures in _decided.get(context.denoiser, {}).items():
            _decided[context.denoiser][stream] = replace(figures, spent_s=0.0)
        if not context.forced and not self._winners(context):
            return f"does not measure faster here ({self._figures(context)})"
        return None

    def install(self, context: Context) -> Handle:
        kept = _groups.setdefault(context.denoiser, {})
        candidates = context.family.projections(context.denoiser)
        streams = None if context.forced else self._winners(context)
        chosen: list[FusedGroup] = []
        try:
            for projections in candidates:
                if streams is not None and _is_text(projections) not in streams:
                    continue
                if group_problem(projections, context.device) is not None:
                    continue
                group = kept.get(projections.path)
                if group is None or group.modules != (projections.q, projections.k, projections.v):
                    group = kept[projections.path] = FusedGroup(projections)
                group.hold()
                chosen.append(group)
        except BaseException:  # out of memory for one more shared weight
            for group in chosen:
                group.let_go()
            raise
        patches = [patch for group in chosen for patch in group.patches()]
        note = f"{len(chosen)} of {len(candidates)} groups, no extra bytes"
        if not context.forced:
            note += f" ({self._figures(context)})"
        return _FusedHandle(patches=patches, note=note, groups=chosen)

    def release(self, denoiser: nn.Module) -> None:
        for group in _groups.pop(denoiser, {}).values():
            group.unbind()

    def _times(self, context: Context) -> dict[bool, Figures]:
        """What apart (plain) and fused take by stream; True is the text stream.

        Measured once per model and stream: a decision that changed with the size would cost a
        compile each time, and near a tie it would be noise that decides.
        """
        times = _decided.setdefault(context.denoiser, {})
        for projections in context.family.projections(context.denoiser):
            is_text = _is_text(projections)
            if is_text in times or group_problem(projections, context.device) is not None:
                continue
            tokens = context.text_tokens if is_text else context.image_tokens
            tokens = max(_BUCKET, round(tokens / _BUCKET) * _BUCKET)
            weights = [m.weight for m in (projections.q, projections.k, projections.v)]
            rows = tuple(int(weight.shape[0]) for weight in weights)
            columns = int(weights[0].shape[1])
            times[is_text] = _measured(context, weights[0].dtype, rows, columns, tokens)
        return times

    def _winners(self, context: Context) -> set[bool]:
        return {
            is_text
            for is_text, found in self._times(context).items()
            if found.plain_ms >= found.other_ms * _MIN_GAIN
        }

    def _figures(self, context: Context) -> str:
        times = self._times(context)
        parts = [
            f"{'text' if is_text else 'image'} stream {found.plain_ms:.3f} ms apart, "
            f"{found.other_ms:.3f} ms fused"
            for is_text, found in times.items()
        ]
        spent_s = sum(found.spent_s for found in times.values())
        return "; ".join([*parts, Figures(spent_s=spent_s).source()])


def _is_text(projections: Projections) -> bool:
    return projections.path.endswith(".add")
