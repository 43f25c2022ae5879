"""The host's JointTransformerBlock, as Z-Image uses it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import PROBE_TOKENS, FusedBlock, attention_of, drift_of, is_table, rms_eps, turns

_NO_OPTIONS: dict[str, Any] = {}
_HOSTS_EPS = "self.q_norm.eps if self.q_norm.eps is not None else torch.finfo(torch.float32).eps"


class ZImageBlock(FusedBlock):
    """Sandwich norms around attention and a SwiGLU; modulated by scale and a tanh gate, or not."""

    needles: ClassVar = {
        "forward": (
            "scale_msa, gate_msa, scale_mlp, gate_mlp = "
            "self.adaLN_modulation(adaln_input).chunk(4, dim=1)",
            "gate_msa.unsqueeze(1).tanh()",
            "gate_mlp.unsqueeze(1).tanh()",
            "modulate(self.attention_norm1(x), scale_msa",
            "modulate(self.ffn_norm1(x), scale_mlp",
            "self.attention_norm2(",
            "self.ffn_norm2(",
        ),
        "attention.forward": (
            "self.qkv(x)",
            "torch.split(",
            "freqs_cis",
            "optimized_attention_masked(xq.movedim(1, 2), xk.movedim(1, 2), xv.movedim(1, 2), "
            "self.n_local_heads, x_mask, skip_reshape=True",
            "return self.out(output)",
        ),
        "feed_forward.forward": ("self.w2(self._forward_silu_gating(self.w1(x), self.w3(x)))",),
        "feed_forward._forward_silu_gating": ("F.silu(x1) * x3",),
    }

    def __init__(self, block: Any, read: Any = None) -> None:
        attention, feed_forward = block.attention, block.feed_forward
        norms = [
            *(block.attention_norm1, block.attention_norm2, block.ffn_norm1, block.ffn_norm2),
            *(attention.q_norm, attention.k_norm),
        ]
        super().__init__(block, norms, [attention, feed_forward], read)
        self.heads, self.head_dim = int(attention.n_local_heads), int(attention.head_dim)
        self.width = self.heads * self.head_dim
        self.modulation = block.adaLN_modulation if block.modulation else None
        self.attention = attention
        self.qkv, self.out = attention.qkv, attention.out
        self.w1, self.w2, self.w3 = feed_forward.w1, feed_forward.w2, feed_forward.w3
        self.qk_eps = getattr(attention.q_norm, "eps", None)
        # Newer hosts do not leave the epsilon of q and k to torch.
        if self.qk_eps is None and not drift_of(type(attention).forward, (_HOSTS_EPS,)):
            self.qk_eps = torch.finfo(torch.float32).eps

    def problem(self, device: torch.device) -> str:
        attention = self.attention
        if attention.n_local_kv_heads != attention.n_local_heads:
            return "the heads of k and v are shared"
        if not hasattr(attention.q_norm, "weight"):
            return "q and k are not normed"
        return super().problem(device)

    def __call__(
        self,
        x: Tensor,
        x_mask: Tensor | None,
        freqs_cis: Tensor,
        adaln_input: Tensor | None = None,
        timestep_zero_index: Any = None,
        transformer_options: dict[str, Any] = _NO_OPTIONS,
    ) -> Tensor:
        if not self._takes(x, freqs_cis, adaln_input, timestep_zero_index, transformer_options):
            # Only newer hosts have the argument.
            more = (
                {} if timestep_zero_index is None else {"timestep_zero_index": timestep_zero_index}
            )
            output: Tensor = self.plain(
                x, x_mask, freqs_cis, adaln_input, transformer_options=transformer_options, **more
            )
            return output
        from ..kernels import block_ops as ops

        scales: tuple[Tensor | None, ...] = (None, None, None, None)
        if self.modulation is not None:
            scales = self.modulation(adaln_input).chunk(4, dim=1)
        scale_attention, gate_attention, scale_mlp, gate_mlp = scales
        given = [*(norm.eps for norm in self.norms[:4]), self.qk_eps]
        eps = [rms_eps(value, x.dtype, x.device) for value in given]
        with self.weight(0, x) as weight:
            h = ops.norm_modulate(x, weight, scale_attention, None, eps[0], False)
        h = self._attend(h, x_mask, freqs_cis, transformer_options, eps[4])
        with self.weight(1, x) as weight:
            x = ops.gated_add(x, h, gate_attention, weight, eps[1], True)
        with self.weight(2, x) as weight:
            h = ops.norm_modulate(x, weight, scale_mlp, None, eps[2], False)
        h = self.w2(ops.swiglu(self.w1(h), self.w3(h)))
        with self.weight(3, x) as weight:
            return ops.gated_add(x, h, gate_mlp, weight, eps[3], True)

    def _takes(
        self, x: Tensor, freqs_cis: Any, adaln_input: Any, timestep_zero_index: Any, options: Any
    ) -> bool:
        return (
            timestep_zero_index is None
            and (adaln_input is None) == (self.modulation is None)
            and x.is_contiguous()
            and x.ndim == 3
            and is_table(freqs_cis, x.shape[0], x.shape[1], self.head_dim)
            and not options.get("patches")
            and not options.get("patches_replace")
            and self.undisturbed()
        )

    def _attend(
        self, h: Tensor, mask: Any, freqs_cis: Tensor, options: dict[str, Any], eps: float
    ) -> Tensor:
        from ..kernels import block_ops as ops

        batch, tokens, _ = h.shape
        shape = (batch, tokens, self.heads, self.head_dim)
        qkv = self.qkv(h)
        q, k, v = qkv.split(self.width, dim=-1)
        q_out, k_out = (torch.empty(shape, dtype=h.dtype, device=h.device) for _ in range(2))
        out = (q_out, k_out, None)
        with self.weight(4, h) as q_weight, self.weight(5, h) as k_weight:
            ops.qk_norm_rope(q, k, None, q_weight, k_weight, freqs_cis, out, 0, eps)
        v = v.unflatten(-1, (self.heads, self.head_dim))
        output = attention_of(self.attention)(
            q_out.movedim(1, 2),
            k_out.movedim(1, 2),
            v.movedim(1, 2),
            self.heads,
            mask,
            skip_reshape=True,
            transformer_options=options,
        )
        attended: Tensor = self.out(output)
        return attended

    def probe_arguments(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        modulation = None
        if self.modulation is not None:
            modulation = torch.randn(1, self.modulation[0].in_features, device=device, dtype=dtype)
        return {
            "x": torch.randn(1, PROBE_TOKENS, self.width, device=device, dtype=dtype),
            "x_mask": None,
            "freqs_cis": turns(PROBE_TOKENS, self.head_dim, device).movedim(1, 2),
            "adaln_input": modulation,
            "transformer_options": {},
        }
