"""Regional compile on a toy, with the backend that compiles nothing but is traced all the same."""

from __future__ import annotations

from typing import Any

import torch
from speed_tier.speed.optimizations.regional_compile import CompileConfig, RegionalCompile
from speed_tier.tests.speed import tiny
from torch._dynamo.utils import counters

EAGER = RegionalCompile(CompileConfig(backend="eager"))


def with_config(**more: Any) -> RegionalCompile:
    return RegionalCompile(CompileConfig(**{"backend": "eager", **more}))


def graphs() -> int:
    """Graphs that Dynamo has compiled in this process."""
    return counters["stats"]["unique_graphs"]


def config() -> dict[str, Any]:
    """The settings of Dynamo and Inductor that a run touches."""
    settings = torch._dynamo.config
    return {
        name: getattr(settings, name)
        for name in (
            *("recompile_limit", "accumulated_recompile_limit"),
            *("fail_on_recompile_limit_hit", "suppress_errors"),
        )
    } | {
        "duck": torch.fx.experimental._config.use_duck_shape,
        "headers": torch._inductor.config.cpp_cache_precompile_headers,
    }


def check_same(run: tiny.Engaged, *args: Any) -> torch.Tensor:
    """One call of a run, checked against the plain denoiser."""
    got = run.call(*args)
    torch.testing.assert_close(got, tiny.plain(run.denoiser, *args))
    return got
