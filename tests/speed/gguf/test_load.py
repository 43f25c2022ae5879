"""Files of each family and style as named tensors, against the gguf package's dequantisation."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from speed_tier.speed.errors import GGUFFileError
from speed_tier.speed.gguf import GGUFFile, QuantTensorSpec, load_gguf
from speed_tier.tests.speed.gguf import packer

ALL_TYPES = [t for t in Q if t in gguf.quants._type_traits or t in (Q.F32, Q.F16)]
RECIPES = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q4_0", "Q5_0", "BF16")


def dense(weight, dtype=torch.float32):
    return weight.dequantize(dtype) if isinstance(weight, QuantTensorSpec) else weight.to(dtype)


def oracle(stored, qtype, shape):
    out = gguf.quants.dequantize(np.ascontiguousarray(stored), qtype) if stored.size else stored
    return torch.from_numpy(np.array(out, dtype=np.float32)).reshape(shape)


def check(loaded, plan, stored, prefix=""):
    """Every tensor of the plan equals gguf-py's value of its bytes."""
    assert set(loaded.tensors) == {name.removeprefix(prefix) for name, *_ in plan}
    for name, shape, qtype in plan:
        weight = loaded.tensors[name.removeprefix(prefix)]
        expected = oracle(stored[name], qtype, shape)
        assert torch.equal(dense(weight).flatten(), expected.flatten()), name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["z_image", "qwen_image"])
def test_real_mixes(tmp_path, family, recipe):
    layers = 2 if family == "z_image" else 3
    table = packer.z_image(layers) if family == "z_image" else packer.qwen_image(layers)
    plan = packer.mixed(table, recipe, layers)
    stored = packer.write(tmp_path / "m.gguf", plan)
    loaded = load_gguf(tmp_path / "m.gguf")
    assert loaded.family == family
    check(loaded, plan, stored)
    for name, shape, qtype in plan:
        weight = loaded.tensors[name]
        if qtype in packer.PLAIN:
            assert isinstance(weight, torch.Tensor) and weight.shape == shape
            assert weight.dtype is {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}[qtype]
        else:
            assert isinstance(weight, QuantTensorSpec) and weight.shape == shape
    assert sum(loaded.type_counts.values()) == len(plan)


@pytest.mark.parametrize("qtype", ALL_TYPES, ids=lambda t: t.name)
def test_every_type_loads(tmp_path, qtype):
    plan = [
        (n, s, qtype if len(s) == 2 and s[-1] % 256 == 0 and "layers." in n else Q.F32)
        for n, s in packer.z_image(1)
    ]
    stored = packer.write(tmp_path / "m.gguf", plan)
    loaded = load_gguf(tmp_path / "m.gguf")
    check(loaded, plan, stored)
    slow = [n for n in loaded.notes if "no fast kernel" in n]
    assert len(slow) == (qtype.name[:3] in ("IQ1", "IQ2", "IQ3", "TQ1", "TQ2", "MXF", "NVF"))
    if slow:
        assert f"6 tensors of type {qtype.name}" in slow[0]


def test_the_file_is_not_copied(tmp_path):
    plan = packer.mixed(packer.z_image(), "Q4_K_M", 2)
    packer.write(tmp_path / "m.gguf", plan)
    loaded = load_gguf(tmp_path / "m.gguf")
    low = loaded.file.span(0, 1).data_ptr()
    high = low + (tmp_path / "m.gguf").stat().st_size
    for name, weight in loaded.tensors.items():
        tensor = weight.packed if isinstance(weight, QuantTensorSpec) else weight
        assert low <= tensor.data_ptr() < high, name


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "model."])
def test_prefix_and_no_metadata(tmp_path, prefix):
    plan = [(prefix + n, s, q) for n, s, q in packer.mixed(packer.qwen_image(), "Q4_K_S", 3)]
    stored = packer.write(tmp_path / "m.gguf", plan, arch=None)
    check(load_gguf(tmp_path / "m.gguf"), plan, stored, prefix)


@pytest.mark.parametrize("qtype", [Q.F32, Q.F16, Q.BF16, Q.Q8_0], ids=lambda t: t.name)
@pytest.mark.parametrize("flat", [True, False])
def test_pad_tokens(tmp_path, qtype, flat):
    """Stored with one dimension or two, in any type: (1, dim), and no byte taken for a value."""
    plan = packer.mixed(packer.z_image(), "Q8_0", 2)
    plan = [
        (n, s[1:] if flat else s, qtype) if n.endswith("pad_token") else (n, s, q)
        for n, s, q in plan
    ]
    stored = packer.write(tmp_path / "m.gguf", plan)
    loaded = load_gguf(tmp_path / "m.gguf")
    for name in ("x_pad_token", "cap_pad_token"):
        weight = loaded.tensors[name]
        assert isinstance(weight, torch.Tensor) and weight.shape == (1, packer.DIM)
    check(loaded, plan, stored)


def test_quantised_norms_and_embedders_become_plain(tmp_path):
    """Some converters quantise everything that divides."""
    plan = [(n, s, Q.Q8_0 if s[-1] % 32 == 0 else Q.F32) for n, s in packer.z_image()]
    stored = packer.write(tmp_path / "m.gguf", plan)
    loaded = load_gguf(tmp_path / "m.gguf", plain_dtype=torch.bfloat16)
    packed = {n for n, w in loaded.tensors.items() if isinstance(w, QuantTensorSpec)}
    assert packed == {n for n, s, q in plan if len(s) == 2 and ("layers." in n or "refiner." in n)}
    norm = "layers.0.attention_norm1.weight"
    expected = oracle(stored[norm], Q.Q8_0, (packer.DIM,))
    assert torch.equal(loaded.tensors[norm], expected.bfloat16())
    assert loaded.tensors["x_embedder.weight"].shape == (packer.DIM, 64)


def test_recorded_original_shape(tmp_path):
    plan = [
        (n, (packer.DIM * 2, 32), Q.Q8_0) if n == "x_embedder.weight" else (n, s, q)
        for n, s, q in packer.mixed(packer.z_image(), "Q8_0", 2)
    ]
    key = "comfy.gguf.orig_shape.x_embedder.weight"
    packer.write(tmp_path / "m.gguf", plan, metadata={key: [packer.DIM, 16, 2, 2]})
    loaded = load_gguf(tmp_path / "m.gguf")
    assert loaded.tensors["x_embedder.weight"].shape == (packer.DIM, 16, 2, 2)
    packer.write(tmp_path / "m.gguf", plan, metadata={key: [3, 5]})
    with pytest.raises(GGUFFileError, match=r"records \[3, 5\] as the original shape"):
        load_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("recipe", ["Q8_0", "BF16", "Q4_K_M"])
def test_diffusers_names_from_a_native_file(tmp_path, recipe):
    plan = packer.mixed(packer.z_image(), recipe, 2)
    stored = packer.write(tmp_path / "m.gguf", plan)
    loaded = load_gguf(tmp_path / "m.gguf", naming="diffusers")
    assert set(loaded.tensors) == {n for n, _ in packer.z_image(split=True)}
    fused = "layers.1.attention.qkv.weight"
    qtype = next(q for n, _, q in plan if n == fused)
    expected = oracle(stored[fused], qtype, (3 * packer.DIM, packer.DIM)).chunk(3)
    for part, letter in zip(expected, "qkv", strict=True):
        assert torch.equal(dense(loaded.tensors[f"layers.1.attention.to_{letter}.weight"]), part)


@pytest.mark.parametrize("recipe", ["Q8_0", "BF16", "Q6_K"])
def test_native_names_from_a_diffusers_file(tmp_path, recipe):
    plan = packer.mixed(packer.z_image(split=True), recipe, 2)
    stored = packer.write(tmp_path / "m.gguf", plan)
    loaded = load_gguf(tmp_path / "m.gguf")
    assert set(loaded.tensors) == {n for n, _ in packer.z_image()}
    fused = loaded.tensors["layers.0.attention.qkv.weight"]
    parts = [f"layers.0.attention.to_{c}.weight" for c in "qkv"]
    qtype = next(q for n, _, q in plan if n == parts[0])
    expected = torch.cat([oracle(stored[n], qtype, (packer.DIM, packer.DIM)) for n in parts])
    assert torch.equal(dense(fused), expected)
    if isinstance(fused, QuantTensorSpec):
        start = GGUFFile(tmp_path / "m.gguf").tensors[parts[0]].offset
        view = loaded.file.span(start, 1)
        assert fused.packed.data_ptr() == view.data_ptr(), "neighbours are joined without a copy"


def test_q_k_v_apart_in_the_file_are_joined_by_copy(tmp_path):
    plan = packer.mixed(packer.z_image(split=True), "Q8_0", 2)
    plan.sort(key=lambda row: row[0].endswith("to_k.weight"))
    stored = packer.write(tmp_path / "m.gguf", plan)
    fused = load_gguf(tmp_path / "m.gguf").tensors["layers.0.attention.qkv.weight"]
    parts = [stored[f"layers.0.attention.to_{c}.weight"] for c in "qkv"]
    assert isinstance(fused, QuantTensorSpec)
    assert np.array_equal(fused.packed.numpy(), np.concatenate(parts))


def test_q_k_v_of_different_types_are_joined_plain_and_said(tmp_path):
    plan = packer.mixed(packer.z_image(split=True), "Q4_K_M", 2)
    packer.write(tmp_path / "m.gguf", plan)
    loaded = load_gguf(tmp_path / "m.gguf")
    assert loaded.tensors["layers.0.attention.qkv.weight"].dtype is torch.bfloat16
    assert any(note.startswith("2 q, k, v groups have different types") for note in loaded.notes)


def test_a_missing_k_is_said(tmp_path):
    plan = packer.mixed(packer.z_image(split=True), "Q8_0", 2)
    plan = [row for row in plan if row[0] != "layers.1.attention.to_k.weight"]
    packer.write(tmp_path / "m.gguf", plan)
    with pytest.raises(GGUFFileError, match=r"lacks one of layers\.1\.attention\.to_q"):
        load_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(("split", "naming"), [(False, "diffusers"), (True, "native")])
def test_q_k_v_of_odd_shapes_are_refused_in_words(tmp_path, split, naming):
    odd = {
        "layers.0.attention.qkv.weight": (packer.DIM + 1, packer.DIM),
        "layers.0.attention.to_k.weight": (packer.DIM, 2 * packer.DIM),
    }
    plan = packer.mixed(packer.z_image(split=split), "Q8_0", 2)
    plan = [(n, odd.get(n, s), q) for n, s, q in plan]
    packer.write(tmp_path / "m.gguf", plan)
    with pytest.raises(GGUFFileError, match=r"expected (three equal parts of|equal) rows"):
        load_gguf(tmp_path / "m.gguf", naming=naming)


@pytest.mark.parametrize("variant", ["edit_2511", "layered"])
def test_qwen_variants(tmp_path, variant):
    plan = packer.mixed(packer.qwen_image(variant=variant), "Q4_K_M", 3)
    stored = packer.write(tmp_path / "m.gguf", plan)
    loaded = load_gguf(tmp_path / "m.gguf")
    assert loaded.variant == variant
    check(loaded, plan, stored)
    if variant == "edit_2511":
        assert loaded.tensors["__index_timestep_zero__"].shape == (0,)
    else:
        added = loaded.tensors["time_text_embed.addition_t_embedding.weight"]
        assert isinstance(added, torch.Tensor) and added.shape == (2, packer.DIM)


def test_types_that_are_no_weights_are_refused(tmp_path):
    plan = packer.mixed(packer.z_image(), "Q8_0", 2)
    path = tmp_path / "m.gguf"
    packer.write(path, plan)
    content = bytearray(path.read_bytes())
    name = b"final_layer.adaLN_modulation.1.bias"
    at = content.index(name) + len(name) + 4 + 8
    assert content[at] == Q.F32
    content[at] = Q.I32  # integers are values
    path.write_bytes(content)
    assert load_gguf(path).tensors[name.decode()].dtype is torch.int32
    content[at] = Q.Q8_1
    path.write_bytes(content)
    with pytest.raises(GGUFFileError, match="of type Q8_1, which holds intermediate results"):
        load_gguf(path)


def test_naming_is_checked():
    with pytest.raises(ValueError, match="native or diffusers; found 'other'"):
        load_gguf("x.gguf", naming="other")
