"""One process that compiles a block for a folder, as a script; prints what torch counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[3]
TIMEOUT_S = 300


def start(state_folder: Path) -> dict[str, Any]:
    """Compile in a fresh process whose host keeps files in `state_folder`."""
    named = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    done = subprocess.run(
        [sys.executable, "-P", __file__, str(state_folder)],
        env={name: value for name, value in os.environ.items() if name not in named},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(state_folder: str) -> None:
    pack = types.ModuleType("speed_tier")
    pack.__path__ = [str(REPO)]
    sys.modules["speed_tier"] = pack
    import torch

    torch.set_num_threads(1)
    from speed_tier.speed.env import capabilities
    from speed_tier.speed.families.base import AttentionShape, Family, blocks_of
    from speed_tier.speed.flags import FLAGS
    from speed_tier.speed.optimizations import dynamo
    from speed_tier.speed.optimizations.base import Context, HostFacts
    from speed_tier.speed.optimizations.regional_compile import RegionalCompile
    from speed_tier.speed.patching import PatchSet
    from speed_tier.tests.speed.process import full_state
    from torch import nn
    from torch._dynamo.utils import counters
    from torch.nn.attention import SDPBackend, sdpa_kernel

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.linear(self.norm(x)).unflatten(-1, (2, 16)).transpose(1, 2)
            # As the host's attention and ours do on NVIDIA.
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
                out = nn.functional.scaled_dot_product_attention(q, q, q)
            return x + out.transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList([Block()]).requires_grad_(False)
    cpu = torch.device("cpu")
    family = Family(
        name="one block",
        title="One block",
        stack=lambda module: "comfyui",
        repeated_blocks=lambda module: list(blocks_of(module, "blocks")),
        projections=lambda module: [],
        attention=lambda module: AttentionShape(2, 16),
    )
    context = Context(
        denoiser=model,
        family=family,
        stack="comfyui",
        device=cpu,
        dtype=torch.float32,
        capabilities=capabilities(cpu),
        host=HostFacts(state_folder=Path(state_folder)),
    )
    before = full_state()
    dynamo.load_beside()
    handle = RegionalCompile().install(context)
    token = FLAGS.acquire(handle.flags)
    with torch.inference_mode():
        x = torch.randn(1, 8, 32)
        plain = model.blocks[0](x)
        with handle.scope(), PatchSet(handle.patches):
            got = model.blocks[0](x)
    handle.remove()
    FLAGS.release(token)
    after = full_state()
    facts = handle.compile_facts()
    (kind,) = facts.kinds
    found = {
        "same": torch.allclose(got, plain, atol=1e-5),
        "leaks": [name for name, value in before.items() if after[name] != value],
        "fell_back": handle.fell_back,
        "compiles": [kind.compiles, kind.from_cache, kind.failed],
        "cache": facts.cache,
        "inductor": dict(counters["inductor"]),
        "aot_autograd": dict(counters["aot_autograd"]),
        "seconds": facts.seconds,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
