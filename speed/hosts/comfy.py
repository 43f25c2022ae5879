"""A tier on a ComfyUI ModelPatcher clone.

Everything hangs on the clone's wrappers and callbacks, under one key:

    OUTER_SAMPLE   opens and closes the run; the only hook that is left after every exception,
                   interrupt and out-of-memory
    SAMPLER_SAMPLE lets the sampler begin again after values that are not finite
    ON_PRE_RUN     the weights are in place
    APPLY_MODEL    engages, calls, disengages; the denoiser is looked up on the module that is
                   called, because some hosts run a clone on another module
    ON_DETACH      with unpatch_all: the model was unloaded (the other kind fires at every rerun)

Works on ComfyUI 0.3.75 and 0.33; what differs between them is read from the object, not from a
version number.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import warm_up
from ..apply import Call, Publish, Run, TieredModel, TierRequest
from ..errors import NotFiniteError
from ..optimizations.base import HostFacts
from ..patching import Patch, PatchSet, is_replaced
from ..report import Report
from ..tiers import Tier
from ..warm_up import Invoke, Size

log = logging.getLogger("speed_tier.comfy")

KEY: Final = "speed_tier"
_HOST_COMPILE_KEY: Final = "torch.compile"  # the host's own compile wrapper, KJNodes' as well
_AFTER_X_AND_T: Final = ("c_concat", "c_crossattn", "control", "transformer_options")
_OPTIONS_INDEX: Final = _AFTER_X_AND_T.index("transformer_options")

# Prepares a report for one run (ids of prompt, nodes and workflow) and says where events go.
Opener = Callable[[Report], Publish]


def tier_clone(patcher: Any, request: TierRequest, opener: Opener) -> Any:
    """A clone of `patcher` that runs in the requested tier; earlier tiers on it are replaced.

    Args:
        patcher: A comfy.model_patcher.ModelPatcher, tiered or not.
        opener: Called at the start of every sampling run.
    """
    note = ""
    if request.resolved.tier is Tier.MAX and _is_dynamic(patcher):
        clone, note = _static_clone(patcher)
    else:
        clone = patcher.clone()
    remove_tier(clone)
    sizes = () if request.is_off else request.warm_up
    session = _Session(TieredModel(request), opener, note, sizes)
    _attach(clone, session)
    return clone


def remove_tier(patcher: Any) -> None:
    """Take an earlier tier off a clone that is ours to change."""
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    for kind in (WrappersMP.OUTER_SAMPLE, WrappersMP.SAMPLER_SAMPLE, WrappersMP.APPLY_MODEL):
        patcher.remove_wrappers_with_key(kind, KEY)
    for kind in (CallbacksMP.ON_PRE_RUN, CallbacksMP.ON_DETACH):
        patcher.remove_callbacks_with_key(kind, KEY)


def _attach(patcher: Any, session: _Session) -> None:
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, session.outer_sample)
    patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, session.sampler_sample)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, session.apply_model)
    patcher.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, session.on_pre_run)
    patcher.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, session.on_detach)


class _Session:
    """The wrappers of one tiered clone. Shared by its own clones; refers to no patcher."""

    def __init__(
        self, tiered: TieredModel, opener: Opener, note: str, sizes: Sequence[Size] = ()
    ) -> None:
        self._tiered = tiered
        self._opener = opener
        self._note = note
        self._sizes = sizes
        self._runs: list[Run] = []  # a stack: a run may be nested in another of the same clone
        self._lock = threading.Lock()

    def outer_sample(
        self,
        executor: Any,
        noise: torch.Tensor,
        latent_image: torch.Tensor,
        sampler: Any,
        sigmas: torch.Tensor,
        denoise_mask: torch.Tensor | None = None,
        callback: Callable[..., Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        patcher = executor.class_obj.model_patcher
        report = self._tiered.new_report()
        report.latent_shape = list(noise.shape)
        report.sampler = _sampler_name(sampler)
        if self._note:
            report.notes.append(self._note)
        publish = self._opener(report)
        publish("phase", {"phase": "loading", "steps": max(0, len(sigmas) - 1)})
        run = self._tiered.begin(report, patcher.load_device, publish)
        with under_way(run, self._runs):
            return executor(
                noise,
                latent_image,
                sampler,
                sigmas,
                denoise_mask,
                _step_callback(run, callback),
                *args,
                **kwargs,
            )

    def sampler_sample(
        self,
        executor: Any,
        guider: Any,
        sigmas: torch.Tensor,
        extra_args: dict[str, Any],
        callback: Any,
        noise: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        run = self._runs[-1] if self._runs else None
        if run is None:
            return executor(guider, sigmas, extra_args, callback, noise, *args, **kwargs)
        if _follows_a_schedule(guider):
            # A LoRA's schedule is rewound by the host before this place only.
            return executor(guider, sigmas, extra_args, callback, noise, *args, **kwargs)
        first_noise, random_state = noise.clone(), _random_state()
        run.can_begin_again = True
        try:
            samples = executor(guider, sigmas, extra_args, callback, noise, *args, **kwargs)
            if not run.ended_broken():
                return samples
        except NotFiniteError:
            pass
        finally:
            run.can_begin_again = False
        run.start_again()
        _set_random_state(random_state)
        return executor(guider, sigmas, extra_args, callback, first_noise, *args, **kwargs)

    def apply_model(
        self, executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        run = self._runs[-1] if self._runs else None
        options = kwargs.get("transformer_options")
        if options is None and len(args) > _OPTIONS_INDEX:
            options = args[_OPTIONS_INDEX]
        if run is None or not isinstance(options, dict):
            return executor(x, t, *args, **kwargs)
        context = kwargs.get("c_crossattn", args[1] if len(args) > 1 else None)

        def at(x: torch.Tensor) -> tuple[Call, Invoke]:
            call = _describe_call(executor.class_obj, x, context, options, kwargs)
            return call, lambda extra: _with_options(options, extra, executor, x, t, args, kwargs)

        call, invoke = at(x)
        output = run.call(call, invoke)
        if self._sizes:
            hindrance = functools.partial(_bound_to_its_size, args, kwargs, options)
            warm_up.prepare(self._sizes, run, call, x, hindrance, at)
        return output

    def on_pre_run(self, *_: Any, **__: Any) -> None:
        if self._runs:
            self._runs[-1].mark_loaded()

    def on_detach(self, patcher: Any, unpatch_all: bool = True, *_: Any, **__: Any) -> None:
        if unpatch_all:
            self._tiered.release(getattr(patcher.model, "diffusion_model", None))


def _with_options(
    options: dict[str, Any],
    extra: Mapping[str, Any],
    executor: Any,
    x: torch.Tensor,
    t: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """The host's call, with entries of ours in its options for as long as it lasts."""
    added = [name for name in extra if name not in options]
    try:
        for name in added:
            options[name] = extra[name]
        return executor(x, t, *args, **kwargs)
    finally:
        for name in added:
            options.pop(name, None)


def _bound_to_its_size(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> str:
    """Why no call of another size can be made out of this one, or ""."""
    given = {**dict(zip(_AFTER_X_AND_T, args, strict=False)), **kwargs}
    if given.get("control") is not None:
        return "a ControlNet is applied"
    for name, value in given.items():
        leaves = [] if name in _NOT_IN_SIGNATURE else pytree.tree_leaves(value)
        # Prompts have three dimensions, what is pooled of them two.
        if any(isinstance(leaf, torch.Tensor) and leaf.ndim >= 4 for leaf in leaves):
            return f"the call carries {name}, a picture of a size of its own"
    if options.get("patches"):
        return "another node's patches take part in every call"
    return ""


@contextlib.contextmanager
def under_way(run: Run, runs: list[Any]) -> Iterator[None]:
    """`run` is one of `runs`, and closed with the way it ended."""
    runs.append(run)
    outcome, error = "failed", ""
    try:
        yield
        outcome = "done"
    except BaseException as raised:
        # One host's interrupt is a BaseException, the other's is not.
        if type(raised).__name__ == "InterruptProcessingException":
            outcome = "interrupted"
        else:
            error = f"{type(raised).__name__}: {raised}"
        raise
    finally:
        runs.remove(run)
        run.close(outcome, error)


def _sampler_name(sampler: Any) -> str:
    """The sampler function's name, "sample_euler", or the class of a sampler without one."""
    function = getattr(sampler, "sampler_function", None)
    return str(getattr(function, "__name__", type(sampler).__name__))


def _step_callback(run: Run, callback: Callable[..., Any] | None) -> Callable[..., Any]:
    def on_step(step: int, denoised: Any, x: Any, total: int, *args: Any, **kwargs: Any) -> Any:
        run.mark_step(step + 1, total)
        if callback is not None:
            return callback(step, denoised, x, total, *args, **kwargs)
        return None

    return on_step


def _follows_a_schedule(guider: Any) -> bool:
    conditions = getattr(guider, "conds", None) or {}
    return any(cond.get("hooks") is not None for group in conditions.values() for cond in group)


def _random_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


def _set_random_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


def _describe_call(
    model: Any, x: torch.Tensor, context: Any, options: dict[str, Any], others: Mapping[str, Any]
) -> Call:
    denoiser = model.diffusion_model
    manual_cast = getattr(model, "manual_cast_dtype", None)
    dtype = manual_cast if manual_cast is not None else getattr(denoiser, "dtype", x.dtype)
    shape = tuple(x.shape) if x.ndim >= 4 else (x.shape[0], 1, 1, x[0].numel())
    tokens = int(context.shape[1]) if isinstance(context, torch.Tensor) and context.ndim > 2 else 0
    facts = _host_facts(model, x, denoiser, options)
    given = tuple(
        (name, tuple(value.shape) if isinstance(value, torch.Tensor) else None)
        for name, value in others.items()
        if value is not None and name not in _NOT_IN_SIGNATURE
    )
    weights = getattr(getattr(model, "current_patcher", None), "patches_uuid", None)
    return Call(denoiser, x.device, dtype, shape, tokens, facts, given, weights)


# The prompt's length is stated by itself, and the options hold what changes at every step.
_NOT_IN_SIGNATURE: Final = frozenset({"c_crossattn", "attention_mask", "transformer_options"})


def after_out_of_memory(denoiser: nn.Module) -> None:
    """Forget what dynamic VRAM had under way for a layer; the host itself ends the run there."""
    pending = [module for module in denoiser.modules() if hasattr(module, "_prefetch")]
    if pending:
        from comfy.model_prefetch import cleanup_prefetched_modules

        cleanup_prefetched_modules(denoiser, pending)


def _participant(denoiser: nn.Module, options: dict[str, Any]) -> str:
    """Who, beside the model, computes inside a call and may count how often; or ""."""
    if is_replaced(denoiser, "forward") or is_replaced(denoiser, "_forward"):
        return "another node has replaced the model's forward"
    if "multigpu_thread_pool" in options:
        return "the model runs on several devices at once"
    wrappers = options.get("wrappers", {})
    inside = [key for key, held in wrappers.get("diffusion_model", {}).items() if held]
    inside += [k for k, held in wrappers.get("apply_model", {}).items() if held and k != KEY]
    inside = [str(key) for key in inside if key != _HOST_COMPILE_KEY]
    if inside:
        return f"a wrapper of another node takes part in every call ({inside[0]})"
    if options.get("patches_replace"):
        return "another node replaces parts of the model"
    return ""


def _host_facts(
    model: Any, x: torch.Tensor, denoiser: nn.Module, options: dict[str, Any]
) -> HostFacts:
    import comfy.ldm.modules.attention as attention
    import comfy.model_management
    import comfy.ops

    in_use = ""
    if "optimized_attention_override" in options:
        in_use = "another node has replaced the attention function; it stays"
    elif (chosen := attention.optimized_attention.__name__) != "attention_pytorch":
        in_use = f"the host runs {chosen}; it stays"
    return HostFacts(
        compiled_by=_compiled_by(denoiser, options),
        dynamic_vram=_is_dynamic(getattr(model, "current_patcher", None)),
        attention_in_use=in_use,
        attention=getattr(comfy.ops, "scaled_dot_product_attention", None),
        version=f"ComfyUI {_host_version()}",
        check_interrupt=comfy.model_management.throw_exception_if_processing_interrupted,
        spare_bytes=lambda: _spare_bytes(model, x),
        hold_interrupts=_hold_interrupts,
        norm_weight=_norm_weight,
        state_folder=state_folder(),
        participant=_participant(denoiser, options),
        after_out_of_memory=after_out_of_memory,
    )


@functools.cache
def _host_version() -> str:
    try:
        import comfyui_version
    except ImportError:  # forks may do without
        return "of unknown version"
    return str(comfyui_version.__version__)


def state_folder() -> Path:
    """Where the pack may keep files between processes."""
    import folder_paths

    # Marked as the system's, so that the host serves it to nobody.
    return Path(folder_paths.get_user_directory()) / "__speed_tier"


@contextlib.contextmanager
def _norm_weight(norm: Any, like: torch.Tensor) -> Iterator[torch.Tensor]:
    """A norm's weight as the host's own forward would read it: cast, patched, loaded for now."""
    import comfy.ops

    weight, bias, stream = comfy.ops.cast_bias_weight(norm, like, offloadable=True)
    try:
        yield weight
    finally:
        comfy.ops.uncast_bias_weight(norm, weight, bias, stream)


def _hold_interrupts() -> PatchSet:
    """While entered, nobody is told in this thread that the user cancelled."""
    import comfy.model_management as management

    # Not `comfy.ops.run_every_op`, which calls it: compiled blocks guard on that one.
    ask = management.throw_exception_if_processing_interrupted
    held_in = threading.get_ident()

    def ask_later() -> None:
        if threading.get_ident() != held_in:
            ask()

    return PatchSet([Patch(management, "throw_exception_if_processing_interrupted", ask_later)])


def _spare_bytes(model: Any, x: torch.Tensor) -> int:
    """Device memory left over by one forward on `x`, as the host estimates it."""
    import comfy.model_management as management

    free = management.get_free_memory(x.device)
    needed = max(model.memory_required(list(x.shape)), management.minimum_inference_memory())
    return int(free - needed)


def _compiled_by(denoiser: nn.Module, options: dict[str, Any]) -> str:
    if _HOST_COMPILE_KEY in options.get("wrappers", {}).get("apply_model", {}):
        return "a torch.compile node"
    if hasattr(denoiser, "_orig_mod"):
        return "a torch.compile node"
    return ""


def _is_dynamic(patcher: Any) -> bool:
    """Whether a patcher leaves its weights to the host's dynamic VRAM."""
    return bool(getattr(patcher, "is_dynamic", lambda: False)())


# Static twins of dynamic models, by the dynamic nn.Module, so that a node that runs again (a
# changed LoRA before it) does not read the file again. Weak on both sides: keeps nothing alive.
_static_twins: Final[weakref.WeakKeyDictionary[Any, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def _static_clone(patcher: Any) -> tuple[Any, str]:
    """A clone whose weights stay put, or a plain clone, with the sentence for the report."""
    if getattr(patcher, "cached_patcher_init", None) is None:
        return patcher.clone(), (
            "max runs as default does: the host manages this model's memory dynamically and its "
            "loader left no way to load it again. Use the host's own loader, or start the host "
            "with --disable-dynamic-vram"
        )
    if problem := _does_not_fit(patcher):
        return patcher.clone(), f"max runs as default does: {problem}"
    twin = _static_twins.get(patcher.model)
    source = twin() if twin is not None else None
    if source is not None:
        return patcher.clone(
            disable_dynamic=True, model_override=source.get_clone_model_override()
        ), "max runs on a static copy of this model, loaded earlier in this process"
    started = time.perf_counter()
    clone = patcher.clone(disable_dynamic=True)
    _static_twins[patcher.model] = weakref.ref(clone)
    seconds = time.perf_counter() - started
    gib = patcher.model_size() / 2**30
    return clone, f"max loaded a static copy of this model: {gib:.1f} GiB in {seconds:.1f} s"


def _does_not_fit(patcher: Any) -> str:
    import comfy.model_management as management

    size = patcher.model_size()
    total = management.get_total_memory(patcher.load_device)
    # Room for the activations of one forward; the host's own reserve is of that order.
    needed = size + management.minimum_inference_memory()
    if needed > total:
        return (
            f"a static copy needs {needed / 2**30:.1f} GiB on {patcher.load_device}; "
            f"it has {total / 2**30:.1f}"
        )
    free = management.get_free_memory(patcher.offload_device)
    if size > free:
        return (
            f"a static copy needs {size / 2**30:.1f} GiB of {patcher.offload_device} memory; "
            f"{free / 2**30:.1f} are free"
        )
    return ""
