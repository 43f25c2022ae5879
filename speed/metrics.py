"""How far two results are apart: the one place where the project computes it.

In float64 on the CPU. A figure that cannot be given is None and `words` says why, never a silent
NaN: values that are not finite are counted, and left out of the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

RANGE: Final = "the range of off"


@dataclass(frozen=True)
class Difference:
    """`other` against `reference`.

    Attributes:
        identical: Same shape, dtype and bytes.
        values: How many values each has.
        compared: How many are finite in both; the figures are over these.
        not_finite: How many are not finite in the reference and in the other.
        peak: What PSNR is measured against.
        peak_meaning: Where the peak comes from, "" where the caller gave it.
        psnr_db: 10 log10(peak^2 / mean squared error). None: no difference in value, or no peak.
        relative_error: |other - reference| / |reference|. None: the reference is zero.
        max_error, mean_error: Of the absolute differences. None: nothing to compare.
    """

    identical: bool
    values: int
    compared: int
    not_finite: tuple[int, int]
    peak: float
    peak_meaning: str
    psnr_db: float | None
    relative_error: float | None
    max_error: float | None
    mean_error: float | None

    @property
    def is_finite(self) -> bool:
        """Whether every value of both is."""
        return self.not_finite == (0, 0)

    def words(self, other: str = "the other") -> str:
        """The figures in a line.

        Args:
            other: What the other result is called; the reference is called off.
        """
        lost = ""
        if not self.is_finite:
            lost = (
                f"; not finite: {self.not_finite[0]} of {self.values} values in off, "
                f"{self.not_finite[1]} in {other}"
            )
        if self.identical:
            return f"identical, byte for byte{lost}"
        if not self.compared:
            return f"no figures: no value is finite in both{lost}"
        if lost:
            lost += ", left out of the figures"
        if self.max_error == 0:
            return f"equal in every value, but not byte for byte{lost}"
        return f"{self._psnr()}, {self._relative()}, {self._absolute()}{lost}"

    def _psnr(self) -> str:
        if self.psnr_db is None:
            return "PSNR: none, off is the same value everywhere"
        meaning = f", {self.peak_meaning}" if self.peak_meaning else ""
        return f"PSNR {self.psnr_db:.1f} dB (peak {self.peak:.4g}{meaning})"

    def _relative(self) -> str:
        if self.relative_error is None:
            return "relative error: none, off is zero"
        return f"relative error {self.relative_error:.3g}"

    def _absolute(self) -> str:
        return f"max error {self.max_error:.3g}, mean error {self.mean_error:.3g}"


def difference(
    reference: torch.Tensor, other: torch.Tensor, peak: float | None = None
) -> Difference:
    """Compare two tensors of one shape.

    Args:
        peak: For PSNR; None takes the reference's largest value less its smallest.

    Raises:
        ValueError: The shapes differ.
    """
    _check_shapes(reference, other)
    exact, near = _float64(reference), _float64(other)
    both = exact.isfinite() & near.isfinite()
    left, right = exact[both], near[both]
    gap = (right - left).abs()
    count = gap.numel()
    meaning = RANGE if peak is None else ""
    if peak is None:
        peak = float(left.max() - left.min()) if count else 0.0
    size = float(left.norm())
    return Difference(
        identical=_same_bytes(reference, other),
        values=exact.numel(),
        compared=count,
        not_finite=(_not_finite(exact), _not_finite(near)),
        peak=peak,
        peak_meaning=meaning,
        psnr_db=_psnr_db(peak, gap),
        relative_error=float(gap.norm()) / size if size else None,
        max_error=float(gap.max()) if count else None,
        mean_error=float(gap.mean()) if count else None,
    )


def relative_error(exact: torch.Tensor, other: torch.Tensor) -> float:
    """|other - exact| / |exact|; infinite where a value of either is not finite.

    Infinite on purpose: a bound must not hold for what cannot be compared. Computed where the
    tensors are, for bounds on a device.
    """
    _check_shapes(exact, other)
    if not bool(other.isfinite().all()) or not bool(exact.isfinite().all()):
        return float("inf")
    if torch.equal(other, exact):
        return 0.0
    size = float(exact.double().norm())
    gap = float((other.double() - exact.double()).norm())
    return gap / size if size else float("inf")


def image_difference(
    reference: torch.Tensor, other: torch.Tensor, amplification: float
) -> torch.Tensor:
    """Picture of the absolute difference of two pictures, colour by colour.

    Args:
        reference, other: (B, H, W, C), 0 to 1.

    Returns:
        (B, H, W, C) float32, 0 to 1; places that are not finite are white.
    """
    _check_shapes(reference, other)
    return _amplified((_float64(other) - _float64(reference)).abs(), amplification)


def latent_difference(
    reference: torch.Tensor, other: torch.Tensor, amplification: float, enlarge: int = 8
) -> torch.Tensor:
    """Grey picture of the difference of two latents, averaged over the channels.

    1 is the range of the reference.

    Args:
        reference, other: (B, C, [T,] H, W); frames become pictures of their own.
        enlarge: Pixels for one latent place.

    Returns:
        (B or B * T, H * enlarge, W * enlarge, 3) float32, 0 to 1.
    """
    _check_shapes(reference, other)
    exact = _float64(reference)
    gap = (_float64(other) - exact).abs().mean(dim=1)
    finite = exact[exact.isfinite()]
    peak = float(finite.max() - finite.min()) if finite.numel() else 0.0
    if gap.ndim < 3:
        gap = gap.unsqueeze(1)
    grey = _amplified(gap.flatten(0, -3) / (peak or 1.0), amplification)
    for axis in (1, 2):
        grey = grey.repeat_interleave(enlarge, dim=axis)
    return grey.unsqueeze(-1).expand(-1, -1, -1, 3).contiguous()


def _amplified(gap: torch.Tensor, amplification: float) -> torch.Tensor:
    picture = (gap * amplification).clamp(0.0, 1.0)
    return picture.nan_to_num(nan=1.0).float()


def _check_shapes(reference: torch.Tensor, other: torch.Tensor) -> None:
    if reference.shape != other.shape:
        found = f"{tuple(reference.shape)} and {tuple(other.shape)}"
        raise ValueError(f"A comparison needs two results of one shape; found {found}.")


def _float64(x: torch.Tensor) -> torch.Tensor:
    # Not every device has float64.
    return x.detach().to("cpu").double()


def _same_bytes(reference: torch.Tensor, other: torch.Tensor) -> bool:
    if reference.dtype != other.dtype:
        return False
    left, right = (x.detach().to("cpu").contiguous().view(-1) for x in (reference, other))
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _not_finite(x: torch.Tensor) -> int:
    return x.numel() - int(x.isfinite().sum())


def _psnr_db(peak: float, gap: torch.Tensor) -> float | None:
    largest = float(gap.max()) if gap.numel() else 0.0
    if not largest or not peak:
        return None
    # In units of the largest, and by logarithms: the smallest errors have squares that underflow.
    mean_square = float((gap / largest).square().mean())
    return 20.0 * (math.log10(peak) - math.log10(largest)) - 10.0 * math.log10(mean_square)
