"""Bare diffusers transformers at their real size, in a plain Euler loop: peers without a host."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

from .host_session import TEXT_WIDTH, fill_random

CHANNELS = 16
LAYERS = {"z_image": "n_layers", "qwen_image": "num_layers"}  # names of the constructors' arguments
PATCH = 2  # pixels of a latent that one token holds, each way


class BareTransformer:
    """A diffusers transformer with random weights, and the loop that samples with it.

    Args:
        how: "" (eager), "compile" (diffusers' own `compile_repeated_blocks`), or a tier of ours.
    """

    def __init__(self, family: str, layers: int | None, how: str = "") -> None:
        import torch

        self.family = family
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.transformer = _random_transformer(family, layers, self.device)
        self._handle: Any = None
        if how == "compile":
            self.transformer.compile_repeated_blocks(fullgraph=True)
        elif how:
            from speed_tier.speed.hosts.diffusers import apply_tier

            self._handle = apply_tier(self.transformer, how)

    def sample(
        self,
        width: int,
        height: int,
        batch: int = 1,
        steps: int = 8,
        cfg: float = 1.0,
        tokens: int = 64,
        seed: int = 0,
        callback: Callable[..., Any] | None = None,
    ) -> Any:
        """Latents after `steps` Euler steps, (B, 16, H/8, W/8) float32; as host_session.sample."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        shape = (batch, CHANNELS, height // 8, width // 8)
        x = torch.randn(shape, generator=generator).to(self.device)
        prompts = [self._prompt(number, tokens) for number in ((1, 2) if cfg != 1.0 else (1,))]
        sigmas = torch.linspace(1.0, 0.0, steps + 1).tolist()
        with torch.inference_mode():
            for step, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
                flows = [self._flow(x, sigma, prompt) for prompt in prompts]
                flow = flows[0] if cfg == 1.0 else flows[1] + cfg * (flows[0] - flows[1])
                x = x + (following - sigma) * flow
                if callback is not None:
                    callback(step, None, x, steps)
        if self._handle is not None:
            self._handle.finish_run()
        return x.cpu()

    def close(self) -> None:
        """Off the card, and the process as before."""
        import torch

        if self._handle is not None:
            self._handle.remove()
        self._handle = self.transformer = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _prompt(self, seed: int, tokens: int) -> Any:
        import torch

        generator = torch.Generator().manual_seed(seed)
        text = torch.randn(tokens, TEXT_WIDTH[self.family], generator=generator)
        return text.to(self.device, torch.bfloat16)

    def _flow(self, x: Any, sigma: float, prompt: Any) -> Any:
        """The velocity at noise level `sigma`, float32, in the shape of `x`."""
        import torch

        batch = len(x)
        if self.family == "z_image":
            t = torch.full((batch,), 1.0 - sigma, device=self.device, dtype=torch.bfloat16)
            images = list(x.to(torch.bfloat16).unsqueeze(2))
            out = self.transformer(images, t, [prompt] * batch, return_dict=False)[0]
            return -torch.stack(list(out)).squeeze(2).float()
        rows, columns = x.shape[2] // PATCH, x.shape[3] // PATCH
        t = torch.full((batch,), sigma, device=self.device, dtype=torch.bfloat16)
        out = self.transformer(
            hidden_states=_packed(x).to(torch.bfloat16),
            encoder_hidden_states=prompt.expand(batch, -1, -1),
            timestep=t,
            img_shapes=[[(1, rows, columns)]] * batch,
            return_dict=False,
        )[0]
        return _unpacked(out.float(), rows, columns)


def _random_transformer(family: str, layers: int | None, device: Any) -> Any:
    """The model at its real size, bf16."""
    import diffusers
    import torch

    count = {} if layers is None else {LAYERS[family]: layers}
    with torch.device("meta"):
        if family == "z_image":
            model = diffusers.ZImageTransformer2DModel(**count)
        else:
            model = diffusers.QwenImageTransformer2DModel(**count)
    model = model.to(torch.bfloat16).to_empty(device=device).eval()
    if family == "qwen_image":
        # Its RoPE tables are plain attributes, which stay on "meta"; they depend on no width.
        narrow = {"num_layers": 1, "num_attention_heads": 1, "joint_attention_dim": 8}
        model.pos_embed = diffusers.QwenImageTransformer2DModel(**narrow).pos_embed
    fill_random(model, device)
    return model


def _packed(x: Any) -> Any:
    """(B, C, H, W) to (B, H/2 * W/2, C * 4), as Qwen-Image's pipeline does."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH * PATCH)


def _unpacked(x: Any, rows: int, columns: int) -> Any:
    batch, _, depth = x.shape
    x = x.reshape(batch, rows, columns, depth // PATCH**2, PATCH, PATCH)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, rows * PATCH, columns * PATCH)
