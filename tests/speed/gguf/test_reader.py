"""The strict header parser: against the gguf package's reader, and against every bad input."""

import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from speed_tier.speed.errors import GGUFFileError
from speed_tier.speed.gguf import GGUFFile
from speed_tier.tests.speed.gguf import packer

PLAN = [("a.weight", (4, 256), Q.Q4_K), ("b.bias", (6,), Q.F32), ("c.weight", (3, 64), Q.BF16)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.gguf"
    packer.write(path, PLAN, metadata={"general.name": "small", "note": ["x", "y"]})
    return path


def header(
    tensors=(), metadata=(), version=3, n_tensors=None, n_metadata=None, order="<", data=b""
):
    """A header by hand. `tensors`: (name, dims, type, offset); `metadata`: (key, type, bytes)."""
    out = b"GGUF" + struct.pack(order + "I", version)
    out += struct.pack(order + "Q", len(tensors) if n_tensors is None else n_tensors)
    out += struct.pack(order + "Q", len(metadata) if n_metadata is None else n_metadata)
    for key, kind, value in metadata:
        out += struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
    for name, dims, kind, offset in tensors:
        out += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
        out += b"".join(struct.pack("<Q", n) for n in dims) + struct.pack("<IQ", kind, offset)
    return out + bytes(-len(out) % 32) + data


def test_agrees_with_the_gguf_package(tmp_path):
    path = tmp_path / "all.gguf"
    types = [t for t in Q if t in gguf.quants._type_traits or t in (Q.F32, Q.F16)]
    packer.write(path, [(f"t{t.name}", (3, 512), t) for t in types])
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (info.qtype, info.n_bytes) == (tensor.tensor_type, tensor.n_bytes)
        raw = np.ascontiguousarray(tensor.data).view(np.uint8)
        assert np.array_equal(ours.raw(tensor.name).numpy().reshape(-1), raw.reshape(-1))


def test_metadata_is_read(file):
    metadata = GGUFFile(file).metadata
    assert metadata["general.architecture"] == "lumina2"
    assert metadata["general.name"] == "small"
    assert metadata["note"] == ["x", "y"]


def test_long_arrays_are_skipped(tmp_path):
    path = tmp_path / "vocabulary.gguf"
    packer.write(path, PLAN, metadata={"tokens": [str(i) for i in range(1000)]})
    file = GGUFFile(path)
    assert file.metadata["tokens"] is None
    assert list(file.tensors) == [name for name, *_ in PLAN]


def test_data_is_a_view_and_a_stray_write_stays_in_memory(file):
    before = file.read_bytes()
    opened = GGUFFile(file)
    first, second = opened.raw("a.weight"), opened.raw("a.weight")
    assert first.data_ptr() == second.data_ptr()
    assert first.shape == (4, 144) and first.data_ptr() % 16 == 0
    first.zero_()
    assert not second.any()
    assert file.read_bytes() == before


def test_data_outlives_the_file_object(file):
    raw = GGUFFile(file).raw("b.bias").view(torch.float32)
    expected = torch.from_numpy(packer.values("b.bias", (6,)))
    assert torch.equal(raw, expected)


def test_unaligned_tensors_are_copied_to_an_aligned_address(tmp_path):
    path = tmp_path / "packed.gguf"
    weights = np.arange(8, dtype=np.float32)
    path.write_bytes(
        header(
            [(b"byte", (1,), Q.I8, 0), (b"t", (8,), Q.F32, 1)],
            [(b"general.alignment", 4, struct.pack("<I", 1))],
            data=b"\0" + weights.tobytes(),
        )
    )
    size = path.stat().st_size
    start = GGUFFile(path).tensors["byte"].offset
    assert start <= size - 33
    assert GGUFFile(path).raw("t").data_ptr() % 16 == 0


BAD = {
    "two bytes": (b"GG", "found 2 bytes, a header alone takes 24. Download it again."),
    "empty": (b"", "found 0 bytes"),
    "web page": (b"<!DOCTYPE html><html>" + bytes(99), "is a web page, not a GGUF file"),
    "web page after spaces": (b"\n  <html lang=en>" + bytes(99), "is a web page"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer"),
    "safetensors": (struct.pack("<Q", 50) + b'{"a":' + bytes(50), "is a safetensors file by its"),
    "its bytes cut off": (struct.pack("<Q", 99) + b'{"a":' + bytes(50), "starts with 'GGUF'"),
    "version 1": (header(version=1), "has GGUF version 1; expected 2 or 3. Convert the model"),
    "version 9": (header(version=9), "has GGUF version 9; expected 2 or 3. Update Speed Tier"),
    "big-endian": (header(version=3, order=">"), "is a big-endian GGUF file"),
    "too many tensors": (header(n_tensors=1 << 40), "announces 1099511627776 tensors"),
    "too much metadata": (header(n_metadata=1 << 60), "announces 0 tensors and 11529215046068"),
    "unknown type": (
        header([(b"t", (32,), 99, 0)], data=bytes(64)),
        "has tensor 't' of type 99, which the installed gguf package does not know. Update it",
    ),
    "removed type": (header([(b"t", (32,), 4, 0)], data=bytes(64)), "of type 4, which"),
    "past the end": (
        header([(b"t", (8,), Q.F32, 4096)], data=bytes(32)),
        "is incomplete or damaged; expected 4192 bytes (tensor 't' ends there), found 96.",
    ),
    "sizes that overflow": (
        header([(b"t", (1 << 40, 1 << 40), Q.F32, 0)], data=bytes(32)),
        "takes 4835703278458516698824704 bytes, found a file of 128",
    ),
    "empty with a huge side": (
        header([(b"t", (0, 1 << 62), Q.F32, 0)], data=bytes(32)),
        "tensor 't' is empty and has the shape [4611686018427387904, 0]",
    ),
    "huge offset": (
        header([(b"t", (8,), Q.F32, (1 << 63))], data=bytes(32)),
        "expected 9223372036854775904 bytes",
    ),
    "row length": (
        header([(b"t", (100,), Q.Q4_K, 0)], data=bytes(288)),
        "has rows of 100 weights, expected a multiple of 256 for Q4_K",
    ),
    "no dimensions": (
        header([(b"t", (), Q.Q8_0, 0)], data=bytes(64)),
        "has rows of 1 weights, expected a multiple of 32 for Q8_0",
    ),
    "crooked offset": (header([(b"t", (8,), Q.F32, 4)], data=bytes(64)), "starts at 4, expected"),
    "overlap": (
        header([(b"t", (16,), Q.F32, 0), (b"u", (8,), Q.F32, 32)], data=bytes(64)),
        "tensors 't' and 'u' overlap",
    ),
    "duplicate": (
        header([(b"t", (8,), Q.F32, 0), (b"t", (8,), Q.F32, 32)], data=bytes(64)),
        "has the tensor 't' twice",
    ),
    "dimensions": (header([(b"t", (1,) * 9, Q.F32, 0)], data=bytes(64)), "has 9 dimensions"),
    "name not text": (header([(b"\xff\xfe", (8,), Q.F32, 0)], data=bytes(64)), "not UTF-8"),
    "name too long": (header([(b"n" * 2000, (8,), Q.F32, 0)], data=bytes(64)), "at most 1024"),
    "header cut": (header([(b"t", (8,), Q.F32, 0)])[:50], "its header goes on to byte"),
    "value type": (header(metadata=[(b"k", 77, b"")], data=bytes(64)), "has value type 77"),
    "long string": (
        header(metadata=[(b"k", 8, struct.pack("<Q", 1 << 50))], data=bytes(64)),
        "its header goes on to byte 1125899906842669",
    ),
    "long array": (
        header(metadata=[(b"k", 9, struct.pack("<IQ", 8, 1 << 50))], data=bytes(64)),
        "announces an array of 1125899906842624 elements",
    ),
    "deep array": (
        header(metadata=[(b"k", 9, struct.pack("<IQ", 9, 1) * 9)], data=bytes(640)),
        "at depth 5",
    ),
    "key twice": (header(metadata=[(b"k", 0, b"1"), (b"k", 0, b"1")], data=bytes(9)), "'k' twice"),
    "alignment": (
        header(metadata=[(b"general.alignment", 4, struct.pack("<I", 24))]),
        "general.alignment is 24, expected a power of two",
    ),
    "split": (
        header(
            metadata=[
                (b"split.no", 2, struct.pack("<H", 0)),
                (b"split.count", 2, struct.pack("<H", 3)),
            ]
        ),
        "is part 1 of 3 of a split model; expected one file. Merge the parts",
    ),
}


@pytest.mark.parametrize("content, words", BAD.values(), ids=BAD)
def test_bad_input_gets_one_plain_sentence(tmp_path, content, words):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFFileError) as error:
        GGUFFile(path)
    message = str(error.value)
    assert words in message
    assert message.startswith("bad.gguf ") and message.endswith(".") and "\n" not in message
    assert error.value.__cause__ is None


def test_a_file_cut_anywhere_says_so(file):
    content = file.read_bytes()
    for keep in (len(content) - 4096 % len(content), len(content) // 2, 200, 30):
        file.write_bytes(content[:keep])
        with pytest.raises(GGUFFileError, match="incomplete"):
            GGUFFile(file)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "nowhere.gguf")
