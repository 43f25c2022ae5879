"""Both VAEs of a real ComfyUI in every tier, inside one process without a server.

Started as a script it goes through the cases of one VAE and prints one JSON line a case: digests
and strides of what came out, the report, flags before and after. What is right or wrong is for the
test to say.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
HOST_ARGS = ["--cpu", "--use-pytorch-cross-attention"]
TIMEOUT_S = 300


def run_cases(kind: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Every case of one VAE ("kl" or "wan"), in a fresh process."""
    from .provision import lines_of

    lines = lines_of(__file__, kind, str(folder), first_key="case", timeout_s=TIMEOUT_S)
    return {line["case"]: line for line in lines}


def kl_vae(seed: int = 0) -> Any:
    from speed_tier.tests.host.test_nodes import models

    return models.TestTinyVAE().make(32, seed)[0]


def wan_vae(seed: int = 0, width: int = 8) -> Any:
    import comfy.sd
    import torch
    from comfy.ldm.wan.vae import WanVAE

    sizes = {"dim": width, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
    model = WanVAE(**sizes, attn_scales=[], temperal_downsample=[False, True, True])
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in model.state_dict().items():
        if "gamma" in name or weight.ndim == 1:
            weights[name] = torch.full(weight.shape, 1.0 if "gamma" in name else 0.0)
        else:
            fresh = torch.randn(weight.shape, generator=generator)
            weights[name] = fresh * weight[0].numel() ** -0.5
    return comfy.sd.VAE(sd=weights)


class Cases:
    """One VAE, and what is done with it."""

    def __init__(self, kind: str, folder: Path) -> None:
        import torch

        self.kind, self.folder = kind, folder
        self.vae: Any = kl_vae() if kind == "kl" else wan_vae()
        generator = torch.Generator().manual_seed(3)
        shape = (1, 16, 8, 12) if kind == "kl" else (1, 16, 1, 8, 12)
        self.latent = torch.randn(shape, generator=generator)
        self.picture = torch.rand(1, 64, 96, 3, generator=generator)
        self.tile = {"tile_x": 8, "tile_y": 8, "overlap": 2}

    def tiered(self, tier: str, vae: Any = None, **switches: str) -> Any:
        from dataclasses import replace

        from speed_tier.speed import Switch, resolve_tier, vae_request
        from speed_tier.speed.hosts import comfy_vae
        from speed_tier.speed.optimizations import VAE_OPTIMIZATIONS
        from speed_tier.speed.optimizations.regional_compile import CompileConfig

        rows = tuple(
            replace(row, config=CompileConfig(backend="eager", dynamic=True))
            if row.name == "vae_compile"
            else row
            for row in VAE_OPTIMIZATIONS
        )
        asked = {name: Switch(value) for name, value in switches.items()}
        request = vae_request(resolve_tier(tier, is_gguf=False), asked, rows)
        return comfy_vae.tier_vae(vae or self.vae, request, lambda report: lambda kind, data: None)

    def calls(self, vae: Any) -> dict[str, Callable[[], Any]]:
        return {
            "decode": lambda: vae.decode(self.latent),
            "decode_tiled": lambda: vae.decode_tiled(self.latent, **self.tile),
            "encode": lambda: vae.encode(self.picture),
            "encode_tiled": lambda: vae.encode_tiled(
                self.picture, tile_x=64, tile_y=64, overlap=16
            ),
        }

    def emit(self, case: str, make: Callable[[], Any], expected: Any = None, **more: Any) -> Any:
        """Run `make`, and print what it gave and what it left."""
        import torch
        from speed_tier.speed import REPORTS
        from speed_tier.speed.flags import describe, snapshot
        from speed_tier.speed.patching import active_patches

        before, last = describe(snapshot()), REPORTS.runs()[:1]
        weights = self.weights()
        line: dict[str, Any] = {"case": case, **more}
        started_s = time.perf_counter()
        output = None
        try:
            with torch.inference_mode():
                output = make()
        except BaseException as error:  # the case may be an interrupt
            line["raised"] = f"{type(error).__name__}: {error}"
        if output is not None:
            raw = output.contiguous().numpy().tobytes()
            line["digest"] = hashlib.sha256(raw).hexdigest()
            line["layout"] = [list(output.shape), list(output.stride()), str(output.dtype)]
            line["finite"] = bool(output.isfinite().all())
        if output is not None and expected is not None:
            line["error"] = float((output - expected).norm() / expected.norm())
        line["seconds"] = time.perf_counter() - started_s
        newest = REPORTS.runs()[:1]
        line["report"] = newest[0].to_dict() if newest != last else None
        line["flags_kept"] = describe(snapshot()) == before
        line["weights_kept"] = self.weights() == weights
        line["patches"] = active_patches()
        line["instance"] = sorted(vars(self.vae.first_stage_model).keys() & {"decode", "encode"})
        print(json.dumps(line), flush=True)
        return output

    def weights(self) -> list[Any]:
        module = self.vae.first_stage_model
        return [(n, p.data_ptr(), p.stride()) for n, p in module.named_parameters()]

    def run(self) -> None:
        plain = {}
        for name, make in self.calls(self.vae).items():
            plain[name] = self.emit(f"plain {name}", make)
        known = sorted(vars(self.vae))
        on = {"channels_last": "on", "vae_compile": "on", "tf32": "on", "cudnn_benchmark": "on"}
        for tier, switches in (("off", {}), ("max", on)):
            tiered = self.tiered(tier, **switches)
            for name, make in self.calls(tiered).items():
                self.emit(f"{tier} {name}", make, plain[name])
        untouched = known == sorted(vars(self.vae))
        self.emit("plain again", lambda: self.vae.decode(self.latent), untouched=untouched)
        self.of_two(on)
        self.out_of_memory(on)
        self.interrupted(on)
        self.cast(on, plain["decode"])
        self.measured(plain["decode"])
        if self.kind == "wan":  # the host never runs the other in fp16
            self.half_precision(on)
        self.circular()

    def of_two(self, on: dict[str, str]) -> None:
        nearest = self.tiered("off", self.tiered("max", **on))
        self.emit("off behind max", lambda: nearest.decode(self.latent))
        import copy

        self.emit("a copy of the copy", lambda: copy.copy(nearest).decode(self.latent))

    def out_of_memory(self, on: dict[str, str]) -> None:
        """The whole picture does not fit, with features and without; the tiles do."""
        import torch

        widths: list[int] = []

        def small_only(module: Any, args: tuple[Any, ...]) -> None:
            widths.append(args[0].shape[-1])
            if widths[-1] > 8:
                raise torch.OutOfMemoryError("too large")

        hook = self.first_convolution().register_forward_pre_hook(small_only)
        self.vae.decode_tiled_ = self._small_tiles("decode_tiled_")
        self.vae.decode_tiled_3d = self._small_tiles("decode_tiled_3d")
        try:
            tiles = self.emit("plain, out of memory", lambda: self.vae.decode(self.latent))
            widths.clear()
            tiered = self.tiered("max", **on)
            self.emit(
                "max, out of memory", lambda: tiered.decode(self.latent), tiles, widths=widths
            )
        finally:
            hook.remove()
            del self.vae.decode_tiled_, self.vae.decode_tiled_3d

    def first_convolution(self) -> Any:
        decoder = self.vae.first_stage_model.decoder
        return decoder.conv_in if self.kind == "kl" else decoder.conv1

    def _small_tiles(self, name: str) -> Callable[..., Any]:
        vae = self.vae

        def tiled(samples: Any, **kwargs: Any) -> Any:
            overlap = (1, 2, 2) if name.endswith("3d") else 2
            tiles = {"tile_x": 8, "tile_y": 8, "overlap": overlap}
            if name == "decode_tiled_":  # its other two passes are twice as wide
                tiles.update(tile_x=4, tile_y=4, overlap=1)
            return getattr(type(vae), name)(vae, samples, **tiles)

        return tiled

    def interrupted(self, on: dict[str, str]) -> None:
        import comfy.model_management as management

        tiered = self.tiered("max", **on)
        management.interrupt_current_processing(True)
        self.emit("max, interrupted", lambda: tiered.decode(self.latent))
        management.interrupt_current_processing(False)

    def measured(self, plain: Any) -> None:
        """auto: measured in one run, known in the next; a damaged store is measured anew."""
        import folder_paths
        from speed_tier.speed import probe

        folder_paths.set_user_directory(str(self.folder))
        probe.BUDGET_S = 20.0  # on a busy machine as well
        tiered = self.tiered("default")
        self.emit("default, measured", lambda: tiered.decode(self.latent), plain)
        store = self.folder / "__speed_tier" / "measured.json"
        stored = store.is_file()
        self.emit("default, known", lambda: tiered.decode(self.latent), plain, stored=stored)
        probe.forget()
        self.emit("default, next process", lambda: tiered.decode(self.latent), plain)
        store.write_text("{")
        probe.forget()
        self.emit("default, damaged store", lambda: tiered.decode(self.latent), plain)

    def half_precision(self, on: dict[str, str]) -> None:
        """fp16, with activations whose squares are beyond it."""
        import torch

        module = self.vae.first_stage_model.to(torch.float16)
        self.vae.vae_dtype = torch.float16
        with torch.no_grad():
            self.first_convolution().bias.fill_(3000.0)
        off = self.emit("fp16 plain", lambda: self.vae.decode(self.latent))
        tiered = self.tiered("max", **on)
        self.emit("fp16 max", lambda: tiered.decode(self.latent), off)
        module.to(torch.float32)
        self.vae.vae_dtype = torch.float32
        with torch.no_grad():
            self.first_convolution().bias.fill_(0.0)

    def cast(self, on: dict[str, str], plain: Any) -> None:
        """Weights that are cast, patched or loaded at each call, as dynamic VRAM does."""
        modules = [m for m in self.vae.first_stage_model.modules() if hasattr(m, "weight_function")]
        for module in modules:
            module.comfy_cast_weights = True
        tiered = self.tiered("max", **on)
        self.emit("cast, max", lambda: tiered.decode(self.latent), plain, modules=len(modules))
        for module in modules:
            module.comfy_cast_weights = False

    def circular(self) -> None:
        """A method that another pack put on the instance is called from ours."""
        original = self.vae.decode
        self.vae.decode = lambda samples, **kwargs: original(samples, **kwargs) * 0.5
        halved = self.emit("replaced, plain", lambda: self.vae.decode(self.latent))
        tiered = self.tiered("default", channels_last="on")
        self.emit("replaced, default", lambda: tiered.decode(self.latent), halved)
        del self.vae.decode


def main(host: str, kind: str, folder: str) -> None:
    pack = types.ModuleType("speed_tier")
    pack.__path__ = [str(REPO)]
    sys.modules["speed_tier"] = pack
    name = "speed_tier.tests.host.test_nodes"
    nodes = types.ModuleType(name)
    nodes.__path__ = [str(Path(__file__).parent / "test_nodes")]
    sys.modules[name] = nodes
    from speed_tier.bench.host_session import enter_host

    # Our own folder is on the path because we are a script, and has a `server` of its own.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != here]
    enter_host(host, "native", HOST_ARGS)
    import torch

    torch.set_num_threads(1)
    Cases(kind, Path(folder)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
