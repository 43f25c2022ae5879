"""The host's QwenImageTransformerBlock."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import PROBE_TOKENS, FusedBlock, attention_of, is_table, rms_eps, turns

_NO_OPTIONS: dict[str, Any] = {}


class QwenImageBlock(FusedBlock):
    """Image and text streams with joint attention, each modulated by shift, scale and gate."""

    needles: ClassVar = {
        "forward": (
            "img_mod1, img_mod2 = img_mod_params.chunk(2, dim=-1)",
            "self._modulate(self.img_norm1(hidden_states), img_mod1",
            "self._modulate(self.txt_norm1(encoder_hidden_states), txt_mod1",
            "self._modulate(self.img_norm2(hidden_states), img_mod2",
            "self.img_mlp(img_modulated2)",
            "self.txt_mlp(txt_modulated2)",
            "return encoder_hidden_states, hidden_states",
        ),
        "_modulate": (
            "shift, scale, gate = torch.chunk(mod_params, 3, dim=-1)",
            "torch.addcmul(shift.unsqueeze(1), x, 1 + scale.unsqueeze(1))",
        ),
        "attn.forward": (
            "self.norm_q(img_query)",
            "self.norm_added_k(txt_key)",
            "joint_query = torch.cat([txt_query, img_query], dim=2)",
            "apply_rope1(joint_query, image_rotary_emb)",
            "optimized_attention_masked(joint_query, joint_key, joint_value, self.heads,",
            "img_attn_output = self.to_out[0](img_attn_output)",
            "txt_attn_output = self.to_add_out(txt_attn_output)",
        ),
    }

    def __init__(self, block: Any, read: Any = None) -> None:
        attention = block.attn
        norms = [
            *(attention.norm_q, attention.norm_k),
            *(attention.norm_added_q, attention.norm_added_k),
        ]
        plain_norms = [block.img_norm1, block.img_norm2, block.txt_norm1, block.txt_norm2]
        super().__init__(block, norms, [attention, attention.to_out[1], *plain_norms], read)
        self.attention = attention
        self.heads, self.head_dim = int(attention.heads), int(attention.dim_head)
        self.plain_norms = plain_norms

    def problem(self, device: torch.device) -> str:
        if any(norm.weight is not None or norm.bias is not None for norm in self.plain_norms):
            return "a layer norm has a weight"
        return super().problem(device)

    def __call__(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        temb: Tensor,
        image_rotary_emb: Any = None,
        timestep_zero_index: Any = None,
        transformer_options: dict[str, Any] = _NO_OPTIONS,
    ) -> tuple[Tensor, Tensor]:
        image, text, options = hidden_states, encoder_hidden_states, transformer_options
        table = image_rotary_emb
        if isinstance(table, Tensor) and table.ndim == 6:
            table = table.transpose(1, 2)
        if (
            timestep_zero_index is not None
            or encoder_hidden_states_mask is not None
            or not self._takes(image, text, table, options)
        ):
            # Only newer hosts have the argument.
            more = (
                {} if timestep_zero_index is None else {"timestep_zero_index": timestep_zero_index}
            )
            output: tuple[Tensor, Tensor] = self.plain(
                image, text, encoder_hidden_states_mask, temb, image_rotary_emb,
                transformer_options=options, **more,
            )  # fmt: skip
            return output
        from ..kernels import block_ops as ops

        block = self.block
        shift, scale, gate, shift2, scale2, gate2 = block.img_mod(temb).chunk(6, dim=-1)
        t_shift, t_scale, t_gate, t_shift2, t_scale2, t_gate2 = block.txt_mod(temb).chunk(6, dim=-1)
        eps = [float(norm.eps) for norm in self.plain_norms]
        attended_image, attended_text = self._attend(
            ops.norm_modulate(image, None, scale, shift, eps[0], True),
            ops.norm_modulate(text, None, t_scale, t_shift, eps[2], True),
            table,
            options,
        )
        image = ops.gated_add(image, _rows(attended_image), gate, None, 0.0, False)
        text = ops.gated_add(text, _rows(attended_text), t_gate, None, 0.0, False)
        h = block.img_mlp(ops.norm_modulate(image, None, scale2, shift2, eps[1], True))
        image = ops.gated_add(image, _rows(h), gate2, None, 0.0, False)
        h = block.txt_mlp(ops.norm_modulate(text, None, t_scale2, t_shift2, eps[3], True))
        text = ops.gated_add(text, _rows(h), t_gate2, None, 0.0, False)
        return text, image

    def _takes(self, image: Tensor, text: Tensor, table: Any, options: Any) -> bool:
        tokens = text.shape[1] + image.shape[1]
        return (
            text.shape[1] > 0
            and image.is_contiguous()
            and text.is_contiguous()
            and text.dtype is image.dtype
            and is_table(table, image.shape[0], tokens, self.head_dim)
            and not options.get("patches")
            and not options.get("patches_replace")
            and self.undisturbed()
        )

    def _attend(
        self, image: Tensor, text: Tensor, table: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        from ..kernels import block_ops as ops

        attention = self.attention
        batch, text_tokens, _ = text.shape
        shape = (batch, text_tokens + image.shape[1], self.heads, self.head_dim)
        joint_q, joint_k, joint_v = (
            torch.empty(shape, dtype=image.dtype, device=image.device) for _ in range(3)
        )
        joint = joint_q, joint_k, joint_v
        eps = rms_eps(attention.norm_q.eps, image.dtype, image.device)
        q, k, v = attention.to_q(image), attention.to_k(image), attention.to_v(image)
        with self.weight(0, image) as q_weight, self.weight(1, image) as k_weight:
            ops.qk_norm_rope(q, k, v, q_weight, k_weight, table, joint, text_tokens, eps)
        q, k, v = attention.add_q_proj(text), attention.add_k_proj(text), attention.add_v_proj(text)
        eps = rms_eps(attention.norm_added_q.eps, image.dtype, image.device)
        with self.weight(2, text) as q_weight, self.weight(3, text) as k_weight:
            ops.qk_norm_rope(q, k, v, q_weight, k_weight, table, joint, 0, eps)
        q, k, v = (part.transpose(1, 2) for part in joint)
        output = attention_of(attention)(
            q, k, v, self.heads, None, transformer_options=options, skip_reshape=True
        )
        attended_image = attention.to_out[0](output[:, text_tokens:])
        return attended_image, attention.to_add_out(output[:, :text_tokens])

    def probe_arguments(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        width = self.heads * self.head_dim
        text_tokens = 7

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype)

        return {
            "hidden_states": random(1, PROBE_TOKENS, width),
            "encoder_hidden_states": random(1, text_tokens, width),
            "encoder_hidden_states_mask": None,
            "temb": random(1, self.block.img_mod[1].in_features),
            "image_rotary_emb": turns(PROBE_TOKENS + text_tokens, self.head_dim, device, dtype),
            "transformer_options": {},
        }


def _rows(x: Tensor) -> Tensor:
    """`x` with its tokens next to each other, as the kernel reads them."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
