"""A GGUF file as named tensors: quantised Linear weights packed, everything else plain.

Knows neither the host nor diffusers: `load_gguf` gives the tensors under the names a stack uses,
views of the memory-mapped file wherever the bytes can be used as they are.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from ..errors import GGUFFileError
from ..kernels import BY_ID, dequantize
from . import names
from .reader import GGUFFile, TensorInfo

# Types that are a torch dtype as they stand.
PLAIN_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.I8: torch.int8,
    GGMLQuantizationType.I16: torch.int16,
    GGMLQuantizationType.I32: torch.int32,
    GGMLQuantizationType.I64: torch.int64,
}
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
PAD_TOKENS = ("x_pad_token", "cap_pad_token")
# Linear weights of the repeated blocks may stay packed. Everything outside them (embedders, pad
# tokens, the final layer) is small, and part of it is no Linear in one stack or the other.
_BLOCKS = re.compile(r"^(layers|noise_refiner|context_refiner|transformer_blocks)\.\d+\.")


@dataclass(frozen=True)
class QuantTensorSpec:
    """A quantised Linear weight as stored.

    Attributes:
        packed: `(rows, bytes_per_row) uint8`, contiguous, usually a view of the mapped file.
        qtype: GGUF type id.
        shape: `(rows, cols)` of the weight.
    """

    packed: Tensor
    qtype: int
    shape: tuple[int, int]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight as `(rows, cols)` of `dtype`, by the eager reference."""
        return dequantize(self.packed, self.qtype, *self.shape, dtype, path="reference")


Weight = Tensor | QuantTensorSpec


@dataclass(frozen=True)
class LoadedGGUF:
    """What `load_gguf` gives.

    Attributes:
        file: the open file; keeps the map alive.
        family, variant: as `names.Recognised` has them.
        naming: the naming of `tensors`.
        tensors: by name, without prefix.
        type_counts: tensors of each stored type, by the type's name.
        notes: sentences for the report: variant, conversions made, slow types.
    """

    file: GGUFFile
    family: str
    variant: str
    naming: str
    tensors: dict[str, Weight]
    type_counts: dict[str, int]
    notes: tuple[str, ...]


def load_gguf(
    path: str | PathLike[str], naming: str = names.NATIVE, plain_dtype: torch.dtype = torch.float32
) -> LoadedGGUF:
    """Open a GGUF file of a known family.

    Args:
        path: the file.
        naming: `native` for the host's names, `diffusers` for diffusers'.
        plain_dtype: dtype of quantised tensors that must be plain (norms, embedders, pad tokens,
            convolutions), dequantised here.

    Raises:
        GGUFFileError: the file cannot be used; one sentence says why and what to do.
    """
    if naming not in (names.NATIVE, names.DIFFUSERS):
        raise ValueError(f"naming is native or diffusers; found {naming!r}.")
    file = GGUFFile(path)
    shapes = {name: info.shape for name, info in file.tensors.items()}
    found = names.recognise(file.path.name, shapes, file.metadata)
    counts = Counter(info.type_name for info in file.tensors.values())
    notes = [*found.notes, *_slow_note(file)]
    tensors: dict[str, Weight] = {}
    for stored, info in file.tensors.items():
        # A file may hold more beside the model, under another prefix: not ours.
        if stored.startswith(found.prefix):
            name = stored[len(found.prefix) :]
            tensors[name] = _weight(file, info, name, plain_dtype)
    if found.family == names.Z_IMAGE:
        rename: Callable[[str], str] = lambda name: names.z_image_name(name, naming)  # noqa: E731
        if naming == names.NATIVE and found.naming == names.DIFFUSERS:
            notes += _fuse(file, tensors, found.prefix)
        elif naming == names.DIFFUSERS and found.naming == names.NATIVE:
            _split(file, tensors)
        tensors = {rename(name): weight for name, weight in tensors.items()}
    return LoadedGGUF(
        file, found.family, found.variant, naming, tensors, dict(counts), tuple(notes)
    )


def stays_packed(name: str, qtype: int, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a Linear weight that keeps its stored form."""
    row = BY_ID.get(qtype)
    return (
        row is not None
        and not row.plain
        and len(shape) == 2
        and name.endswith(".weight")
        and _BLOCKS.match(name) is not None
        and "norm" not in name
    )


def _weight(file: GGUFFile, info: TensorInfo, name: str, plain_dtype: torch.dtype) -> Weight:
    shape = _logical_shape(file, info, name)
    raw = file.raw(info.name)
    dtype = PLAIN_DTYPES.get(GGMLQuantizationType(info.qtype))
    if dtype is not None:
        return raw.view(dtype).reshape(shape) if info.n_bytes else torch.empty(shape, dtype=dtype)
    if info.qtype not in BY_ID:
        raise GGUFFileError(
            f"{file.path.name} has tensor {info.name!a} of type {info.type_name}, which holds "
            "intermediate results, not weights. Use a file of another quantisation."
        )
    if stays_packed(name, info.qtype, shape) and shape == info.shape:
        return QuantTensorSpec(raw, info.qtype, (shape[0], shape[1]))
    if not info.n_bytes:
        return torch.empty(shape, dtype=plain_dtype)
    rows, cols = math.prod(info.shape[:-1]), info.shape[-1]
    plain = dequantize(raw, info.qtype, rows, cols, plain_dtype, path="reference")
    return plain.reshape(shape)


def _logical_shape(file: GGUFFile, info: TensorInfo, name: str) -> tuple[int, ...]:
    """The shape the model wants: a recorded original shape, or a pad token's leading 1."""
    original = file.metadata.get(ORIGINAL_SHAPE + info.name)
    if original is None:
        original = file.metadata.get(ORIGINAL_SHAPE + name)
    if original is not None:
        sound = isinstance(original, list) and all(isinstance(n, int) and n >= 0 for n in original)
        if not sound or math.prod(original) != math.prod(info.shape):
            raise GGUFFileError(
                f"{file.path.name} records {original!a} as the original shape of "
                f"{info.name!a}; found {list(info.shape)} stored. Download it again."
            )
        return tuple(original)
    if name in PAD_TOKENS and len(info.shape) == 1:
        return (1, *info.shape)
    return info.shape


def _slow_note(file: GGUFFile) -> list[str]:
    """A sentence for each type without a kernel."""
    slow = Counter(
        info.type_name
        for info in file.tensors.values()
        if info.qtype in BY_ID and BY_ID[info.qtype].slow
    )
    return [
        f"{count} tensors of type {name} have no fast kernel: slow" for name, count in slow.items()
    ]


def _split(file: GGUFFile, tensors: dict[str, Weight]) -> None:
    """Replace each fused qkv weight by its three thirds of rows, as views."""
    for name in [n for n in tensors if n.endswith(names.FUSED)]:
        fused = tensors.pop(name)
        if len(fused.shape) != 2 or fused.shape[0] % 3:
            raise GGUFFileError(
                f"{file.path.name} has {name!a} of shape {list(fused.shape)}; "
                "expected three equal parts of rows. Download it again."
            )
        stem = name[: -len(names.FUSED)]
        for index, suffix in enumerate(names.SPLIT):
            tensors[stem + suffix] = _third(fused, index)


def _third(fused: Weight, index: int) -> Weight:
    rows, cols = fused.shape[0] // 3, fused.shape[1]
    if isinstance(fused, Tensor):
        return fused[index * rows : (index + 1) * rows]
    packed = fused.packed[index * rows : (index + 1) * rows]
    return QuantTensorSpec(packed, fused.qtype, (rows, cols))


def _fuse(file: GGUFFile, tensors: dict[str, Weight], prefix: str) -> list[str]:
    """Replace each q, k, v by one fused weight; returns notes.

    Rows are joined as stored where the three share a type: a view where they lie in a row in the
    file, as converters write them, else a copy. Of different types, they become bf16.
    """
    mixed = 0
    for name in [n for n in tensors if n.endswith(names.SPLIT[0])]:
        stem = name[: -len(names.SPLIT[0])]
        parts = [tensors.pop(stem + suffix, None) for suffix in names.SPLIT]
        if any(part is None for part in parts):
            raise GGUFFileError(
                f"{file.path.name} lacks one of {stem}.attention.to_q, to_k, to_v. "
                "Download it again."
            )
        weights = [part for part in parts if part is not None]
        if any(len(w.shape) != 2 or w.shape[1] != weights[0].shape[-1] for w in weights):
            raise GGUFFileError(
                f"{file.path.name} has {stem}.attention.to_q, to_k, to_v of shapes "
                f"{[list(w.shape) for w in weights]}; expected equal rows. Download it again."
            )
        specs = [w for w in weights if isinstance(w, QuantTensorSpec)]
        if len(specs) == 3 and len({(s.qtype, s.shape[1]) for s in specs}) == 1:
            infos = [file.tensors[prefix + stem + suffix] for suffix in names.SPLIT]
            tensors[stem + names.FUSED] = _joined(file, infos, specs)
            continue
        if specs:
            mixed += 1
            weights = [
                w.dequantize(torch.bfloat16) if isinstance(w, QuantTensorSpec) else w
                for w in weights
            ]
        plain = [w for w in weights if isinstance(w, Tensor)]
        dtype = plain[0].dtype if not specs else torch.bfloat16
        tensors[stem + names.FUSED] = torch.cat([w.to(dtype) for w in plain])
    if not mixed:
        return []
    return [f"{mixed} q, k, v groups have different types: joined as bf16, which takes more memory"]


def _joined(
    file: GGUFFile, infos: list[TensorInfo], specs: list[QuantTensorSpec]
) -> QuantTensorSpec:
    first = specs[0]
    rows = sum(spec.shape[0] for spec in specs)
    adjacent = all(a.offset + a.n_bytes == b.offset for a, b in itertools.pairwise(infos))
    if adjacent:
        packed = file.span(infos[0].offset, sum(i.n_bytes for i in infos)).view(rows, -1)
    else:
        packed = torch.cat([spec.packed for spec in specs])
    return replace(first, packed=packed, shape=(rows, first.shape[1]))
