"""Where the parts of Qwen-Image are, in diffusers' class. The host's is read in tests/host."""

from speed_tier.speed.families.base import AttentionShape
from speed_tier.speed.families.qwen_image import QWEN_IMAGE
from speed_tier.tests.speed import tiny


def test_blocks_in_order():
    model = tiny.qwen_image(layers=3)
    blocks = QWEN_IMAGE.repeated_blocks(model)
    assert [block.path for block in blocks] == [f"transformer_blocks.{i}" for i in range(3)]
    assert all(model.get_submodule(block.path) is block.module for block in blocks)


def test_two_groups_a_block_image_and_text():
    model = tiny.qwen_image(layers=1)
    image, text = QWEN_IMAGE.projections(model)
    attn = model.transformer_blocks[0].attn
    assert image.path == "transformer_blocks.0.attn"
    assert text.path == "transformer_blocks.0.attn.add"
    assert (image.q, image.k, image.v) == (attn.to_q, attn.to_k, attn.to_v)
    assert (text.q, text.k, text.v) == (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)


def test_attention_shape():
    assert QWEN_IMAGE.attention(tiny.qwen_image()) == AttentionShape(heads=2, head_dim=16)
