"""Families told by tensors alone, and what is refused in words."""

import pytest
from speed_tier.speed.errors import GGUFFileError
from speed_tier.speed.gguf import names, recognise
from speed_tier.tests.speed.gguf import packer

Z, ZS, QWEN = packer.z_image(), packer.z_image(split=True), packer.qwen_image()


def shapes(table, prefix=""):
    return {prefix + name: shape for name, shape in table}


@pytest.mark.parametrize("arch", ["lumina2", "z_image", "qwen_image", "pig", None])
@pytest.mark.parametrize("prefix", names.PREFIXES)
@pytest.mark.parametrize(
    ("table", "family", "naming"),
    [
        (Z, "z_image", "native"),
        (ZS, "z_image", "diffusers"),
        (QWEN, "qwen_image", "native"),
    ],
)
def test_tensors_decide_whatever_the_tag(table, family, naming, prefix, arch):
    metadata = {} if arch is None else {"general.architecture": arch}
    found = recognise("m.gguf", shapes(table, prefix), metadata)
    assert (found.family, found.naming, found.prefix) == (family, naming, prefix)
    assert found.variant == "base" and found.notes == ()


@pytest.mark.parametrize(
    ("table", "variant", "word"),
    [
        (packer.qwen_image(variant="edit_2511"), "edit_2511", "timestep zero"),
        (packer.qwen_image(variant="layered"), "layered", "Layered"),
        ([*Z, ("t_embedder_2.mlp.0.weight", (8, 8))], "twinflow", "TwinFlow"),
        ([*Z, ("siglip_embedder.1.weight", (8, 8))], "omni", "Omni"),
    ],
)
def test_variants_are_named(table, variant, word):
    found = recognise("m.gguf", shapes(table), {})
    assert found.variant == variant
    assert word in found.notes[0]


def block(name, shape=(8, 8)):
    return [(name, shape)]


REFUSED = {
    "llama text encoder": (block("token_embd.weight") + block("blk.0.attn_q.weight"), "a text enc"),
    "t5 text encoder": (block("enc.blk.0.attn_q.weight"), "found a text encoder, tagged 'made-up'"),
    "hf text encoder": (block("model.layers.0.self_attn.q_proj.weight"), "a text encoder"),
    "vision projector": (block("v.blk.0.attn_q.bias"), "found a vision projector"),
    "vae": (block("decoder.conv_in.weight"), "found a VAE"),
    "lora": (block("diffusion_model.layers.0.attention.qkv.lora_A.weight"), "found a LoRA"),
    "kohya lora": (block("lora_unet_layers_0_attention_out.lokr_w1"), "Load it with a LoRA loader"),
    "flux": (block("double_blocks.0.img_attn.qkv.weight"), "found Flux or HunyuanVideo"),
    "newer qwen": (block("txt_in.text_norm.weight"), "found Qwen-Image 2.1"),
    "lumina": (
        [("cap_embedder.1.weight", (2304, 8)), ("noise_refiner.0.attention_norm1.weight", (8,))],
        "found Lumina 2",
    ),
    "unknown": (block("something.else"), "found 1 tensors, first 'something.else'"),
    "nunchaku z": (
        [*Z, ("layers.0.attention.to_qkv.qweight", (8, 8))],
        "holds Nunchaku (SVDQuant) weights",
    ),
    "nunchaku qwen": (
        [*QWEN, ("transformer_blocks.0.attn.to_qkv.wscales", (8, 8))],
        "Use Nunchaku's own loader",
    ),
    "fp8 marker": ([*Z, ("scaled_fp8", (1,))], "converted from an fp8 model"),
    "fp8 scales": ([*QWEN, ("transformer_blocks.0.attn.to_q.scale_weight", (1,))], "made from the"),
    "nothing": ([], "holds no tensors"),
}


@pytest.mark.parametrize("table, words", REFUSED.values(), ids=REFUSED)
def test_other_models_are_refused_in_words(table, words):
    with pytest.raises(GGUFFileError) as error:
        recognise("m.gguf", shapes(table), {"general.architecture": "made-up"})
    message = str(error.value)
    assert words in message
    assert message.startswith("m.gguf ") and message.endswith(".")


def test_untagged_is_said():
    with pytest.raises(GGUFFileError, match="with no architecture tag"):
        recognise("m.gguf", {"x": (1,)}, {})


def test_z_image_names_go_both_ways():
    native = {n for n, _ in Z if "attention.qkv" not in n}
    diffusers = {n for n, _ in ZS if ".attention.to_" not in n or "to_out" in n}
    assert {names.z_image_name(n, "diffusers") for n in native} == diffusers
    assert {names.z_image_name(n, "native") for n in diffusers} == native
