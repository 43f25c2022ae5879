"""The two VAEs, told by their parts, and the norms with a SiLU behind them."""

import pytest
from speed_tier.speed.families import FAMILIES, VAE_FAMILIES, detect_family, not_ours
from speed_tier.speed.families.vae import part_of
from speed_tier.tests.speed import tiny, tiny_vae
from torch import nn


@pytest.mark.parametrize("kind", ["kl", "wan"])
def test_each_is_known_for_what_it_is(kind):
    vae = tiny_vae.MAKERS[kind]()
    found = detect_family(vae, VAE_FAMILIES)
    assert found == (tiny_vae.FAMILIES[kind], "comfyui")
    assert detect_family(vae, FAMILIES) is None


def test_a_transformer_is_no_vae():
    assert detect_family(tiny.z_image(), VAE_FAMILIES) is None
    assert not_ours(nn.Linear(1, 1), VAE_FAMILIES) == (
        "not the VAE of Z-Image or Qwen-Image; found Linear"
    )
    assert "transformer; found Linear" in not_ours(nn.Linear(1, 1))


@pytest.mark.parametrize("kind", ["kl", "wan"])
@pytest.mark.parametrize("missing", ["encoder", "decoder"])
def test_half_a_vae_is_not_taken(kind, missing):
    vae = tiny_vae.MAKERS[kind]()
    setattr(vae, missing, nn.Identity())
    assert detect_family(vae, VAE_FAMILIES) is None


def test_a_video_vae_of_the_same_layout_is_not_taken():
    vae = tiny_vae.kl()
    vae.decoder.conv_in = nn.Conv3d(4, 16, 3)
    assert detect_family(vae, VAE_FAMILIES) is None


def test_wan_2_2_is_not_taken():
    vae = tiny_vae.wan()
    block = nn.Module()
    block.upsamples = vae.decoder.upsamples
    vae.decoder.upsamples = nn.Sequential(block)
    assert detect_family(vae, VAE_FAMILIES) is None


def test_the_half_that_an_operation_runs():
    vae = tiny_vae.kl()
    assert part_of(vae, "vae decode") is vae.decoder
    assert part_of(vae, "vae encode") is vae.encoder


def test_chains_of_the_kl_decoder():
    part = tiny_vae.kl().decoder
    chains = {chain.path: chain for chain in tiny_vae.FAMILIES["kl"].chains(part)}
    assert list(chains) == [
        *("mid.block_1.norm1", "mid.block_1.norm2", "mid.attn_1.norm"),
        *("up.0.block.0.norm1", "up.0.block.0.norm2", "norm_out"),
    ]
    assert chains["mid.block_1.norm1"].activation is part.mid.block_1.swish
    assert chains["mid.attn_1.norm"].activation is chains["norm_out"].activation is None
    for path, chain in chains.items():
        assert chain.norm is part.get_submodule(path)


def test_a_silu_that_reads_a_time_embedding_as_well_stays_where_it_is():
    part = tiny_vae.kl().decoder
    part.mid.block_1.temb_proj = nn.Linear(1, 1)
    chains = {chain.path: chain for chain in tiny_vae.FAMILIES["kl"].chains(part)}
    assert chains["mid.block_1.norm1"].activation is None


def test_chains_of_the_wan_decoder():
    part = tiny_vae.wan().decoder
    chains = tiny_vae.FAMILIES["wan"].chains(part)
    assert [chain.path for chain in chains] == [
        *("middle.0.residual.0", "middle.0.residual.3"),
        *("upsamples.0.residual.0", "upsamples.0.residual.3", "head.0"),
    ]
    assert all(isinstance(chain.activation, nn.SiLU) for chain in chains)
