"""The VAEs of Z-Image and Qwen-Image through the host's own VAE object: tiers side by side.

    python -m bench.vae --comfy /path/to/ComfyUI

Makes each VAE at its real architecture with random weights, anew for each runner in one process,
and appends one JSON row per (family, operation, size, runner): median milliseconds of a call of the
host's method, seconds of the first call (measuring and compiling included), what engaged and why
not, distance to the plain call. A runner that fails says so and the others go on.

On a CPU, to see that it works: --width 32 --sizes 64 --repeats 2
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .host_session import REPO, enter_host
from .options import host_parser, words
from .record import Recorder, command_line

RESULTS = REPO / "bench" / "results" / "vae.jsonl"
REAL_WIDTH = {"kl_vae": 128, "wan_vae": 96}
OPERATIONS = ("decode", "encode", "decode_tiled")


@dataclass(frozen=True)
class Runner:
    """One way of running a VAE.

    Attributes:
        tier: "" for a VAE that never met a tier node.
        on: features that are on without a measurement; the others of the tier are off then.
        whole: the whole decoder compiled at one size, channels-last, as people do by hand.
    """

    tier: str = ""
    on: tuple[str, ...] = ()
    whole: bool = False


RUNNERS: dict[str, Runner] = {
    "plain": Runner(),
    "off": Runner("off"),
    "default": Runner("default"),
    "max": Runner("max"),
    "channels_last": Runner("off", ("channels_last",)),
    "cudnn_benchmark": Runner("off", ("cudnn_benchmark",)),
    "vae_compile": Runner("off", ("vae_compile",)),
    "vae_compile, channels_last": Runner("off", ("vae_compile", "channels_last")),
    "whole decoder compiled": Runner(whole=True),
}


def random_vae(family: str, width: int, dtype: Any, seed: int = 0) -> Any:
    """The host's VAE object; weights scaled so that activations neither vanish nor explode."""
    import comfy.sd
    import torch

    model, config = (_kl if family == "kl_vae" else _wan)(width)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in model.state_dict().items():
        if weight.ndim == 1 or "gamma" in name:
            one = "gamma" in name or ("norm" in name and name.endswith("weight"))
            weights[name] = torch.full(weight.shape, 1.0 if one else 0.0)
        else:
            fresh = torch.randn(weight.shape, generator=generator)
            weights[name] = fresh * weight[0].numel() ** -0.5
    vae = comfy.sd.VAE(sd=weights, config=config, dtype=dtype)
    vae.latent_channels = 16
    return vae


def _kl(width: int) -> tuple[Any, Any]:
    """Flux's: 16 latent channels and no quantisation convolutions; a narrow one has them."""
    from comfy.ldm.models import autoencoder

    sizes = {"double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3}
    sizes |= {"ch": width, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": []}
    sizes["dropout"] = 0.0
    if width != REAL_WIDTH["kl_vae"]:  # the host takes no other from a file
        params = {"ddconfig": sizes, "embed_dim": 16}
        return autoencoder.AutoencoderKL(**params), {"params": params}
    room = "comfy.ldm.modules.diffusionmodules.model"
    regularizer = "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"
    return autoencoder.AutoencodingEngine(
        regularizer_config={"target": regularizer},
        encoder_config={"target": f"{room}.Encoder", "params": sizes},
        decoder_config={"target": f"{room}.Decoder", "params": sizes},
    ), None


def _wan(width: int) -> tuple[Any, Any]:
    from comfy.ldm.wan.vae import WanVAE

    sizes: dict[str, Any] = {"dim": width, "z_dim": 16, "dim_mult": [1, 2, 4, 4]}
    sizes |= {"num_res_blocks": 2, "attn_scales": [], "temperal_downsample": [False, True, True]}
    return WanVAE(**sizes), None


def tiered(vae: Any, runner: Runner) -> Any:
    from speed_tier.speed import Switch, resolve_tier, vae_request
    from speed_tier.speed.hosts import comfy_vae

    request = vae_request(resolve_tier(runner.tier, False), dict.fromkeys(runner.on, Switch.ON))
    return comfy_vae.tier_vae(vae, request, lambda report: lambda kind, data: None)


def compile_whole(vae: Any) -> Any:
    import torch

    module = vae.first_stage_model
    module.to(memory_format=torch.channels_last)
    module.decoder = torch.compile(module.decoder)
    return vae


def calls(vae: Any, family: str, size: int, batch: int) -> dict[str, Callable[[], Any]]:
    """The host's methods on one random input each."""
    import torch

    generator = torch.Generator().manual_seed(1)
    frames = [1] if family == "wan_vae" else []
    latent = torch.randn(batch, 16, *frames, size // 8, size // 8, generator=generator)
    picture = torch.rand(batch, size, size, 3, generator=generator)
    return {
        "decode": lambda: vae.decode(latent),
        "encode": lambda: vae.encode(picture),
        "decode_tiled": lambda: vae.decode_tiled(latent, tile_x=64, tile_y=64, overlap=16),
    }


def timed_s(call: Callable[[], Any]) -> tuple[float, Any]:
    import torch

    started_s = time.perf_counter()
    output = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started_s, output


def measure(call: Callable[[], Any], runner: Runner, repeats: int, reference: Any) -> Any:
    """One row, and what the call gave."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    first_s, _ = timed_s(call)
    first = _newest_report() if runner.tier else None
    call()
    found = [timed_s(call) for _ in range(repeats)]
    output = found[-1][1].double()
    ordered = sorted(1000 * seconds for seconds, _ in found)
    row = {
        "ms_p50": statistics.median(ordered),
        "ms_p20": ordered[len(ordered) // 5],
        "ms_p80": ordered[len(ordered) * 4 // 5],
        "first_run_s": first_s,
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "finite": bool(output.isfinite().all()),
        "distance": 0.0
        if reference is None
        else float((output - reference).norm() / reference.norm()),
    }
    if first is not None:
        newest = _newest_report()
        row["engaged"] = newest.engaged()
        row["features"] = {f.name: f.reason or f.note for f in newest.features}
        row["module_ms"] = [round(1000 * s, 3) for s in newest.timing.steps_s][:64]
        row["compile_s"] = first.compile.seconds
        row["notes"] = first.notes
    return row, output


def _newest_report() -> Any:
    from speed_tier.speed import REPORTS

    return REPORTS.runs()[0]


def run_runner(
    name: str, family: str, options: Any, references: dict[Any, Any], emit: Callable[..., None]
) -> None:
    import comfy.model_management as management
    import torch

    runner = RUNNERS[name]
    width = options.width or REAL_WIDTH[family]
    vae = random_vae(family, width, getattr(torch, options.dtype) if options.dtype else None)
    try:
        vae = compile_whole(vae) if runner.whole else vae
        vae = tiered(vae, runner) if runner.tier else vae
        facts = {"tier": name, "dtype": str(vae.vae_dtype), "channels": width}
        for size in options.sizes:
            for operation in options.operations:
                row = {**facts, "op": operation, "width": size, "height": size}
                if runner.whole and operation == "encode":
                    continue
                try:
                    with torch.inference_mode():
                        call = calls(vae, family, size, options.batch)[operation]
                        key = (size, operation)
                        found, output = measure(call, runner, options.repeats, references.get(key))
                    references.setdefault(key, output)
                    emit({**row, **found})
                except Exception as error:
                    traceback.print_exc()
                    emit({**row, "failed": repr(error)[:300]})
    finally:
        del vae
        management.unload_all_models()
        gc.collect()
        management.soft_empty_cache()


def main() -> None:
    parser = host_parser(__doc__, RESULTS, REAL_WIDTH)
    parser.add_argument("--operations", default=list(OPERATIONS), type=words)
    parser.add_argument("--runners", default=list(RUNNERS), type=lambda s: s.split(";"))
    parser.add_argument("--repeats", default=10, type=int)
    parser.add_argument("--batch", default=1, type=int)
    parser.add_argument("--dtype", default="", help="float32, bfloat16, ...; the host's own else")
    parser.add_argument("--width", type=int, help="channels of the widest picture, if not the real")
    parser.add_argument("--threads", type=int, help="of torch, on a CPU")
    parser.add_argument("--budget-s", type=float, default=600, help="for one family")
    options = parser.parse_args()
    out, command = options.out.resolve(), command_line("bench.vae")
    with tempfile.TemporaryDirectory() as fresh:
        # Nothing is known from an earlier process: neither figures nor compiled code.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(fresh) / "inductor")
        enter_host(str(Path(options.comfy).resolve()), options.allocator, options.host_args)
        import folder_paths
        import torch

        folder_paths.set_user_directory(str(Path(fresh) / "user"))
        if options.threads:
            torch.set_num_threads(options.threads)
        record = Recorder(out, command, options.allocator, options.commit)
        for family in options.families:
            run_family(family, options, record)


def run_family(family: str, options: Any, record: Recorder) -> None:
    references: dict[Any, Any] = {}
    deadline = time.monotonic() + options.budget_s

    def emit(row: dict[str, Any]) -> None:
        record({"family": family, "batch": options.batch, **row})

    for name in options.runners:
        if time.monotonic() > deadline:
            emit({"tier": name, "failed": "out of time"})
            continue
        try:
            run_runner(name, family, options, references, emit)
        except Exception as error:
            traceback.print_exc()
            emit({"tier": name, "failed": repr(error)[:300]})


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


if __name__ == "__main__":
    main()
