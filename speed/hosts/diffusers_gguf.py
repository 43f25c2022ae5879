"""A GGUF file in a bare diffusers transformer.

    with torch.device("meta"):
        transformer = ZImageTransformer2DModel()
    load_gguf_transformer("z_image_turbo-Q4_K_M.gguf", transformer)
    transformer.to("cuda")

Linear weights stay as the file has them. Nothing of diffusers is imported: the transformer is
whatever the caller built from the class's config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..errors import GGUFFileError, UnsupportedModelError
from ..families import detect_family, not_ours
from ..gguf import LoadedGGUF, QuantTensorSpec, load_gguf
from ..gguf.linear import QuantLinear, QuantState

# A weight that no forward reads, and a marker without a value.
_UNUSED: Final = {"norm_final.weight", "__index_timestep_zero__"}
# What these compute differently with the same weights.
_NEEDED_OPTIONS: Final = {"edit_2511": "zero_cond_t", "layered": "use_layer3d_rope"}


def load_gguf_transformer(
    path: str | PathLike[str], transformer: nn.Module, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """Fill a transformer from a GGUF file; its packed Linear layers become `QuantLinear`.

    Args:
        path: The file, under the native or diffusers' names.
        transformer: A diffusers `ZImageTransformer2DModel` or `QwenImageTransformer2DModel`, with
            weights or on the meta device. A layer on a device is filled there, one on the meta
            device on the CPU.
        dtype: Dtype of everything that is not packed, and so of the model's activations.

    Returns:
        `transformer`. Where an error is raised, it is as it was.

    Raises:
        GGUFFileError: The file cannot be used, or is not of this transformer; one sentence says
            why and what to do.
        UnsupportedModelError: The transformer is of another family, or none of diffusers'.
    """
    detected = detect_family(transformer)
    if detected is None or detected[1] != "diffusers":
        found = not_ours(transformer) if detected is None else f"found the {detected[1]} class"
        raise UnsupportedModelError(f"a GGUF file needs a diffusers transformer; {found}.")
    loaded = load_gguf(path, naming="diffusers", plain_dtype=dtype)
    _check_family(loaded, transformer, detected[0].name)
    built = transformer.state_dict()
    _check_names(loaded, built)
    _check_shapes(loaded, built)
    packed = {n: w for n, w in loaded.tensors.items() if isinstance(w, QuantTensorSpec)}
    _check_places(loaded, transformer, packed)
    tables = _fresh_tables(transformer)
    state = QuantState(loaded.notes)
    for name, spec in packed.items():
        _pack(transformer, name, spec, state)
    plain = {
        name: weight.to(_place(built[name]), dtype)
        for name, weight in loaded.tensors.items()
        if isinstance(weight, Tensor) and name in built
    }
    transformer.load_state_dict(plain, strict=False, assign=True)
    for name, table in tables.items():
        transformer.set_submodule(name, table)
    return transformer


def _check_family(loaded: LoadedGGUF, transformer: Any, family: str) -> None:
    file_name = loaded.file.path.name
    if loaded.family != family:
        raise GGUFFileError(
            f"{file_name} holds a model of the family {loaded.family}; found a "
            f"{type(transformer).__name__} to put it in. Build the transformer of that family."
        )
    option = _NEEDED_OPTIONS.get(loaded.variant)
    if option is not None and not getattr(transformer, "config", {}).get(option):
        raise GGUFFileError(
            f"{file_name} is Qwen-Image {loaded.variant}, which needs {option}; found a "
            f"transformer without it. Build it with {option}=True."
        )


def _check_names(loaded: LoadedGGUF, built: Mapping[str, Tensor]) -> None:
    file_name = loaded.file.path.name
    if missing := sorted(built.keys() - loaded.tensors.keys()):
        raise GGUFFileError(
            f"{file_name} lacks {len(missing)} of the {len(built)} tensors that the transformer "
            f"needs (first {missing[0]!a}). Build the transformer from the config of the file's "
            "model, or download the file again."
        )
    if extra := sorted(loaded.tensors.keys() - built.keys() - _UNUSED):
        raise GGUFFileError(
            f"{file_name} ({loaded.family}, {loaded.variant}) has {len(extra)} tensors that the "
            f"transformer has no place for (first {extra[0]!a}). Build the transformer from the "
            "config of the file's model."
        )


def _check_shapes(loaded: LoadedGGUF, built: Mapping[str, Tensor]) -> None:
    for name, place in built.items():
        found = tuple(loaded.tensors[name].shape)
        if found != tuple(place.shape):
            raise GGUFFileError(
                f"{loaded.file.path.name} has {name!a} of shape {list(found)}; the transformer "
                f"needs {list(place.shape)}. Build it from the config of the file's model."
            )


def _check_places(
    loaded: LoadedGGUF, transformer: nn.Module, packed: Mapping[str, QuantTensorSpec]
) -> None:
    for name in packed:
        layer = transformer.get_submodule(name.removesuffix(".weight"))
        if not isinstance(layer, nn.Linear):
            raise GGUFFileError(
                f"{loaded.file.path.name} has {name!a} quantised; found a {type(layer).__name__} "
                "there, which needs to be a Linear. Build the transformer anew."
            )


def _fresh_tables(transformer: nn.Module) -> dict[str, nn.Module]:
    """Rotary tables in place of those that were built on the meta device, by module name.

    Qwen-Image keeps them as plain tensors, which are in no state dict; Z-Image makes them at the
    first forward.
    """
    fresh: dict[str, nn.Module] = {}
    for name, tensor in _outside_the_state_dict(transformer):
        if not tensor.is_meta or name in fresh:
            continue
        module: Any = transformer.get_submodule(name)
        if not all(hasattr(module, a) for a in ("theta", "axes_dim", "scale_rope")):
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}) holds values that are in no file; found them on "
                "the meta device. Build the transformer on the CPU."
            )
        with torch.device("cpu"):
            fresh[name] = type(module)(module.theta, module.axes_dim, module.scale_rope)
    return fresh


def _outside_the_state_dict(transformer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in transformer.named_modules():
        held = [
            *vars(module).values(),
            *map(module._buffers.get, module._non_persistent_buffers_set),
        ]
        yield from ((name, value) for value in held if isinstance(value, Tensor))


def _place(built: Tensor) -> torch.device:
    return torch.device("cpu") if built.is_meta else built.device


def _pack(transformer: nn.Module, name: str, spec: QuantTensorSpec, state: QuantState) -> None:
    path = name.removesuffix(".weight")
    old: Any = transformer.get_submodule(path)
    new = QuantLinear(old.in_features, old.out_features)
    new.train(old.training)
    new.pack(dataclasses.replace(spec, packed=spec.packed.to(_place(old.weight))), state)
    new.bias = old.bias  # filled with the rest
    transformer.set_submodule(path, new)
