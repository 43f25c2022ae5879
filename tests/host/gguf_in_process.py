"""Packed models beside dense ones of equal weights, in one process with a real ComfyUI.

Imported by a test it gives `run_scenarios`; started as a script it makes tiny models of one family,
goes through scenarios (gguf_loads.py, gguf_guests.py, gguf_compile.py) and prints one JSON line of
facts for each. What is right or wrong is for the test to say.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
HOST_ARGS = ["--cpu", "--use-pytorch-cross-attention"]
TIMEOUT_S = 900
STEPS, TOKENS, TEXT_WIDTH = 2, 12, 64
LITTLE = 0.1  # of a model's size: the layers with a LoRA are the last that the host offloads
Facts = dict[str, Any]


def run_scenarios(
    arch: str, parts: Iterable[str], files: dict[str, str] | None = None
) -> dict[str, Facts]:
    """Go through lists of scenarios in one fresh process; facts by scenario name."""
    from .provision import lines_of

    lines = lines_of(
        __file__,
        arch,
        ",".join(parts),
        json.dumps(files or {}),
        first_key="name",
        timeout_s=TIMEOUT_S,
        environment={"OMP_NUM_THREADS": "1"},
    )
    return {line["name"]: line["facts"] for line in lines}


def relative(got: Any, expected: Any) -> float:
    """Distance of two latents over the length of the second."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@dataclass
class Pair:
    """A dense model and a packed one of the same weights.

    Attributes:
        dense, quant: The host's patcher and ours.
        packed: Packed layers by the key of their weight.
        plain: The dense model's latents.
        files: Model files by kind, for scenarios that load one.
    """

    arch: str
    dense: Any
    quant: Any
    packed: dict[str, Any]
    plain: Any = None
    files: dict[str, str] = field(default_factory=dict)

    @property
    def both(self) -> tuple[Any, Any]:
        return self.dense, self.quant

    def addresses(self) -> list[int]:
        return [layer.weight.data_ptr() for layer in self.packed.values()]

    def offloaded(self, adapted: bool = False) -> int:
        """Packed layers that the host counts as not on the card; `adapted`: those with a LoRA."""
        return sum(
            getattr(layer, "comfy_patched_weights", False) is not True
            and (layer.adapters is not None or not adapted)
            for layer in self.packed.values()
        )

    def host_functions(self) -> int:
        """Functions of the host's on packed weights, called at every forward."""
        return sum(len(layer.weight_function) for layer in self.packed.values())


class Host:
    """What scenarios do with the imported host."""

    def __init__(self) -> None:
        # The folder's own __init__ registers routes on a server, and there is none.
        name = "speed_tier.tests.host.test_nodes"
        folder = types.ModuleType(name)
        folder.__path__ = [str(Path(__file__).parent / "test_nodes")]
        sys.modules[name] = folder
        import comfy.model_management as management
        import torch
        from speed_tier.tests.host.test_nodes import models

        self.models = models
        self.management = management
        self.device = management.get_torch_device()
        self.offload = management.unet_offload_device()
        self.torch = torch

    # -- models ---------------------------------------------------------------------------------
    def pair(self, arch: str, layers: int = 3) -> Pair:
        import comfy.supported_models as supported
        import gguf
        import numpy as np
        from speed_tier.speed.gguf import QuantTensorSpec
        from speed_tier.speed.gguf.linear import QuantState
        from speed_tier.speed.hosts import comfy_loader, comfy_quant
        from speed_tier.tests.speed.gguf import packer

        torch = self.torch
        dense = self.models.make_tiny(arch, 0, layers, torch.float32)
        weights = {k: v.clone() for k, v in dense.model.diffusion_model.state_dict().items()}
        tensors: dict[str, Any] = {}
        rng = np.random.default_rng(0)
        for name, weight in weights.items():
            qtype = packed_type(name, tuple(weight.shape), layers)
            if qtype is None:
                tensors[name] = weight
                continue
            stored = torch.from_numpy(packer.encode(weight.numpy(), qtype, rng))
            stored = stored.reshape(weight.shape[0], -1)
            tensors[name] = QuantTensorSpec(stored, int(qtype), tuple(weight.shape))
            exact = gguf.quants.dequantize(stored.numpy(), qtype).reshape(weight.shape)
            weights[name] = torch.from_numpy(exact.copy())
        dense.model.diffusion_model.load_state_dict(weights)
        config = (
            supported.ZImage(dict(self.models.ZIMAGE, n_layers=layers))
            if arch == "zimage"
            else supported.QwenImage(dict(self.models.QWEN, num_layers=layers))
        )
        config.set_inference_dtype(torch.float32, None)
        config.custom_operations = comfy_quant.QuantOperations
        model = config.get_model({}, "")
        absent = {
            name: torch.empty(value.shape, device="meta")
            for name, value in tensors.items()
            if isinstance(value, QuantTensorSpec)
        }
        model.diffusion_model.load_state_dict({**tensors, **absent}, strict=False)
        comfy_loader.pack_weights(model.diffusion_model, tensors, QuantState())
        devices = {"load_device": self.device, "offload_device": self.offload}
        quant = comfy_quant.QuantModelPatcher(model, **devices)
        return Pair(arch, dense, quant, comfy_quant.packed_layers(model))

    def lora(
        self,
        pair: Pair,
        kind: str = "lora",
        target: str = "attention",
        rank: int = 4,
        seed: int = 7,
    ) -> Facts:
        """A random adapter file's content."""
        if kind in ("diff", "set"):
            adapter = self.models.lora_state_dict(pair.dense, "lora", target, rank, seed)
            stems = {key.rsplit(".lora_", 1)[0] for key in adapter if ".lora_up" in key}
            shapes = {s: adapter[f"{s}.lora_up.weight"].shape[0] for s in stems}
            columns = {s: adapter[f"{s}.lora_down.weight"].shape[1] for s in stems}
            generator = self.torch.Generator().manual_seed(seed)
            name = {"diff": "diff", "set": "set_weight"}[kind]
            return {
                f"{s}.{name}": self.torch.randn(shapes[s], columns[s], generator=generator) * 0.05
                for s in sorted(stems)
            }
        return dict(self.models.lora_state_dict(pair.dense, kind, target, rank, seed))

    def plain_lora(self, pair: Pair, rank: int = 4, seed: int = 3) -> Facts:
        """An adapter on a weight that is plain in both models: the host merges it."""
        stem = {"zimage": "noise_refiner.0.feed_forward.w2", "qwen": "proj_out"}[pair.arch]
        weight = pair.dense.model.diffusion_model.get_parameter(f"{stem}.weight")
        generator = self.torch.Generator().manual_seed(seed)
        rows, columns = weight.shape
        return {
            f"diffusion_model.{stem}.lora_up.weight": self.torch.randn(
                rows, rank, generator=generator
            ),
            f"diffusion_model.{stem}.lora_down.weight": self.torch.randn(
                rank, columns, generator=generator
            )
            * 0.1,
        }

    def add(self, patcher: Any, adapter: Facts, strength: float = 1.0) -> Any:
        """A clone with an adapter on it, by the host's own loading."""
        import comfy.sd

        patched, _ = comfy.sd.load_lora_for_models(patcher, None, adapter, strength, 0)
        assert patched.patches, "the host took none of the adapter's keys"
        return patched

    # -- runs -----------------------------------------------------------------------------------
    def sample(
        self,
        patcher: Any,
        *,
        steps: int = STEPS,
        cfg: float = 1.0,
        size: int = 8,
        positive: Facts | None = None,
        negative: Facts | None = None,
    ) -> Any:
        """Latents from the host's own sampling path, which loads the model if it is not."""
        import comfy.sample

        def prompt(seed: int, extra: Facts | None) -> list[Any]:
            generator = self.torch.Generator().manual_seed(seed)
            text = self.torch.randn(1, TOKENS, TEXT_WIDTH, generator=generator)
            return [[text, dict(extra or {})]]

        latent = self.torch.zeros(1, 16, size, size)
        latent = comfy.sample.fix_empty_latent_channels(patcher, latent)
        noise = comfy.sample.prepare_noise(latent, 0)
        conditions = prompt(1, positive), prompt(2, negative)
        return comfy.sample.sample(
            patcher, noise, steps, cfg, "euler", "simple", *conditions, latent, disable_pbar=True
        ).clone()

    @contextlib.contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Sampling leaves every model as it is now: a CPU would load all of it."""
        original = self.management.load_models_gpu
        self.management.load_models_gpu = lambda *_, **__: None
        try:
            yield
        finally:
            self.management.load_models_gpu = original

    def sample_as_loaded(self, patcher: Any, **options: Any) -> Any:
        with self.as_loaded():
            return self.sample(patcher, **options)

    def load(self, patcher: Any, share: float | None = None) -> None:
        """As the host's model management does; `share` of the model's size is room on the card."""
        patcher.model_patches_to(self.device)
        room = 1e32 if share is None else max(1.0, share * patcher.model_size())
        patcher.partially_load(self.device, room - patcher.loaded_size())

    def unload(self) -> None:
        self.management.unload_all_models()


def packed_type(name: str, shape: tuple[int, ...], layers: int) -> Any:
    """A mix by role, as real files have it; `None` for a plain tensor.

    The noise refiner stays plain, so that one adapter meets both; the last block is of another mix.
    """
    from gguf import GGML_QUANT_SIZES
    from gguf import GGMLQuantizationType as Q
    from speed_tier.speed.gguf import stays_packed

    qtype = Q.Q4_K
    if name.endswith((".to_v.weight", ".add_v_proj.weight", ".w2.weight", "_mlp.net.2.weight")):
        qtype = Q.Q6_K
    elif name.endswith((".qkv.weight", "txt_mod.1.weight")):
        qtype = Q.Q5_K
    if name.startswith((f"layers.{layers - 1}.", f"transformer_blocks.{layers - 1}.")):
        qtype = Q.Q8_0
    if name.startswith("noise_refiner.") or not stays_packed(name, int(qtype), shape):
        return None
    return None if shape[1] % GGML_QUANT_SIZES[qtype][0] else qtype


def main(host: str, arch: str, wanted: str, files: str) -> None:
    pack = types.ModuleType("speed_tier")
    pack.__path__ = [str(REPO)]
    sys.modules["speed_tier"] = pack
    from speed_tier.bench.host_session import enter_host

    # Our own folder is on the path because we are a script, and has a `server` of its own.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != here]
    enter_host(host, "native", HOST_ARGS)
    import torch

    torch.set_num_threads(1)
    from speed_tier.tests.host import gguf_compile, gguf_guests, gguf_loads

    here_host = Host()
    parts: dict[str, tuple[Callable[[Host, Pair], Facts], ...]]
    parts = {**gguf_loads.PARTS, **gguf_guests.PARTS, **gguf_compile.PARTS}
    with torch.inference_mode():
        pair = here_host.pair(arch)
        pair.plain = here_host.sample(pair.dense)
        pair.files = json.loads(files)
        for scenario in [one for part in wanted.split(",") for one in parts[part]]:
            here_host.unload()
            try:
                facts = scenario(here_host, pair)
            except Exception:
                facts = {"failed": traceback.format_exc()}
            line = {"name": scenario.__name__, "facts": facts}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
