"""torch.compile of what stands between a VAE's convolutions: each norm with the SiLU behind it.

Changes: the code that computes a norm and its SiLU; Inductor makes one or two kernels of them.
Faster because: eager code reads and writes the largest activations once an operation.
Fidelity: rounding (fused code keeps more precision between operations).
Process-wide: Dynamo and Inductor settings, only inside each call.
Declines: without a working toolchain, where it does not measure faster.

The convolutions stay the host's, with its interrupts, its patched or cast weights and its way
round cudnn's fault with 3-D convolutions: they would be calls of the same library in compiled code
too. So there are few and small kinds (one a channel count), symbolic over sizes, and a second
compile where the memory format changes. `python -m bench.vae` has the whole decoder beside them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import nn

from ..env import inductor_problem
from ..families.vae import Chain, VaeFamily
from ..flags import FLAGS
from ..patching import GradOff, Patch, PatchSet, is_replaced
from . import dynamo, measured
from .base import Context, Fidelity, Handle, NormParameters
from .channels_last import has_own_weight
from .regional_compile import (
    BlockCall,
    CompileConfig,
    CompiledBlocks,
    CompileHandle,
    Kind,
    RunState,
    kind_signature,
    open_cache,
)


class ChainCall(BlockCall):
    """Stands in for a norm's forward, and for the SiLU behind it.

    Attributes:
        parameters: The host's way to a weight that it casts, patches or loads at the call; None
            for a norm that computes with its own.
    """

    def __init__(self, norm: nn.Module, kind: Kind, with_silu: bool) -> None:
        super().__init__(norm, kind)
        self.parameters: NormParameters | None = None
        self._with_silu = with_silu
        self._patchable = []

    def why_eager(self) -> str:
        if self.parameters is None and not has_own_weight(self.block):
            return "its weight is cast, patched or loaded at the call"  # since the run began
        return super().why_eager()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.parameters is None or len(args) != 1 or kwargs:
            return super().__call__(*args, **kwargs)
        with self.parameters(self.block, args[0]) as (weight, bias):
            return super().__call__(args[0], weight, bias)

    def prepared(self, value: Any) -> Any:
        return value  # its memory format is not ours to change here

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().eager(args[:1], kwargs)
        return F.silu(output) if self._with_silu else output


def _with_silu(forward: Callable[..., Any]) -> Callable[..., Any]:
    def norm_and_silu(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.silu(forward(norm, x))

    return norm_and_silu


def _group_norm(norm: Any, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    return F.group_norm(x, norm.num_groups, weight, bias, norm.eps)


def _group_norm_and_silu(norm: Any, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    return F.silu(_group_norm(norm, x, weight, bias))


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    """In place of a SiLU that the norm before it has applied."""
    return x


def _is_ours_to_change(module: nn.Module | None) -> bool:
    """Whether nobody has replaced it or listens to it."""
    return module is not None and not (
        is_replaced(module, "forward") or module._forward_hooks or module._forward_pre_hooks
    )


def _can_be_compiled(norm: nn.Module, with_parameters: bool) -> bool:
    """Whether a norm can be taken over, where the host can(not) hand over its weights."""
    if not _is_ours_to_change(norm):
        return False
    return has_own_weight(norm) or (with_parameters and isinstance(norm, nn.GroupNorm))


def build_chains(
    chains: list[Chain], config: CompileConfig, with_parameters: bool = False
) -> tuple[CompiledBlocks, list[nn.Module]]:
    """Stand-ins for the norms of `chains`, sorted into kinds, and the SiLUs they took over."""
    norms = [chain for chain in chains if _can_be_compiled(chain.norm, with_parameters)]
    # A SiLU may stand behind several norms: it goes into all of them or none.
    stays = {id(c.activation) for c in chains if c not in norms}
    taken: dict[int, nn.Module] = {}
    kinds: dict[tuple[object, ...], Kind] = {}
    calls: dict[str, BlockCall] = {}
    for chain in norms:
        activation = chain.activation
        fused = _is_ours_to_change(activation) and id(activation) not in stays
        if fused and activation is not None:
            taken[id(activation)] = activation
        own = has_own_weight(chain.norm)
        signature = (fused, own, *kind_signature(chain.norm))
        if signature not in kinds:
            name = f"{'norm and SiLU' if fused else 'norm'} {_channels(chain.norm)}"
            name += "" if own else ", weights from the host"
            same = sum(kind.name.split("#")[0] == name for kind in kinds.values())
            name += f"#{same + 1}" if same else ""
            kinds[signature] = Kind(name, _forward(chain.norm, own, fused), config)
        kind = kinds[signature]
        kind.blocks += 1
        calls[chain.path] = ChainCall(chain.norm, kind, fused)
    return CompiledBlocks(list(kinds.values()), calls), list(taken.values())


def _forward(norm: nn.Module, own_weight: bool, fused: bool) -> Callable[..., Any]:
    if not own_weight:
        return _group_norm_and_silu if fused else _group_norm
    forward = type(norm).forward
    return _with_silu(forward) if fused else forward


def _channels(norm: nn.Module) -> int:
    return max((p.numel() for p in norm.parameters()), default=0)


@dataclass
class _Kept:
    chains: list[Chain]
    blocks: CompiledBlocks
    taken: list[nn.Module]


# Compiled code by part (encoder or decoder) and config; goes with the part.
_kept: Final[weakref.WeakKeyDictionary[nn.Module, dict[CompileConfig, _Kept]]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class VaeCompile:
    name: ClassVar[str] = "vae_compile"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING
    config: CompileConfig = field(default_factory=lambda: CompileConfig(dynamic=True))

    def check(self, context: Context) -> str | None:
        if not isinstance(context.family, VaeFamily):
            return "nothing to do: not a VAE"
        if context.host.compiled_by:
            return f"{context.host.compiled_by} compiles this VAE already"
        norms = [chain.norm for chain in context.family.chains(measured.part_in_use(context))]
        if not any(map(_is_ours_to_change, norms)):
            return "another pack has replaced the forward of every norm, or listens to it"
        with_parameters = context.host.norm_parameters is not None
        if not any(_can_be_compiled(norm, with_parameters) for norm in norms):
            return "the weights of every norm are cast, patched or loaded at each call"
        if self.config.backend == "inductor" and (problem := inductor_problem(context.device)):
            return problem
        if slower := measured.why_not(context, self.name):
            return slower
        config = self.config.for_dtype(context.dtype)
        kept = _kept.get(measured.part_in_use(context), {}).get(config)
        if kept and all(kind.broken for kind in kept.blocks.kinds):
            return f"did not compile earlier in this process: {kept.blocks.kinds[0].broken}"
        return None

    def install(self, context: Context) -> Handle:
        dynamo.load()
        kept = self._build(context)
        run = RunState(context, kept.blocks, open_cache(self.config, context))
        calls = kept.blocks.calls
        for call in calls.values():
            call.runs.append(run)
            if isinstance(call, ChainCall):
                own = has_own_weight(call.block)
                call.parameters = None if own else context.host.norm_parameters
        kinds = ", ".join(f"{kind.name} x{kind.blocks}" for kind in kept.blocks.kinds)
        handle = CompileHandle(
            flags=run.cache.flags,
            patches=[
                *(Patch(call.block, "forward", call) for call in calls.values()),
                *(Patch(activation, "forward", _as_it_is) for activation in kept.taken),
            ],
            note=f"{len(kept.blocks.kinds)} kinds: {kinds}",
            blocks=kept.blocks,
            run=run,
            config=self.config,
            grad_off=GradOff(p for call in calls.values() for p in call.block.parameters()),
            breaks_before=dynamo.graph_breaks(),
        )

        @contextlib.contextmanager
        def compiled() -> Iterator[None]:
            token = FLAGS.acquire(handle.flags)
            try:
                with handle.scope(), PatchSet(handle.patches):
                    yield
            finally:
                FLAGS.release(token)

        try:
            measured.settle(handle, context, self.name, compiled, set_up_is_counted=False)
        except BaseException:
            handle.remove()  # an interrupt between two calls of the measurement
            raise
        return handle

    def release(self, denoiser: nn.Module) -> None:
        """Compiled code holds no device memory; it stays until the VAE itself goes."""

    def _build(self, context: Context) -> _Kept:
        family, part = context.family, measured.part_in_use(context)
        assert isinstance(family, VaeFamily)
        kept = _kept.setdefault(part, {})
        chains = family.chains(part)
        config = self.config.for_dtype(context.dtype)
        found = kept.get(config)
        # Replaced or watched modules change what can be taken over: then the chains are built anew.
        fresh = build_chains(chains, config, context.host.norm_parameters is not None)
        same = found is not None and found.chains == chains
        if found is None or not same or not _alike(found, fresh):
            found = kept[config] = _Kept(chains, *fresh)
        return found


def _alike(found: _Kept, fresh: tuple[CompiledBlocks, list[nn.Module]]) -> bool:
    names = {path: call.kind.name for path, call in found.blocks.calls.items()}
    return names == {path: call.kind.name for path, call in fresh[0].calls.items()} and (
        list(map(id, found.taken)) == list(map(id, fresh[1]))
    )
