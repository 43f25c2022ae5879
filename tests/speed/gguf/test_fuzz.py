"""Mutated files: every one loads or is refused in words, fast, within the file's own memory."""

import random
import struct
import tracemalloc

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from speed_tier.speed.errors import GGUFFileError
from speed_tier.speed.gguf import GGUFFile, QuantTensorSpec, load_gguf
from speed_tier.tests.speed.gguf import packer

CASES = 4000
EDGE_NUMBERS = [0, 1, 2, 31, 32, 255, 256, 1 << 16, 1 << 31, 1 << 32, 1 << 40, 1 << 62, 1 << 63]
EDGE_NUMBERS += [(1 << 64) - 1, (1 << 63) - 1, (1 << 32) - 1]


METADATA = {"general.name": "x", "a.list": ["p", "q"], "b.ints": [1, 2, 3], "c.number": 7}


def written(path, plan):
    """A file's bytes and the length of its header."""
    packer.write(path, plan, metadata=METADATA)
    return path.read_bytes(), min(info.offset for info in GGUFFile(path).tensors.values())


@pytest.fixture
def small_file(tmp_path):
    """Every type, a few rows each: nearly all header."""
    types = [t for t in Q if t in gguf.quants._type_traits or t in (Q.F32, Q.F16)]
    return written(tmp_path / "m.gguf", [(f"layers.{t.name}.weight", (2, 256), t) for t in types])


@pytest.fixture(params=[False, True], ids=["native", "diffusers"])
def model_file(tmp_path, request):
    """A whole tiny model under either stack's names."""
    table = packer.z_image(1, split=request.param)
    return written(tmp_path / "m.gguf", packer.mixed(table, "Q4_K_M", 1))


def mutate(content, header, rng):
    """One to four changes, mostly in the header."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(4, header) if rng.random() < 0.9 else rng.randrange(len(data))
        kind = rng.randrange(6)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", rng.choice(EDGE_NUMBERS))
        elif kind == 3:
            data[at : at + 4] = struct.pack("<I", rng.choice(EDGE_NUMBERS) & 0xFFFFFFFF)
        elif kind == 4:
            del data[at : at + rng.randint(1, 16)]
        else:
            other = rng.randrange(4, header)
            data[at : at + 16] = data[other : other + 16]
    if rng.random() < 0.15:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


@pytest.mark.slow
def test_thousands_of_mutations(tmp_path, small_file):
    data, header = small_file
    rng = random.Random(1234)
    path = tmp_path / "fuzzed.gguf"
    outcomes = {"loaded": 0, "refused": 0}
    tracemalloc.start()
    try:
        for _ in range(CASES):
            mutated = mutate(data, header, rng)
            path.write_bytes(mutated)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                file = GGUFFile(path)
            except GGUFFileError as error:
                outcomes["refused"] += 1
                assert str(error).startswith("fuzzed.gguf ") and str(error).endswith(".")
            else:
                outcomes["loaded"] += 1
                for name, info in file.tensors.items():
                    assert file.raw(name).numel() == info.n_bytes
            # Parsed entries are Python objects of some hundred bytes for each 24 in the file.
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < len(mutated) + (1 << 18), peak
    finally:
        tracemalloc.stop()
    assert outcomes["refused"] > CASES // 2 and outcomes["loaded"] > CASES // 50, outcomes


def test_whole_loads_of_mutations(tmp_path, model_file):
    """Through the names and shapes too: nothing but a plain refusal comes out."""
    data, header = model_file
    rng = random.Random(99)
    path = tmp_path / "fuzzed.gguf"
    loaded = refused = 0
    for _ in range(CASES // 20):
        path.write_bytes(mutate(data, header, rng))
        try:
            result = load_gguf(path, naming=rng.choice(("native", "diffusers")))
        except GGUFFileError:
            refused += 1
            continue
        loaded += 1
        for weight in result.tensors.values():
            if isinstance(weight, QuantTensorSpec):
                assert weight.dequantize(torch.bfloat16).shape == weight.shape
    assert loaded and refused


def test_random_bytes_behind_a_good_magic(tmp_path):
    rng = random.Random(5)
    path = tmp_path / "noise.gguf"
    for _ in range(300):
        version = struct.pack("<I", rng.choice([0, 2, 3]))
        counts = struct.pack("<QQ", rng.randrange(4), rng.randrange(4))
        path.write_bytes(b"GGUF" + version + counts + rng.randbytes(rng.randrange(400)))
        try:
            GGUFFile(path)
        except GGUFFileError as error:
            assert str(error).endswith(".")
