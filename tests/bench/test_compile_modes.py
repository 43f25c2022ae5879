"""Modes that can end a process: users get none."""

import pytest
from speed_tier.bench.compile_modes import config_of
from speed_tier.speed.optimizations.regional_compile import CompileConfig


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_the_modes_with_graphs_are_for_the_benchmark_alone(mode):
    assert config_of(mode).mode == mode
    with pytest.raises(ValueError, match="mode needs one of"):
        CompileConfig(mode=mode)
    assert CompileConfig().mode is None
