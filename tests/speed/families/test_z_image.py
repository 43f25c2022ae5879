"""Where the parts of Z-Image are, in diffusers' class. The host's class is read in tests/host."""

from speed_tier.speed.families.base import AttentionShape
from speed_tier.speed.families.z_image import Z_IMAGE
from speed_tier.tests.speed import tiny


def test_blocks_in_the_order_of_a_forward():
    model = tiny.z_image(layers=3, refiners=2)
    blocks = Z_IMAGE.repeated_blocks(model)
    assert [block.path for block in blocks] == [
        *("context_refiner.0", "context_refiner.1", "noise_refiner.0", "noise_refiner.1"),
        *("layers.0", "layers.1", "layers.2"),
    ]
    assert all(model.get_submodule(block.path) is block.module for block in blocks)


def test_every_attention_is_a_group():
    model = tiny.z_image()
    groups = Z_IMAGE.projections(model)
    assert [group.path for group in groups] == [
        *("context_refiner.0.attention", "noise_refiner.0.attention"),
        *("layers.0.attention", "layers.1.attention"),
    ]
    for group in groups:
        attention = model.get_submodule(group.path)
        assert (group.q, group.k, group.v) == (attention.to_q, attention.to_k, attention.to_v)


def test_the_host_class_has_nothing_to_fuse():
    assert Z_IMAGE.projections(tiny.host_next_dit()) == []


def test_attention_shape():
    assert Z_IMAGE.attention(tiny.z_image()) == AttentionShape(heads=2, head_dim=16)
