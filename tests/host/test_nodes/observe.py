"""Nodes that look: flags now and in mid-run, host state, latent bytes; and one that unloads."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import comfy.model_management as mm
import folder_paths
import numpy as np
import torch
from comfy.patcher_extension import WrappersMP

from .process_flags import read_flags
from .tracking import record, state

CATEGORY = "speed tier tests"


class AnyType(str):
    """Equal to every type name, so that one input takes any output."""

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


ANY = AnyType("*")


class _AlwaysRuns:
    @classmethod
    def IS_CHANGED(cls, **kwargs: Any) -> float:
        return float("nan")


class TestFlags(_AlwaysRuns):
    """Shows the process flags at the moment the node runs, on the prompt's own thread.

    Dynamo's settings are context-local in new torch, so the thread matters. `after` only orders.
    """

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"name": ("STRING", {"default": "flags"})},
            "optional": {"after": (ANY,)},
        }

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "show"
    CATEGORY = CATEGORY

    def show(self, name: str, after: Any = None) -> Any:
        flags = read_flags()
        record(name, flags)
        return {"ui": {"flags": [json.dumps(flags)]}}


class TestFlagsDuring:
    """Records the flags at every model call under `name` (see the records route)."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "name": ("STRING", {"default": "during"})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "watch"
    CATEGORY = CATEGORY

    def watch(self, model: Any, name: str) -> Any:
        patched = model.clone()

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            record(name, read_flags())
            return executor(*args, **kwargs)

        patched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, f"test_flags_{name}", call)
        return (patched,)


class TestSink:
    """Writes the latent's bytes to output/<name>.npy and shows their SHA-256."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"latent": ("LATENT",), "name": ("STRING", {"default": "latent"})}}

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "store"
    CATEGORY = CATEGORY

    def store(self, latent: Any, name: str) -> Any:
        samples = latent["samples"].detach().cpu().contiguous()
        raw = samples.view(torch.uint8).numpy().tobytes()
        place = os.path.join(folder_paths.get_output_directory(), f"{os.path.basename(name)}.npy")
        np.save(place, samples.float().numpy())
        return {
            "ui": {
                "sha256": [hashlib.sha256(raw).hexdigest()],
                "finite": [bool(torch.isfinite(samples.float()).all())],
                "mean": [float(samples.float().mean())],
                "std": [float(samples.float().std())],
                "shape": [list(samples.shape)],
                "dtype": [str(samples.dtype)],
                "file": [place],
            }
        }


class TestState(_AlwaysRuns):
    """Shows flags, loaded models, live tracked objects; runs each time."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"optional": {"after": (ANY,)}}

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "show"
    CATEGORY = CATEGORY

    def show(self, after: Any = None) -> Any:
        return {"ui": {"state": [json.dumps({"flags": read_flags(), **state()})]}}


def unload(model: Any) -> int:
    """Unloads every loaded clone of `model`'s module, as the host does when memory is short."""
    count = 0
    for entry in list(mm.current_loaded_models):
        if entry.model is not None and entry.model.is_clone(model):
            entry.model_unload()
            if entry in mm.current_loaded_models:
                mm.current_loaded_models.remove(entry)
            count += 1
    return count


class TestUnload(_AlwaysRuns):
    """Unloads one model and passes it on; `after` only orders."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}, "optional": {"after": (ANY,)}}

    RETURN_TYPES = ("MODEL",)
    OUTPUT_NODE = True
    FUNCTION = "unload"
    CATEGORY = CATEGORY

    def unload(self, model: Any, after: Any = None) -> Any:
        return {"ui": {"unloaded": [unload(model)]}, "result": (model,)}


NODES = (TestFlags, TestFlagsDuring, TestSink, TestState, TestUnload)
