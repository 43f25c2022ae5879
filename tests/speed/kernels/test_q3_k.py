"""The Q3_K kernel against the gguf package."""

import pytest
from speed_tier.tests.speed.kernels import cases


@pytest.mark.parametrize(("content", "rows", "cols"), cases.kernel_cases())
def test_kernel_matches_gguf(content, rows, cols):
    cases.check_path("Q3_K", "kernel", content, rows, cols)


def test_both_conversions_agree(monkeypatch):
    from speed_tier.speed.kernels.q3_k import KERNEL

    monkeypatch.setattr(KERNEL, "mantissa", not KERNEL.mantissa)
    monkeypatch.setattr(KERNEL, "_compiled", {})
    cases.check_path("Q3_K", "kernel", "random", 3, 512)


def test_even_and_odd_addresses():
    cases.check_shifted_and_odd_addresses("Q3_K")


def test_several_tiles():
    cases.check_several_tiles("Q3_K")
