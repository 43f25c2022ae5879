"""The table of numerical bounds."""

import pytest
import torch
from speed_tier.speed.bounds import ERROR_FACTOR, ERROR_FLOOR, allowed_error


def test_a_tier_may_be_a_tenth_further_from_fp32_than_off():
    assert ERROR_FACTOR == 1.1
    floor = ERROR_FLOOR[torch.bfloat16]
    assert allowed_error(0.02, torch.bfloat16) == pytest.approx(0.022 + floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_where_off_is_exact_the_floor_is_left(dtype):
    assert allowed_error(0.0, dtype) == ERROR_FLOOR[dtype] <= 1e-6


def test_a_dtype_without_a_floor_is_an_error():
    with pytest.raises(KeyError):
        allowed_error(0.0, torch.float64)
