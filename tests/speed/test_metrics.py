"""The figures of a comparison, against numpy in float64, and what is said where there is none."""

import math

import numpy as np
import pytest
import torch
from speed_tier.speed.metrics import (
    difference,
    image_difference,
    latent_difference,
    relative_error,
)


def pair(shape=(2, 16, 8, 12), dtype=torch.float32, gap=1e-3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(shape, generator=generator)
    second = first + gap * torch.randn(shape, generator=generator)
    return first.to(dtype), second.to(dtype)


def as_numpy(x):
    return x.float().numpy().astype(np.float64)


def by_numpy(first, second, peak=None):
    a, b = as_numpy(first), as_numpy(second)
    peak = a.max() - a.min() if peak is None else peak
    return {
        "psnr_db": 10 * np.log10(peak**2 / np.mean((b - a) ** 2)),
        "relative_error": np.linalg.norm(b - a) / np.linalg.norm(a),
        "max_error": np.abs(b - a).max(),
        "mean_error": np.abs(b - a).mean(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("gap", [1e-1, 1e-4])
@pytest.mark.parametrize("peak", [None, 1.0])
def test_the_figures_are_numpys(dtype, gap, peak):
    first, second = pair(dtype=dtype, gap=gap)
    found = difference(first, second, peak)
    if dtype is not torch.float64:  # by_numpy goes through float32
        for name, expected in by_numpy(first, second, peak).items():
            assert getattr(found, name) == pytest.approx(expected, rel=1e-12), name
    assert found.psnr_db == pytest.approx(
        10 * math.log10(found.peak**2 / float((second.double() - first.double()).pow(2).mean()))
    )
    assert found.identical is False
    assert found.is_finite
    assert (found.values, found.compared) == (first.numel(), first.numel())
    assert found.peak_meaning == ("" if peak else "the range of off")


def test_a_known_difference():
    first = torch.tensor([0.0, 1.0, 2.0, 4.0])
    found = difference(first, first + 0.5)
    assert (found.peak, found.max_error, found.mean_error) == (4.0, 0.5, 0.5)
    assert found.psnr_db == pytest.approx(10 * math.log10(16 / 0.25))
    assert found.relative_error == pytest.approx(1.0 / math.sqrt(21))
    assert found.words("max") == (
        "PSNR 18.1 dB (peak 4, the range of off), relative error 0.218, "
        "max error 0.5, mean error 0.5"
    )


def test_a_given_peak_is_only_named():
    first = torch.tensor([0.0, 0.5])
    assert difference(first, first + 0.1, 1.0).words().startswith("PSNR 20.0 dB (peak 1), rel")


def test_the_reference_is_the_first():
    small, large = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    assert difference(small, large).relative_error == pytest.approx(9.0)
    assert difference(large, small).relative_error == pytest.approx(0.9)
    assert relative_error(small, large) == pytest.approx(9.0)


def test_identical_means_every_byte():
    first, _ = pair()
    found = difference(first, first.clone())
    assert found.identical
    assert (found.psnr_db, found.relative_error, found.max_error) == (None, 0.0, 0.0)
    assert found.words() == "identical, byte for byte"
    # A view with other strides holds the same values in the same places.
    assert difference(first, first.transpose(0, 1).contiguous().transpose(0, 1)).identical


def test_one_changed_value_is_not_identical():
    first, _ = pair()
    second = first.clone()
    second.view(-1)[-1] += 1e-6
    assert not difference(first, second).identical


def test_a_sign_of_zero_and_another_dtype_are_not_identical():
    zeros = torch.tensor([0.0, 1.0])
    found = difference(zeros, torch.tensor([-0.0, 1.0]))
    assert not found.identical
    assert found.words() == "equal in every value, but not byte for byte"
    # Equal bytes, and yet of another type.
    assert not difference(torch.zeros(2).half(), torch.zeros(2).bfloat16()).identical


def test_values_that_are_not_finite_are_counted_and_left_out():
    first, second = pair(shape=(100,))
    first[3] = float("inf")
    second[3:5] = float("nan")
    found = difference(first, second)
    keep = [i for i in range(100) if i not in (3, 4)]
    for name, expected in by_numpy(first[keep], second[keep]).items():
        assert getattr(found, name) == pytest.approx(expected, rel=1e-12), name
    assert (found.compared, found.not_finite) == (98, (1, 2))
    said = found.words("max")
    assert said.endswith("; not finite: 1 of 100 values in off, 2 in max, left out of the figures")
    assert "nan" not in said
    assert "inf" not in said.replace("finite", "")


def test_nothing_finite_is_said():
    lost = torch.full((4,), float("nan"))
    found = difference(torch.ones(4), lost)
    assert (found.psnr_db, found.relative_error, found.max_error) == (None, None, None)
    assert found.words("max") == (
        "no figures: no value is finite in both; not finite: 0 of 4 values in off, 4 in max"
    )
    same = difference(lost, lost.clone())
    assert same.words("max") == (
        "identical, byte for byte; not finite: 4 of 4 values in off, 4 in max"
    )


def test_a_reference_without_a_range_or_a_size():
    found = difference(torch.zeros(4), torch.ones(4))
    assert (found.psnr_db, found.relative_error, found.max_error) == (None, None, 1.0)
    assert found.words() == (
        "PSNR: none, off is the same value everywhere, relative error: none, off is zero, "
        "max error 1, mean error 1"
    )


def test_the_smallest_errors_have_a_psnr():
    first = torch.tensor([0.0, 1.0], dtype=torch.float64)
    second = torch.tensor([1e-162, 1.0], dtype=torch.float64)
    assert 3000 < difference(first, second).psnr_db < 4000


@pytest.mark.parametrize("compare", [difference, relative_error])
def test_two_shapes_are_refused(compare):
    with pytest.raises(ValueError, match=r"needs two results of one shape; found \(2,\) and \(3,"):
        compare(torch.ones(2), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relative_error_is_numpys(dtype):
    first, second = pair(dtype=dtype)
    expected = by_numpy(first, second)["relative_error"]
    assert relative_error(first, second) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bound_never_holds_for_what_is_not_finite(value):
    first, second = pair()
    second[0, 0, 0, 0] = value
    assert relative_error(second, first) == float("inf")
    assert relative_error(first, second) == float("inf")
    assert relative_error(second, second) == float("inf")


def test_relative_error_of_zeros():
    zeros = torch.zeros(3)
    assert relative_error(zeros, zeros) == 0.0
    assert relative_error(zeros, torch.ones(3)) == float("inf")


def test_picture_of_images():
    first = torch.full((2, 3, 4, 3), 0.5)
    second = first.clone()
    second[0, 1, 2] = torch.tensor([0.51, 0.45, 0.9])
    second[1, 0, 0, 0] = float("nan")
    picture = image_difference(first, second, amplification=10)
    assert picture.shape == (2, 3, 4, 3)
    assert picture.dtype == torch.float32
    torch.testing.assert_close(picture[0, 1, 2], torch.tensor([0.1, 0.5, 1.0]))
    assert picture[1, 0, 0, 0] == 1.0
    picture[0, 1, 2] = picture[1, 0, 0, 0] = 0
    assert picture.count_nonzero() == 0


@pytest.mark.parametrize("shape", [(2, 16, 3, 4), (2, 16, 1, 3, 4), (1, 16, 2, 3, 4), (2, 16, 4)])
def test_picture_of_latents(shape):
    first, _ = pair(shape)
    second = first.clone()
    place = (0, slice(None), *([0] * (len(shape) - 3)), 1)
    second[place] += 0.01 * (first.max() - first.min())
    picture = latent_difference(first, second, amplification=20, enlarge=2)
    height = shape[-2] if len(shape) > 3 else 1
    frames = shape[0] * (shape[2] if len(shape) == 5 else 1)
    assert picture.shape == (frames, 2 * height, 2 * shape[-1], 3)
    lit = picture[0, :2, 2:4]
    torch.testing.assert_close(lit, torch.full_like(lit, 0.2))
    assert picture.count_nonzero() == lit.numel()


def test_the_picture_averages_the_channels():
    first = torch.zeros(1, 4, 1, 2)
    first[0, 0, 0, 1] = 1.0  # the range is 1
    second = first.clone()
    second[0, :, 0, 0] = torch.tensor([0.1, -0.3, 0.0, 0.0])
    picture = latent_difference(first, second, amplification=2, enlarge=1)
    torch.testing.assert_close(picture[0, 0], torch.tensor([[0.2] * 3, [0.0] * 3]))
