"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
from speed_tier.tests.triton_interpreter import round_to_nearest


@pytest.fixture(autouse=True)
def device_rounding(monkeypatch):
    if os.environ.get("TRITON_INTERPRET") == "1":
        round_to_nearest(monkeypatch.setattr)
