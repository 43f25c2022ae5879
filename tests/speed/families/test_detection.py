"""Families are recognised by their structure, and what only looks alike is refused."""

import pytest
import torch
from speed_tier.speed.families import FAMILIES, detect_family, not_ours
from speed_tier.speed.families.base import has, is_linear, reach
from speed_tier.tests.speed import tiny
from torch import nn

ATTENTION = "transformer_blocks.0.attn"


def found(module):
    detected = detect_family(module)
    return detected and (detected[0].name, detected[1])


def lumina2():
    from diffusers import Lumina2Transformer2DModel

    return Lumina2Transformer2DModel(
        hidden_size=24,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=2,
        multiple_of=8,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(8, 8, 8),
        cap_feat_dim=8,
    )


def qwen_image_21():
    diffusers = pytest.importorskip("diffusers")
    if not hasattr(diffusers, "QwenImage21Transformer2DModel"):
        pytest.skip("needs a diffusers with Qwen-Image-2.1; found none")
    return diffusers.QwenImage21Transformer2DModel(
        in_channels=8,
        out_channels=8,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=8,
        axes_dims_rope=(4, 6, 6),
    )


def unet():
    from diffusers import UNet2DModel

    return UNet2DModel(
        block_out_channels=(8,),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )


def qwen_without(part):
    model = tiny.qwen_image(layers=1)
    owner, _, name = part.rpartition(".")
    delattr(reach(model, owner) if owner else model, name)
    return model


def test_the_rows():
    assert [family.name for family in FAMILIES] == ["z_image", "qwen_image"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (tiny.z_image, ("z_image", "diffusers")),
        (lambda: tiny.z_image(siglip_feat_dim=8), ("z_image", "diffusers")),
        (tiny.host_next_dit, ("z_image", "comfyui")),
        (tiny.qwen_image, ("qwen_image", "diffusers")),
    ],
    ids=["z-image", "z-image omni", "host z-image", "qwen-image"],
)
def test_ours_are_recognised(make, expected):
    assert found(make()) == expected


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lumina2, "Lumina2Transformer2DModel"),
        (lambda: tiny.host_next_dit(pad_tokens=False), "Module"),
        (lambda: tiny.host_next_dit(activation_first=True), "Module"),
        (qwen_image_21, "QwenImage21Transformer2DModel"),
        (unet, "UNet2DModel"),
        (nn.Module, "Module"),
        (nn.Sequential, "Sequential"),
        (lambda: nn.Linear(1, 1), "Linear"),
        (lambda: qwen_without(f"{ATTENTION}.add_k_proj"), "QwenImageTransformer2DModel"),
        (lambda: qwen_without("txt_norm"), "QwenImageTransformer2DModel"),
        (lambda: tiny.qwen_image(layers=0), "QwenImageTransformer2DModel"),
        (lambda: tiny.z_image(layers=0), "ZImageTransformer2DModel"),
    ],
    ids=[
        "lumina 2", "host lumina 2, no pad tokens", "host lumina 2, activation first",
        "qwen-image 2.1", "unet", "empty", "empty sequence", "linear", "qwen without a projection",
        "qwen without a norm", "qwen without blocks", "z-image without layers",
    ],
)  # fmt: skip
def test_look_alikes_are_refused_by_class_name(make, name):
    model = make()
    assert found(model) is None
    assert not_ours(model) == f"not a Z-Image or Qwen-Image transformer; found {name}"


def test_the_class_name_alone_is_not_enough():
    impostor = type("ZImageTransformer2DModel", (nn.Module,), {})
    assert found(impostor()) is None


def test_paths_through_containers():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 3), nn.SiLU())})
    assert reach(model, "a.0.weight").shape == (3, 2)
    assert reach(model, "a.7") is None
    assert reach(model, "a.0.nothing.more") is None
    assert has(model, "a.0", "a.1")
    assert not has(model, "a.0", "a.2")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(1, 1), True),
        (nn.Linear(1, 1, bias=False), True),
        (nn.SiLU(), False),
        (None, False),
        (torch.zeros(1), False),
    ],
    ids=["linear", "without bias", "activation", "none", "tensor"],
)
def test_is_linear(module, expected):
    assert is_linear(module) is expected


@pytest.mark.parametrize(
    ("latent", "text", "tokens"),
    [((1, 16, 128, 128), 0, 4096), ((2, 16, 1, 8, 8), 5, 21), ((1, 16, 9, 8), 0, 18)],
)
def test_tokens_of_a_latent(latent, text, tokens):
    assert FAMILIES[0].tokens(latent, text) == tokens
