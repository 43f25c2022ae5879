"""Diffusion model files as ModelPatchers: GGUF by our reader, others by the host.

Imports the host: import this module lazily.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from typing import Any, Final

import comfy.sd
import comfy.utils
import torch
from torch import nn

from ..errors import GGUFFileError
from ..gguf import LoadedGGUF, QuantTensorSpec, load_gguf
from ..gguf.linear import QuantState
from .comfy_quant import QuantModelPatcher, QuantOperations, needed_names
from .safetensors_check import refuse_broken

log = logging.getLogger("speed_tier.loader")

# The stock loader's choices, and what it makes of them.
WEIGHT_DTYPES: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}
# A parameter that 0.3.75 builds and no forward reads.
_UNUSED: Final = {"norm_final.weight"}
# Without their extra tensors these give wrong pictures; the others only lose a hint.
_NEEDS_ITS_HOST: Final = {"layered", "twinflow", "omni"}

# What comes out of a host where a tensor has another shape than its model, or where it fails to
# build one from numbers that it found in the file.
_HOST_REFUSES: Final = (
    RuntimeError,
    AssertionError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


def load_model(path: str, weight_dtype: str = "default") -> Any:
    """A ModelPatcher for a diffusion model file.

    Args:
        path: .gguf, or what the host's own loader takes.
        weight_dtype: one of WEIGHT_DTYPES; a GGUF file keeps its own types.

    Raises:
        GGUFFileError: a GGUF file that cannot be used; one sentence says why and what to do.
        SpeedTierError: a safetensors file that is cut off or something else.
        ValueError: an unknown weight_dtype.
    """
    if weight_dtype not in WEIGHT_DTYPES:
        known = ", ".join(WEIGHT_DTYPES)
        raise ValueError(f"weight_dtype needs one of {known}; found {weight_dtype!r}.")
    if path.lower().endswith(".gguf"):
        if weight_dtype != "default":
            log.info("weight_dtype %s has no effect on a GGUF file", weight_dtype)
        return load_gguf_model(path)
    refuse_broken(path)
    return comfy.sd.load_diffusion_model(path, model_options=dict(WEIGHT_DTYPES[weight_dtype]))


def load_gguf_model(path: str, disable_dynamic: bool = True) -> QuantModelPatcher:
    """A static ModelPatcher whose Linear weights stay as the GGUF file has them.

    Args:
        disable_dynamic: as newer hosts call a loader; packed weights are never dynamic.

    Raises:
        GGUFFileError: the file cannot be used; nothing of a model is left behind.
    """
    loaded = load_gguf(path)
    patcher = _host_model(loaded)
    denoiser = patcher.model.diffusion_model
    notes = loaded.notes
    state = QuantState()
    pack_weights(denoiser, loaded.tensors, state)
    notes += _compare_names(loaded, denoiser)
    if "disable_dynamic" in _host_loader_parameters():
        notes += ("GGUF weights are loaded by the host's static memory management",)
    state.notes = notes
    for note in notes:
        log.info("%s: %s", os.path.basename(path), note)
    mine = QuantModelPatcher(patcher.model, patcher.load_device, patcher.offload_device)
    # How newer hosts load a model again: for another card, or without dynamic memory.
    mine.cached_patcher_init = (load_gguf_model, (path,))
    return mine


def pack_weights(
    denoiser: nn.Module, tensors: Mapping[str, torch.Tensor | QuantTensorSpec], state: QuantState
) -> None:
    """Give packed weights to the layers that were built for them.

    Raises:
        GGUFFileError: a packed weight whose place is no Linear, or of another shape.
    """
    for name, weight in tensors.items():
        if not isinstance(weight, QuantTensorSpec):
            continue
        try:
            layer = comfy.utils.get_attr(denoiser, name.removesuffix(".weight"))
        except AttributeError:
            continue  # the comparison of names says so
        if not isinstance(layer, QuantOperations.Linear):
            raise GGUFFileError(
                f"tensor {name!a} is quantised, but this ComfyUI has a {type(layer).__name__} "
                "there. Update ComfyUI or use a file of another converter."
            )
        layer.pack(weight, state)


def _host_loader_parameters() -> Mapping[str, Any]:
    return inspect.signature(comfy.sd.load_diffusion_model_state_dict).parameters


def _host_model(loaded: LoadedGGUF) -> Any:
    """The model as the host builds it, every packed weight still missing."""
    state_dict = {
        name: weight
        if isinstance(weight, torch.Tensor)
        else torch.empty(weight.shape, dtype=torch.bfloat16, device="meta")
        for name, weight in loaded.tensors.items()
    }
    options: dict[str, Any] = {"model_options": {"custom_operations": QuantOperations}}
    if "disable_dynamic" in _host_loader_parameters():
        options["disable_dynamic"] = True
    try:
        patcher = comfy.sd.load_diffusion_model_state_dict(state_dict, **options)
    except _HOST_REFUSES as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise  # the host makes room when it sees one
        raise GGUFFileError(
            f"{loaded.file.path.name} does not fit the model that this ComfyUI builds for it "
            f"({_first_line(error)}). Update ComfyUI or download the file again."
        ) from error
    if patcher is None:
        raise GGUFFileError(
            f"{loaded.file.path.name} holds {loaded.family} ({loaded.variant}), which this ComfyUI "
            "does not know. Update ComfyUI."
        )
    return patcher


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__


def _compare_names(loaded: LoadedGGUF, denoiser: nn.Module) -> tuple[str, ...]:
    """Refuse a model with holes; returns notes on tensors the host has no place for."""
    file_name = loaded.file.path.name
    built = needed_names(denoiser)
    missing = sorted(built - loaded.tensors.keys() - _UNUSED)
    if missing:
        raise GGUFFileError(
            f"{file_name} lacks {len(missing)} tensors that the model needs (first "
            f"{missing[0]!a}). The file is incomplete: download it again."
        )
    extra = sorted(loaded.tensors.keys() - built - _UNUSED)
    if not extra:
        return ()
    if loaded.variant in _NEEDS_ITS_HOST:
        raise GGUFFileError(
            f"{file_name} is {loaded.family} {loaded.variant}; this ComfyUI builds the model "
            f"without {extra[0]!a}. Update ComfyUI."
        )
    return (f"{len(extra)} tensors have no place in this ComfyUI's model (first {extra[0]})",)
