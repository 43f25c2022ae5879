"""The loop around a bare diffusers transformer: layout of the tokens, sign and guidance."""

import pytest
import torch
from speed_tier.bench import bare_diffusers
from speed_tier.bench.bare_diffusers import BareTransformer, _packed, _unpacked
from speed_tier.tests.speed import tiny


class Straight:
    """Says what takes any latent to `target` in a straight line, as each family states it."""

    def __init__(self, target):
        self.target = target

    def __call__(self, x=None, t=None, captions=None, return_dict=True, **more):
        if x is None:
            rows, columns = more["img_shapes"][0][0][1:]
            latent = _unpacked(more["hidden_states"].float(), rows, columns)
            return (_packed((latent - self.target) / more["timestep"][0]),)
        flow = torch.stack(list(x)).squeeze(2).float() - self.target
        return (list(-(flow / (1.0 - t[0])).unsqueeze(2)),)


@pytest.mark.parametrize("family", ["z_image", "qwen_image"])
@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_the_loop_ends_where_the_flow_leads(monkeypatch, family, cfg):
    monkeypatch.setattr(bare_diffusers, "_random_transformer", lambda *_: Straight(2.0))
    steps = []
    bare = BareTransformer(family, layers=None)
    latents = bare.sample(
        64, 96, batch=2, steps=4, cfg=cfg, callback=lambda step, *_: steps.append(step)
    )
    assert latents.shape == (2, 16, 12, 8)
    assert steps == [0, 1, 2, 3]
    assert torch.allclose(latents, torch.full_like(latents, 2.0), atol=0.05)  # the model is bf16


def test_tokens_are_patches_of_two_by_two():
    x = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    tokens = _packed(x)
    assert tokens.shape == (2, 6, 12)
    assert torch.equal(tokens[0, 1], x[0, :, 0:2, 2:4].reshape(-1))
    assert torch.equal(_unpacked(tokens, 2, 3), x)


def test_rope_tables_are_those_of_a_whole_model():
    model = bare_diffusers._random_transformer("qwen_image", 0, torch.device("cpu"))
    whole = tiny.qwen_image()
    assert not [name for name, value in vars(model.pos_embed).items() if _is_meta(value)]
    assert type(model.pos_embed) is type(whole.pos_embed)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def _is_meta(value):
    return isinstance(value, torch.Tensor) and value.is_meta
