"""A tier on a copy of ComfyUI's VAE object.

The copy has a class of its own, derived from the VAE's: `decode`, `encode` and their tiled kinds
open a run around the host's own method. The host loads, estimates memory, cuts batches and tiles
as ever; only its calls of `first_stage_model` go through the run, and only while the method runs.
The VAE that came in keeps its class, its attributes and its module as they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from ..apply import Call, Publish, TierRequest
from ..families.vae import DOWNSCALE, part_of
from ..optimizations.base import HostFacts, Trial
from ..patching import Patch, PatchSet
from ..vae_run import DECODE, ENCODE, TieredVae, VaeRun
from .comfy import Opener, after_out_of_memory, state_folder, under_way

_SESSION: Final = "_speed_tier_session"
# The host's methods, what they do, and the method of the module that they call.
_METHODS: Final = {
    "decode": (DECODE, "decode"),
    "decode_tiled": (DECODE, "decode"),
    "encode": (ENCODE, "encode"),
    "encode_tiled": (ENCODE, "encode"),
}
# Crops of a trial: of latents, and of pixels that make whole latents.
_STEP: Final = {DECODE: 8, ENCODE: 8 * DOWNSCALE}
_PHASE: Final = {DECODE: "decoding", ENCODE: "encoding"}


def tier_vae(vae: Any, request: TierRequest, opener: Opener) -> Any:
    """A copy of `vae` that runs in the requested tier; an earlier tier on it is replaced.

    Args:
        vae: A comfy.sd.VAE, tiered or not.
        opener: Called at the start of every run.
    """
    base, attributes = type(vae), dict(vars(vae))
    if (earlier := attributes.pop(_SESSION, None)) is not None:
        base = base.__mro__[1]
        attributes.update(earlier.replaced)
    # Another pack's method on the instance would hide ours; it is called from ours instead.
    replaced = {name: attributes.pop(name) for name in _METHODS if name in attributes}
    session = VaeSession(TieredVae(request), opener, replaced)
    tiered: Any = object.__new__(_tiered_class(base))
    vars(tiered).update(attributes, **{_SESSION: session})
    return tiered


_classes: Final[dict[type, type]] = {}


def _tiered_class(base: type) -> type:
    """The class of tiered copies of a VAE of class `base`."""

    def method(name: str) -> Callable[..., Any]:
        original = getattr(base, name)

        @functools.wraps(original)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            session = vars(self)[_SESSION]
            inner = session.replaced.get(name) or functools.partial(original, self)
            return session.run(self, name, inner, args, kwargs)

        return run

    if base not in _classes:
        methods = {name: method(name) for name in _METHODS if hasattr(base, name)}
        _classes[base] = type(base.__name__, (base,), methods)
    return _classes[base]


class VaeSession:
    """The runs of one tiered copy. Shared by copies of the copy; refers to no VAE.

    Attributes:
        replaced: Methods that another pack had put on the instance.
    """

    def __init__(self, tiered: TieredVae, opener: Opener, replaced: dict[str, Any]) -> None:
        self.replaced = replaced
        self._tiered = tiered
        self._opener = opener
        self._running: list[VaeRun] = []

    def run(
        self,
        vae: Any,
        name: str,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the host's method `name` in a run of its own."""
        module = vae.first_stage_model
        if self._running or not isinstance(module, nn.Module):
            return inner(*args, **kwargs)  # from inside another of these, or nothing to run
        operation, method = _METHODS[name]
        report = self._tiered.new_report()
        report.operation = operation
        report.latent_shape = _latent_shape(vae, operation, args, kwargs)
        publish = _in_words_of(operation, self._opener(report))
        publish("phase", {"phase": "loading"})
        run = self._tiered.begin(report, vae.device, publish)
        call = _ModuleCall(vae, operation, getattr(module, method), run, "tiled" in name)
        with under_way(run, self._running), PatchSet([Patch(module, method, call)]):
            return inner(*args, **kwargs)


class _ModuleCall:
    """Stands in for `first_stage_model.decode` or `.encode` while one method of the host runs."""

    def __init__(
        self, vae: Any, operation: str, original: Callable[..., Any], run: VaeRun, tiled: bool
    ) -> None:
        self._vae = vae
        self._operation = operation
        self._original = original
        self._run = run
        self._tiled = tiled
        self._loaded = False

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.ndim < 4:
            return self._original(x, *args, **kwargs)
        if not self._loaded:
            self._loaded = True
            self._run.mark_loaded()
        module = self._vae.first_stage_model

        def trial(height: int, width: int) -> object:
            crop = x[..., :height, :width].contiguous()
            with self._run.as_engaged(module):
                return self._original(crop, *args, **kwargs)

        shape = list(x.shape)
        if self._operation == ENCODE:
            shape[-2:] = [shape[-2] // DOWNSCALE, shape[-1] // DOWNSCALE]
        tried = Trial(
            what=self._operation,
            size=(x.shape[-2], x.shape[-1]),
            step=_STEP[self._operation],
            pixels=DOWNSCALE if self._operation == DECODE else 1,
            run=trial,
            varies=self._tiled,
        )
        facts = _host_facts(self._vae, self._operation, x, tried)
        call = Call(module, x.device, x.dtype, tuple(shape), 0, facts)
        return self._run.call(call, lambda options: self._original(x, *args, **kwargs))


def _latent_shape(
    vae: Any, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[int]:
    """The latent that goes in or comes out, as far as the arguments say it."""
    given = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(given, torch.Tensor) or given.ndim < 4:
        return []
    if operation == DECODE:
        return list(given.shape)
    height, width = (given.shape[axis] // DOWNSCALE for axis in (-3, -2))
    return [given.shape[0], vae.latent_channels, height, width]


def _in_words_of(operation: str, publish: Publish) -> Publish:
    """Events of a VAE's run: there are no steps to follow."""

    def tell(kind: str, data: Any) -> None:
        if kind == "step":
            return
        if kind == "engaged":
            facts = data() if callable(data) else data
            data = {**facts, "phase": _PHASE[operation]}
        publish(kind, data)

    return tell


def _host_facts(vae: Any, operation: str, x: torch.Tensor, trial: Trial) -> HostFacts:
    import comfy.model_management as management

    estimate = vae.memory_used_decode if operation == DECODE else vae.memory_used_encode
    shape, dtype, device = x.shape, x.dtype, x.device
    return HostFacts(
        compiled_by=_compiled_by(vae.first_stage_model, operation),
        dynamic_vram=bool(getattr(vae.patcher, "is_dynamic", lambda: False)()),
        check_interrupt=management.throw_exception_if_processing_interrupted,
        spare_bytes=lambda: int(management.get_free_memory(device) - estimate(shape, dtype)),
        norm_parameters=_norm_parameters,
        state_folder=state_folder(),
        trial=trial,
        after_out_of_memory=after_out_of_memory,
    )


@contextlib.contextmanager
def _norm_parameters(norm: Any, like: torch.Tensor) -> Iterator[tuple[Any, Any]]:
    """A norm's weight and bias as the host's own forward would read them: cast, patched, loaded."""
    import comfy.ops

    weight, bias, stream = comfy.ops.cast_bias_weight(norm, like, offloadable=True)
    try:
        yield weight, bias
    finally:
        comfy.ops.uncast_bias_weight(norm, weight, bias, stream)


def _compiled_by(module: nn.Module, operation: str) -> str:
    if hasattr(module, "_orig_mod") or hasattr(part_of(module, operation), "_orig_mod"):
        return "a torch.compile node"
    return ""
