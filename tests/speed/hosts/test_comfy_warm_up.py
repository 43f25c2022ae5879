"""From which calls a call of another size can be made."""

import pytest
import torch
from speed_tier.speed.hosts.comfy import _bound_to_its_size

PROMPT, POOLED, PICTURE = torch.zeros(1, 12, 64), torch.zeros(1, 64), torch.zeros(1, 16, 8, 8)


@pytest.mark.parametrize(
    ("args", "kwargs", "options", "reason"),
    [
        ((None, PROMPT), {}, {}, ""),
        ((), {"c_crossattn": PROMPT, "attention_mask": PROMPT, "num_tokens": [12]}, {}, ""),
        ((), {"clip_text_pooled": POOLED}, {"patches": {}}, ""),
        ((PICTURE, PROMPT), {}, {}, "the call carries c_concat, "),
        ((), {"ref_latents": [PICTURE]}, {}, "the call carries ref_latents, "),
        ((None, PROMPT, {"input": [PROMPT]}), {}, {}, "a ControlNet is applied"),
        ((), {"control": {}}, {}, "a ControlNet is applied"),
        ((), {}, {"patches": {"attn1_patch": [print]}}, "another node's patches "),
    ],
)
def test_what_a_call_may_hold(args, kwargs, options, reason):
    said = _bound_to_its_size(args, kwargs, options)
    assert said.startswith(reason) and bool(said) == bool(reason)
