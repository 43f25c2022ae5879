"""A strict GGUF header parser over a memory map.

The gguf package's own reader trusts the header: it allocates and loops by the counts it finds and
answers a damaged file with numpy's errors. This parser checks every number against the file's size
before it uses it, and answers with one sentence. Types and their sizes are the gguf package's.

Tensor data stays in the file: `GGUFFile.raw` is a view of the map.

Source: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
import sys
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from torch import Tensor

from ..errors import GGUFFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_BYTES = 24
DEFAULT_ALIGNMENT = 32
# What vector loads and casts to fp32 need of an address.
ADDRESS_ALIGNMENT = 16
# The least a tensor's entry (name length, n_dims, type, offset) and a metadata entry can take.
MIN_TENSOR_BYTES, MIN_METADATA_BYTES = 24, 13
MAX_NAME_BYTES, MAX_KEY_BYTES, MAX_DIMS, MAX_ARRAY_DEPTH = 1024, 65535, 8, 4
# Longer arrays (a tokenizer's) and strings are skipped, not kept: nothing here reads them.
MAX_KEPT_ARRAY, MAX_KEPT_STRING = 64, 65536
MAX_ARRAY_STRINGS = 1 << 22
# A flag tensor has no elements; the dimensions beside its zero are checked by nothing else.
MAX_EMPTY = 1 << 31

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
_AGAIN = "Download it again."


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file.

    Attributes:
        name: as stored.
        qtype: GGUF type id.
        shape: logical shape in torch order (the file stores it reversed).
        offset: first byte, from the start of the file.
        n_bytes: stored size.
    """

    name: str
    qtype: int
    shape: tuple[int, ...]
    offset: int
    n_bytes: int

    @property
    def type_name(self) -> str:
        return GGMLQuantizationType(self.qtype).name

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: the last dimension's."""
        block_size, type_size = GGML_QUANT_SIZES[GGMLQuantizationType(self.qtype)]
        return (self.shape[-1] if self.shape else 1) // block_size * type_size


class GGUFFile:
    """An open GGUF file: metadata, the tensor table, and views of the data.

    Attributes:
        path: where it lies.
        metadata: scalars, strings and short arrays (as lists) by key; `None` for longer ones.
        tensors: `TensorInfo` by name, in file order.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        """Map the file and check its header.

        Raises:
            GGUFFileError: the file cannot be used; one sentence says why and what to do.
            OSError: the file cannot be opened.
        """
        self.path = Path(path)
        with open(self.path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            _refuse_foreign(self.path.name, file.read(256), size)
            self._map = _private_map(file.fileno())
        self._bytes = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))
        self.metadata, self.tensors = _Header(self.path.name, self._map).parse()

    def raw(self, name: str) -> Tensor:
        """A tensor's stored bytes: `(rows, row_bytes) uint8`, or flat for one dimension or none.

        A view of the map, or a copy where the file does not align its tensors (kernels and casts
        need aligned addresses). Writing to it changes this process's copy, never the file.
        """
        info = self.tensors[name]
        data = self.span(info.offset, info.n_bytes)
        if len(info.shape) < 2 or info.n_bytes == 0:
            return data
        return data.view(-1, info.row_bytes)

    def span(self, offset: int, n_bytes: int) -> Tensor:
        """Any stretch of the file, flat, under the same rule as `raw`."""
        data = self._bytes[offset : offset + n_bytes]
        return data if offset % ADDRESS_ALIGNMENT == 0 else data.clone()


def _private_map(descriptor: int) -> mmap.mmap:
    """Map a file copy-on-write: a stray write into a weight must not end the process.

    Without NORESERVE, Linux refuses such a map when the file is larger than memory.
    """
    if sys.platform == "win32":
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    no_reserve = 0x4000 if sys.platform == "linux" else 0
    return mmap.mmap(
        descriptor,
        0,
        flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", no_reserve),
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )


def _refuse_foreign(name: str, start: bytes, size: int) -> None:
    """Refuse what is no GGUF file by its first bytes."""
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise GGUFFileError(
            f"{name} is a web page, not a GGUF file; found {_shown(start)} at its start. "
            "Use the download link of the file, not the link of its page."
        )
    if text.startswith(b"version https://git-lfs"):
        raise GGUFFileError(
            f"{name} is a Git LFS pointer of {size} bytes, not the GGUF file it stands for. "
            "Run git lfs pull, or download the file itself."
        )
    if size < HEADER_BYTES:
        raise GGUFFileError(
            f"{name} is too short for a GGUF file; found {size} bytes, "
            f"a header alone takes {HEADER_BYTES}. {_AGAIN}"
        )
    if start[8:10] == b'{"' and int.from_bytes(start[:8], "little") < size:
        raise GGUFFileError(
            f"{name} is a safetensors file by its first bytes, not a GGUF file. Rename it, with "
            ".safetensors at its end."
        )
    if start[:4] != MAGIC:
        raise GGUFFileError(
            f"{name} is not a GGUF file; found {_shown(start[:8])} at its start, "
            f"a GGUF file starts with 'GGUF'. Check what the file is, or download it again."
        )


def _shown(start: bytes) -> str:
    return ascii(start[:16].decode("latin-1"))


class _Header:
    """A cursor over the header; every read is checked against the end of the file."""

    def __init__(self, name: str, data: mmap.mmap) -> None:
        self.name = name
        self.data = data
        self.size = len(data)
        self.at = 4
        self.alignment = DEFAULT_ALIGNMENT

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        self._version()
        n_tensors, n_metadata = self._number("<Q"), self._number("<Q")
        least = n_tensors * MIN_TENSOR_BYTES + n_metadata * MIN_METADATA_BYTES
        if least > self.size - self.at:
            raise GGUFFileError(
                f"{self.name} is damaged or incomplete; its header announces {n_tensors} tensors "
                f"and {n_metadata} metadata entries, which take {least} bytes or more, found "
                f"{self.size - self.at}. {_AGAIN}"
            )
        metadata = self._metadata(n_metadata)
        self._refuse_split(metadata)
        self._read_alignment(metadata)
        return metadata, self._tensors(n_tensors)

    def _damaged(self, what: str) -> GGUFFileError:
        return GGUFFileError(f"{self.name} is damaged or incomplete; {what}. {_AGAIN}")

    def _take(self, count: int) -> int:
        """Advance by `count` bytes; returns where they start."""
        at = self.at
        if count > self.size - at:
            raise self._damaged(f"its header goes on to byte {at + count}, found {self.size} bytes")
        self.at = at + count
        return at

    def _number(self, code: str) -> int:
        value: int = struct.unpack_from(code, self.data, self._take(struct.calcsize(code)))[0]
        return value

    def _string(self, longest: int, what: str) -> bytes:
        count = self._number("<Q")
        if count > min(longest, self.size - self.at):
            raise self._damaged(
                f"{what} is announced with {count} bytes, found room for {self.size - self.at}"
                if count > self.size - self.at
                else f"{what} is announced with {count} bytes, expected at most {longest}"
            )
        at = self._take(count)
        return self.data[at : at + count]

    def _text(self, longest: int, what: str) -> str:
        raw = self._string(longest, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"{what} is not UTF-8 text, found {_shown(raw)}") from None

    def _version(self) -> None:
        at = self._take(4)
        (version,) = struct.unpack_from("<I", self.data, at)
        (swapped,) = struct.unpack_from(">I", self.data, at)
        if version not in VERSIONS and swapped in (1, *VERSIONS):
            raise GGUFFileError(
                f"{self.name} is a big-endian GGUF file; expected little-endian. "
                "Download the ordinary version, or convert it with gguf-convert-endian."
            )
        if version not in VERSIONS:
            raise GGUFFileError(
                f"{self.name} has GGUF version {version}; expected 2 or 3. "
                f"{'Convert the model again' if version < 2 else 'Update Speed Tier'}, "
                "or download the file again if it is damaged."
            )

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self._text(MAX_KEY_BYTES, f"the key of metadata entry {index}")
            if key in metadata:
                raise self._damaged(f"it has the metadata key {key!a} twice")
            metadata[key] = self._value(self._value_type(key), key, 0)
        return metadata

    def _value_type(self, key: str) -> GGUFValueType:
        code = self._number("<I")
        try:
            return GGUFValueType(code)
        except ValueError:
            raise self._damaged(
                f"metadata {key!a} has value type {code}, expected 0 to {max(GGUFValueType)}"
            ) from None

    def _value(self, kind: GGUFValueType, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind is GGUFValueType.STRING:
            at = self._take(length := self._number("<Q"))
            if length > MAX_KEPT_STRING:
                return None
            return self.data[at : at + length].decode("utf-8", "replace")
        return self._array(key, depth + 1)

    def _array(self, key: str, depth: int) -> list[Any] | None:
        """An array's elements, or `None` for one too long to be of use."""
        kind, count = self._value_type(key), self._number("<Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            at = self._take(count * struct.calcsize(code))
            if count > MAX_KEPT_ARRAY:
                return None
            return list(struct.unpack_from(f"<{count}{code[1]}", self.data, at))
        # A string takes 8 bytes or more, an array 12.
        if depth > MAX_ARRAY_DEPTH or count > min(MAX_ARRAY_STRINGS, (self.size - self.at) // 8):
            raise self._damaged(
                f"metadata {key!a} announces an array of {count} elements at depth {depth}"
            )
        if count <= MAX_KEPT_ARRAY:
            return [self._value(kind, key, depth) for _ in range(count)]
        if kind is not GGUFValueType.STRING:
            raise self._damaged(f"metadata {key!a} is a long array of arrays")
        for _ in range(count):
            self._take(self._number("<Q"))
        return None

    def _refuse_split(self, metadata: dict[str, Any]) -> None:
        parts = metadata.get("split.count")
        if isinstance(parts, int) and parts > 1:
            part = metadata.get("split.no")
            which = (
                f"part {part + 1} of {parts}" if isinstance(part, int) else f"one of {parts} parts"
            )
            raise GGUFFileError(
                f"{self.name} is {which} of a split model; expected one file. "
                "Merge the parts with llama-gguf-split --merge, or download an unsplit file."
            )

    def _read_alignment(self, metadata: dict[str, Any]) -> None:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!a}, expected a power of two")
        self.alignment = alignment

    def _tensors(self, count: int) -> dict[str, TensorInfo]:
        entries = [self._entry(index) for index in range(count)]
        start = -(-self.at // self.alignment) * self.alignment
        tensors: dict[str, TensorInfo] = {}
        for name, qtype, shape, offset, n_bytes in entries:
            if name in tensors:
                raise self._damaged(f"it has the tensor {name!a} twice")
            tensors[name] = TensorInfo(name, qtype, shape, start + offset, n_bytes)
        self._check_extent(tensors)
        return tensors

    def _entry(self, index: int) -> tuple[str, int, tuple[int, ...], int, int]:
        name = self._text(MAX_NAME_BYTES, f"the name of tensor {index}")
        n_dims = self._number("<I")
        if n_dims > MAX_DIMS:
            raise self._damaged(
                f"tensor {name!a} has {n_dims} dimensions, expected at most {MAX_DIMS}"
            )
        shape = tuple(reversed([self._number("<Q") for _ in range(n_dims)]))
        code, offset = self._number("<I"), self._number("<Q")
        try:
            block_size, type_size = GGML_QUANT_SIZES[GGMLQuantizationType(code)]
        except (ValueError, KeyError):
            raise GGUFFileError(
                f"{self.name} has tensor {name!a} of type {code}, which the installed gguf "
                "package does not know. Update it (pip install -U gguf), or download the file "
                "again if it is damaged."
            ) from None
        elements = math.prod(shape)
        if not elements and math.prod(n for n in shape if n) > MAX_EMPTY:
            raise self._damaged(f"tensor {name!a} is empty and has the shape {list(shape)}")
        row = shape[-1] if shape else 1
        if row % block_size:
            raise self._damaged(
                f"tensor {name!a} has rows of {row} weights, expected a multiple of "
                f"{block_size} for {GGMLQuantizationType(code).name}"
            )
        n_bytes = elements // block_size * type_size
        if n_bytes > self.size:
            raise self._damaged(
                f"tensor {name!a} takes {n_bytes} bytes, found a file of {self.size}"
            )
        if offset % self.alignment:
            raise self._damaged(
                f"tensor {name!a} starts at {offset}, expected a multiple of {self.alignment}"
            )
        return name, code, shape, offset, n_bytes

    def _check_extent(self, tensors: dict[str, TensorInfo]) -> None:
        """Every tensor within the file, none over another."""
        end, last = 0, ""
        for info in sorted(tensors.values(), key=lambda i: (i.offset, i.n_bytes)):
            if info.offset < end and info.n_bytes:
                raise self._damaged(f"tensors {last!a} and {info.name!a} overlap")
            if info.n_bytes:
                end, last = info.offset + info.n_bytes, info.name
        if end > self.size:
            raise GGUFFileError(
                f"{self.name} is incomplete or damaged; expected {end} bytes (tensor "
                f"{last!a} ends there), found {self.size}. {_AGAIN}"
            )
