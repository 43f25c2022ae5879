"""Everything that can go wrong or be changed in mid-run: errors, sleeps, patches, hooks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP

from .tracking import record

CATEGORY = "speed tier tests"
KINDS = ["none", "runtime error", "out of memory"]


# The trap is an operator because a compiled block must contain it: Dynamo keeps an opaque
# operator in the graph as it is (a plain Python function would be traced away, or break the
# graph), so the error comes out of the running block, compiled or not.
@torch.library.custom_op("speed_tier_test::trap", mutates_args=())
def trap(x: torch.Tensor) -> torch.Tensor:
    if ARMED is not None:
        ARMED.hit()
    return x.clone()


@trap.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Trap:
    """Counts passes through the operator and raises at the chosen one."""

    def __init__(self, kind: str, step: int, block: int, where: str) -> None:
        self.kind, self.step, self.block, self.where = kind, step, block, where
        self.call = -1
        self.passes = 0

    def next_call(self) -> None:
        self.call += 1
        self.passes = 0

    def hit(self) -> None:
        self.passes += 1
        if self.kind == "none" or self.call != self.step:
            return
        # In the attention every block passes, so the pass number is the block (Z-Image's
        # refiner blocks come first); at a block's own layer there is one pass per call.
        if self.where == "attention" and self.passes != self.block + 1:
            return
        record("raised", {"kind": self.kind, "call": self.call, "passes": self.passes})
        if self.kind == "out of memory":
            raise torch.OutOfMemoryError("test: out of memory inside a block")
        raise RuntimeError("test: error inside a block")


ARMED: Trap | None = None


def repeated_blocks(diffusion_model: torch.nn.Module) -> Any:
    for name in ("layers", "transformer_blocks", "single_blocks"):
        if hasattr(diffusion_model, name):
            return getattr(diffusion_model, name)
    raise ValueError(f"{type(diffusion_model).__name__} has no list of blocks this test knows")


def last_linear(block: Any) -> torch.nn.Module:
    """The MLP's output layer: present, and called as a module, in every family."""
    block = getattr(block, "_orig_mod", block)
    if hasattr(block, "feed_forward"):
        return block.feed_forward.w2
    if hasattr(block, "img_mlp"):
        return block.img_mlp.net[2]
    return block.linear2


class TestRaise:
    """Raises inside a repeated block at a model call (0 is the first).

    `attention` goes in by an attention override, which the host calls inside every block: the
    graph of all blocks stays the same. `layer` swaps one block's MLP output layer's forward for
    the duration of each call: no override is in play, so a pack that runs overridden blocks
    eager still has its compiled code hit.
    """

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "kind": (KINDS,),
                "where": (["attention", "layer"],),
                "step": ("INT", {"default": 1, "min": 0, "max": 1000}),
                "block": ("INT", {"default": 0, "min": 0, "max": 1000}),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "arm"
    CATEGORY = CATEGORY

    def arm(self, model: Any, kind: str, where: str, step: int, block: int) -> Any:
        patched = model.clone()

        def outer(executor: Any, *args: Any, **kwargs: Any) -> Any:
            global ARMED
            before, ARMED = ARMED, Trap(kind, step, block, where)
            try:
                return executor(*args, **kwargs)
            finally:
                ARMED = before

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            if ARMED is not None:
                ARMED.next_call()
            if where == "attention":
                return executor(*args, **kwargs)
            layer = last_linear(repeated_blocks(executor.class_obj)[block])
            had = vars(layer).get("forward")
            original = layer.forward
            layer.forward = lambda *a, **k: trap(original(*a, **k))
            try:
                return executor(*args, **kwargs)
            finally:
                if had is None:
                    del layer.forward
                else:
                    layer.forward = had

        patched.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "test_raise", outer)
        patched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test_raise", call)
        if where == "attention":
            set_attention_override(patched, trapped_attention)
        return (patched,)


def trapped_attention(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return trap(func(*args, **kwargs))


def set_attention_override(patcher: Any, override: Callable[..., Any]) -> None:
    options = dict(patcher.model_options.get("transformer_options", {}))
    options["optimized_attention_override"] = override
    patcher.model_options = {**patcher.model_options, "transformer_options": options}


class TestSleep:
    """Makes every model call take at least `seconds` longer, so that an interrupt lands inside."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "seconds": ("FLOAT", {"default": 0.5, "min": 0.0, "max": 60.0, "step": 0.01}),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "slow"
    CATEGORY = CATEGORY

    def slow(self, model: Any, seconds: float) -> Any:
        patched = model.clone()

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return executor(*args, **kwargs)

        patched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test_sleep", call)
        return (patched,)


class TestBlockPatch:
    """Replaces one double block (Qwen-Image) by itself times 1 + amount."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "block": ("INT", {"default": 0, "min": 0, "max": 1000}),
                "amount": ("FLOAT", {"default": 0.5, "min": -10.0, "max": 10.0, "step": 0.01}),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = CATEGORY

    def patch(self, model: Any, block: int, amount: float) -> Any:
        patched = model.clone()

        def replace(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
            out = extra["original_block"](args)
            record("block_patch", block)
            return {**out, "img": out["img"] * (1.0 + amount)}

        patched.set_model_patch_replace(replace, "dit", "double_block", block)
        return (patched,)


class TestAttentionOverride:
    """Scales the result of every attention call by 1 + amount."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "amount": ("FLOAT", {"default": 0.5, "min": -10.0, "max": 10.0, "step": 0.01}),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = CATEGORY

    def patch(self, model: Any, amount: float) -> Any:
        patched = model.clone()

        def override(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs) * (1.0 + amount)

        set_attention_override(patched, override)
        return (patched,)


class TestForwardHook:
    """Registers a forward hook on a block, or a layer inside it, for the length of a run."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "block": ("INT", {"default": 0, "min": 0, "max": 1000}),
                "on": (["layer", "block"],),
                "amount": ("FLOAT", {"default": 0.5, "min": -10.0, "max": 10.0, "step": 0.01}),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "hook"
    CATEGORY = CATEGORY

    def hook(self, model: Any, block: int, on: str, amount: float) -> Any:
        patched = model.clone()

        def scale(module: Any, args: Any, out: Any) -> Any:
            record("forward_hook", block)
            if isinstance(out, tuple):
                return tuple(part * (1.0 + amount) for part in out)
            return out * (1.0 + amount)

        def outer(executor: Any, *args: Any, **kwargs: Any) -> Any:
            module = executor.class_obj.model_patcher.model.diffusion_model
            target = repeated_blocks(module)[block]
            handle = (target if on == "block" else last_linear(target)).register_forward_hook(scale)
            try:
                return executor(*args, **kwargs)
            finally:
                handle.remove()

        patched.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "test_hook", outer)
        return (patched,)


NODES = (
    TestRaise,
    TestSleep,
    TestBlockPatch,
    TestAttentionOverride,
    TestForwardHook,
)
