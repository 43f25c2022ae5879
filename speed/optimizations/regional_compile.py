"""torch.compile of the repeated blocks, one artefact shared by all blocks of a kind.

Changes: the code that computes a block; Inductor fuses its pointwise chains.
Faster because: norms, modulation, gates, RoPE and SwiGLU stop being one kernel each.
Fidelity: rounding (fused code keeps more precision between operations).
Process-wide: Dynamo and Inductor settings, only inside each denoiser call.
Declines: without a working toolchain, where another node compiles the model, with dynamic VRAM.

A *kind* of block is one class with one set of parameter shapes and dtypes, in one list of blocks
(the lists see different sizes in one forward). Every kind has code objects of its own, so that
Dynamo's recompile limit and cache count per kind and go when the model goes. Blocks are called
through their instance's `forward`, so names, parameters and the block's own hooks stay as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
from torch import nn

from .. import compile_cache, probe
from ..compile_cache import CompileCache
from ..env import inductor_problem
from ..families.base import RepeatedBlock
from ..gguf.foreign import stated_type
from ..patching import GradOff, Patch, beneath, is_replaced
from ..report import CompiledKind, CompileFacts
from . import dynamo
from .base import Context, Fidelity, Handle
from .call_mode import MODE
from .compile_config import CompileConfig

log = logging.getLogger("speed_tier.regional_compile")


# Compiled blocks have to be this much faster than fused ones to be worth their compile.
_MIN_GAIN: Final = 1.03
_TOKENS_APART: Final = 256  # sizes nearer than that are one size to a measurement


def kind_signature(block: nn.Module) -> tuple[object, ...]:
    """What makes two blocks the same kind: class, and name, shape and type of every parameter.

    The type is the quantisation for a packed weight: Q4_K and Q4_0 take the same bytes.
    """
    parameters = tuple(
        (
            name,
            tuple(parameter.shape),
            parameter.dtype,
            type(parameter).__name__,
            stated_type(parameter),
        )
        for name, parameter in block.named_parameters()
    )
    quantised = tuple(getattr(module, "quant_signature", None) for module in block.modules())
    return (type(block), parameters, quantised)


class Kind:
    """One kind of block and its compiled code."""

    def __init__(self, name: str, forward: Callable[..., Any], config: CompileConfig) -> None:
        self.name = name
        self.blocks = 0
        self.compiles_ever = 0
        self.broken = ""  # this kind cannot be compiled in this process: the reason
        self._forward = forward
        self._config = config
        self._first_size: tuple[torch.Size, ...] | None = None
        self._first_size_code: Callable[..., Any] | None = None
        self._code: Callable[..., Any] | None = None

    def code_for(self, values: Iterable[Any]) -> Callable[..., Any]:
        """The compiled function for one call, by the sizes of its tensor arguments."""
        if self._config.dynamic is None:
            size = tuple(_shapes(values))
            if self._first_size is None:
                self._first_size = size
                self._first_size_code = self._compile(f"{self.name} first size", dynamic=False)
            if self._first_size_code is not None and size == self._first_size:
                return self._first_size_code
        if self._code is None:
            dynamic = self._config.dynamic
            code = self._compile(self.name, dynamic=True if dynamic is None else dynamic)
            self._code = _first_with_constant_floats(code)
        return self._code

    def _compile(self, name: str, dynamic: bool) -> Callable[..., Any]:
        config = self._config
        return torch.compile(
            _entry_point(name, self._forward),
            backend=config.backend,
            dynamic=dynamic,
            mode=config.mode,
            options=config.options(),
        )


def _first_with_constant_floats(code: Callable[..., Any]) -> Callable[..., Any]:
    """`code`, whose first compile takes numbers for constants.

    It would take the norms' eps for a symbol, and torch starts such a compile again when it meets a
    kernel that wants the number. A number that does change (of another pack's patch) becomes a
    symbol in the next compile, as ever.
    """
    first = True

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if not first:
            return code(*args, **kwargs)
        first = False
        with dynamo.constant_floats():
            return code(*args, **kwargs)

    return call


def _shapes(values: Iterable[Any]) -> Iterator[torch.Size]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.shape
        elif type(value) is tuple:
            yield from _shapes(value)


def _entry_point(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function `(block, *args, **kwargs)` with a code object of its own, named after the kind."""

    def run_block(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(block, *args, **kwargs)

    code = run_block.__code__.replace(co_name="speed_tier_" + re.sub(r"\W", "_", name))
    function = types.FunctionType(
        code, run_block.__globals__, code.co_name, None, run_block.__closure__
    )
    function.__kwdefaults__ = run_block.__kwdefaults__
    return function


class BlockCall:
    """Stands in for one block's forward while a tiered call runs."""

    def __init__(self, block: nn.Module, kind: Kind) -> None:
        self.block = block
        self.kind = kind
        self.runs: list[RunState] = []  # open runs; one may be nested in another
        # The dicts themselves: hooks added later show up in them.
        children = [child for child in block.modules() if child is not block]
        self._hooks = [c._forward_hooks for c in children] + [
            c._forward_pre_hooks for c in children
        ]
        self._patchable: list[Any] = [c for c in children if hasattr(c, "weight_function")]

    def why_eager(self) -> str:
        """Why compiled code would be wrong or not shared for this block at this call, or ""."""
        if any(self._hooks) or dynamo.has_global_hooks():
            return "a part has a forward hook"  # which compiled code does not see
        if is_replaced(self.block, "forward"):
            return "another pack has replaced its forward"  # since the run began
        # The host's way of applying LoRA to a weight that is not loaded. It looks itself up by
        # the weight's name, so that every block would get a graph of its own (20 of 20, 2.14.1).
        if any(hasattr(f, "key") for child in self._patchable for f in child.weight_function or ()):
            return "LoRA is applied to offloaded weights at every call"
        return ""

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = beneath(self.block, "forward", self)
        if forward is None or isinstance(forward, BlockCall):  # the same run's, or an outer one's
            return type(self.block).forward(self.block, *args, **kwargs)
        return forward(*args, **kwargs)

    def prepared(self, value: Any) -> Any:
        """An argument as the compiled code gets it."""
        return _own_storage(value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.runs[-1] if self.runs else None
        if run is None or MODE.eager_blocks or not run.may_compile(self):
            return self.eager(args, kwargs)
        run.check_interrupt()
        before = dynamo.compiled()
        started = time.perf_counter()
        run.announce(self.kind)
        try:
            try:
                output = self._compiled(args, kwargs)
            except dynamo.compile_failures() as error:
                # A file that was cut off or overwritten costs time, and nothing else.
                if not run.cache.make_anew(dynamo.plain_reason(error)):
                    raise
                output = self._compiled(args, kwargs)
        except dynamo.compile_failures() as error:
            failed_s = time.perf_counter() - started
            output = self.eager(args, kwargs)  # raises where the block itself is at fault
            run.fall_back(self.kind, error, failed_s)
            return output
        run.compiled_calls += 1
        if (made := dynamo.compiled() - before).graphs > 0:
            run.count(self.kind, made, time.perf_counter() - started)
        return output

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owned = {name: self.prepared(value) for name, value in kwargs.items()}
        code = self.kind.code_for((*args, *kwargs.values()))
        return code(self.block, *map(self.prepared, args), **owned)


def _own_storage(value: Any) -> Any:
    """`value` as a tensor with its own storage and the plain strides of its shape.

    A slice (the image part of Z-Image's rotary table, 4 MB at 1024 px) costs a compile of its own
    otherwise: offsets and strides are guarded like sizes, the strides of dimensions of length 1
    too. So does a view made outside inference mode (what the first block gets from a Linear, in
    diffusers): it is traced together with its base.
    """
    if type(value) is tuple:  # diffusers' Qwen-Image: rotary tables of image and text
        return tuple(map(_own_storage, value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    if value.storage_offset() or not value.is_contiguous():
        return value.clone(memory_format=torch.contiguous_format)
    if value.stride() != (plain := _plain_strides(value.shape)):
        value = value.as_strided(value.shape, plain)
    return value.detach() if value._is_view() and not value.requires_grad else value


def _plain_strides(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


@dataclass
class CompiledBlocks:
    """The kinds of one denoiser; kept between runs, dropped with the model."""

    kinds: list[Kind]
    calls: dict[str, BlockCall]


def build_blocks(blocks: list[RepeatedBlock], config: CompileConfig) -> CompiledBlocks:
    """Sort `blocks` into kinds. Nothing is compiled before a block is first called."""
    members: dict[tuple[object, ...], list[RepeatedBlock]] = {}
    for block in blocks:
        name = block.path.rsplit(".", 1)[0]
        members.setdefault((name, *kind_signature(block.module)), []).append(block)
    kinds: list[Kind] = []
    calls = {}
    for alike in members.values():
        name = alike[0].path.rsplit(".", 1)[0]
        if taken := sum(kind.name.split("#")[0] == name for kind in kinds):
            name = f"{name}#{taken + 1}"
        kind = Kind(name, type(alike[0].module).forward, config)
        kind.blocks = len(alike)
        kinds.append(kind)
        calls.update({block.path: BlockCall(block.module, kind) for block in alike})
    return CompiledBlocks(kinds, calls)


class RunState:
    """What happens to the compiled blocks of one denoiser in one run."""

    def __init__(self, context: Context, blocks: CompiledBlocks, cache: CompileCache) -> None:
        self.cache = cache
        self.facts = {k.name: CompiledKind(k.name, k.blocks) for k in blocks.kinds}
        self.graphs = 0
        self.recompiles = 0
        self.eager_kinds: dict[str, str] = {}
        self.eager_calls: Counter[str] = Counter()
        self.compiled_calls = 0
        self._kinds = blocks.kinds
        self._announce = context.compiling
        self._interrupt = context.host.check_interrupt

    def may_compile(self, call: BlockCall) -> bool:
        if call.kind.broken:
            self.eager_kinds.setdefault(call.kind.name, call.kind.broken)
            return False
        if call.kind.name in self.eager_kinds:
            return False
        if reason := call.why_eager():
            self.eager_calls[reason] += 1
            return False
        return True

    def check_interrupt(self) -> None:
        # Compiled code cannot be interrupted inside; between blocks it can.
        if self._interrupt is not None and not MODE.uninterrupted:
            self._interrupt()

    def announce(self, kind: Kind) -> None:
        if kind.compiles_ever == 0 and self._announce is not None:
            self._announce(kind.name, self._kinds.index(kind) + 1, len(self._kinds))

    def count(self, kind: Kind, made: dynamo.Compiled, seconds: float) -> None:
        facts = self.facts[kind.name]
        facts.compiles += 1
        facts.from_cache += made.all_from_cache
        facts.seconds += seconds
        self.graphs += made.graphs
        self.recompiles += kind.compiles_ever > 0
        kind.compiles_ever += 1

    def fall_back(self, kind: Kind, error: BaseException, seconds: float) -> None:
        reason = dynamo.plain_reason(error)
        self.facts[kind.name].failed += 1
        self.facts[kind.name].seconds += seconds
        log.warning("%s runs eager: %s", kind.name, reason)
        log.debug("compile of %s failed", kind.name, exc_info=error)
        self.eager_kinds[kind.name] = reason
        if not dynamo.is_recompile_limit(error):
            kind.broken = reason  # it would fail again; a hit limit may pass with known sizes


def open_cache(config: CompileConfig, context: Context) -> CompileCache:
    """Where one run's compiled code is kept; the run's handle closes it."""
    if config.backend != "inductor":
        return CompileCache()
    cache = compile_cache.choose(context.host.state_folder, context.device)
    cache.open()
    return cache


@dataclass
class CompileHandle(Handle):
    blocks: CompiledBlocks = field(default_factory=lambda: CompiledBlocks([], {}))
    run: RunState | None = None
    config: CompileConfig = field(default_factory=CompileConfig)
    grad_off: GradOff | None = None
    breaks_before: dict[str, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        try:
            with dynamo.settings(self.config.recompile_limit):
                yield
        finally:
            self._note_what_ran_eager()

    def _note_what_ran_eager(self) -> None:
        assert self.run is not None
        if self.run.eager_kinds:
            every = len(self.run.eager_kinds) == len(self.blocks.kinds)
            text = "; ".join(f"{name}: {why}" for name, why in self.run.eager_kinds.items())
            self.fell_back = text if every else ""
            self.note = f"runs eager in part ({text})"
        elif self.run.eager_calls:
            parts = [f"{n} block calls ran eager: {why}" for why, n in self.run.eager_calls.items()]
            self.note = "; ".join(parts)
            self.fell_back = "" if self.run.compiled_calls else self.note

    def compile_facts(self) -> CompileFacts:
        assert self.run is not None
        return CompileFacts(
            kinds=list(self.run.facts.values()),
            graphs=self.run.graphs,
            recompiles=self.run.recompiles,
            graph_breaks=dynamo.new_graph_breaks(self.breaks_before),
            seconds=sum(kind.seconds for kind in self.run.facts.values()),
            cache=self.run.cache.where,
        )

    def remove(self) -> None:
        if self.run is not None:
            kinds = self.run.facts.values()
            self.run.cache.close(grown=any(k.compiles > k.from_cache for k in kinds))
        for call in self.blocks.calls.values():
            if self.run in call.runs:
                call.runs.remove(self.run)
        if self.grad_off is not None:
            self.grad_off.remove()


# Compiled code by denoiser and config. The values refer to blocks but never to the denoiser.
_kept: Final[weakref.WeakKeyDictionary[nn.Module, dict[CompileConfig, CompiledBlocks]]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class RegionalCompile:
    name: ClassVar[str] = "regional_compile"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING
    config: CompileConfig = field(default_factory=CompileConfig)

    def check(self, context: Context) -> str | None:
        if context.host.compiled_by:
            return f"{context.host.compiled_by} compiles this model already"
        if context.host.dynamic_vram:
            return "dynamic VRAM loads weights inside the code that would be compiled"
        blocks = context.family.repeated_blocks(context.denoiser)
        if all(is_replaced(block.module, "forward") for block in blocks):
            return "another pack has replaced the forward of every block"
        if self.config.backend == "inductor" and (problem := inductor_problem(context.device)):
            return problem
        if not context.forced and (slower := _measured_slower(context)):
            return slower
        kept = _kept.get(context.denoiser, {}).get(self.config.for_dtype(context.dtype))
        if kept and kept.kinds and all(kind.broken for kind in kept.kinds):
            return f"did not compile earlier in this process: {kept.kinds[0].broken}"
        return None

    def install(self, context: Context) -> Handle:
        dynamo.load()
        blocks = self._blocks(context)
        run = RunState(context, blocks, open_cache(self.config, context))
        patches = []
        foreign = 0
        for call in blocks.calls.values():
            if is_replaced(call.block, "forward"):
                foreign += 1
                continue
            call.runs.append(run)
            patches.append(Patch(call.block, "forward", call))
        kinds = ", ".join(f"{kind.name} x{kind.blocks}" for kind in blocks.kinds)
        note = f"{len(blocks.kinds)} kind{'s' * (len(blocks.kinds) != 1)} of block: {kinds}"
        if foreign:
            note += f"; {foreign} blocks run eager: another pack has replaced their forward"
        return CompileHandle(
            flags=run.cache.flags,
            patches=patches,
            note=note,
            blocks=blocks,
            run=run,
            config=self.config,
            grad_off=GradOff(p for call in blocks.calls.values() for p in call.block.parameters()),
            breaks_before=dynamo.graph_breaks(),
        )

    def release(self, denoiser: nn.Module) -> None:
        """Compiled code holds no device memory; it stays until the model itself goes."""

    def _blocks(self, context: Context) -> CompiledBlocks:
        config = self.config.for_dtype(context.dtype)
        kept = _kept.setdefault(context.denoiser, {})
        found = context.family.repeated_blocks(context.denoiser)
        blocks = kept.get(config)
        # A host that rebuilt or swapped a block gets fresh kinds.
        if blocks is None or not _still_fits(blocks, found):
            blocks = kept[config] = build_blocks(found, config)
        return blocks


def comparison_key(context: Context) -> str:
    """Names what "compiled blocks beside fused ones under a CUDA graph" was measured for."""
    blocks = context.family.repeated_blocks(context.denoiser)
    kinds = repr(sorted({repr(kind_signature(block.module)) for block in blocks}))
    digest = hashlib.sha256(kinds.encode()).hexdigest()[:16]
    tokens = context.image_tokens + context.text_tokens
    size = (context.batch, round(tokens / _TOKENS_APART) * _TOKENS_APART)
    return probe.key(context.device, "compiled, fused", digest, context.dtype, *size)


def _measured_slower(context: Context) -> str:
    """Why compiling would not pay here, from an earlier run's or process's figures; or ""."""
    if "eager_patches" not in context.engaged:
        return ""
    found = probe.Measurements(context.host.state_folder).get(comparison_key(context))
    if found is None or found[0] * _MIN_GAIN < found[1]:
        return ""
    compiled_ms, fused_ms = found
    return (
        f"does not pay: measured on this card {compiled_ms:.1f} ms a call with compiled blocks, "
        f"{fused_ms:.1f} with fused ones in a CUDA graph"
    )


def _still_fits(blocks: CompiledBlocks, found: list[RepeatedBlock]) -> bool:
    return len(blocks.calls) == len(found) and all(
        (call := blocks.calls.get(block.path)) is not None and call.block is block.module
        for block in found
    )
