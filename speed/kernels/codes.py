"""Triton functions shared by the kernels: from packed codes to floats with few integer operations.

The kernels are bound by memory only while they stay under about eight integer operations a weight:
integer and conversion instructions issue at half the rate of float ones, or slower. So a code is
masked where it stands and the power of two goes into the scale (`code & 0xF0` with `scale / 16`),
offsets are taken away on the float side, and the conversion is one of two that the benchmark
chooses between: the conversion unit, or OR-ing the code into the mantissa of 2**23. All exact.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are in capitals, as everywhere in Triton
import triton
import triton.language as tl


@triton.jit
def to_float(code, zero: tl.constexpr, MANTISSA: tl.constexpr):
    """`float32(code - zero)` for int32 codes below 2**23, exact either way."""
    if MANTISSA:
        out = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
    else:
        out = code.to(tl.float32) - zero
    return out


@triton.jit
def signed_to_float(code, MANTISSA: tl.constexpr):
    """`float32` of int8 codes held as uint8."""
    if MANTISSA:
        out = to_float(code.to(tl.int32) ^ 0x80, 128, True)
    else:
        out = code.to(tl.int8, bitcast=True).to(tl.float32)
    return out


@triton.jit
def shift_left(code, by: tl.constexpr):
    """Shift left by a constant, right where it is negative."""
    return code << by if by >= 0 else code >> -by


@triton.jit
def six_bit_pair(words_ptr, offsets, group, mask, MANTISSA: tl.constexpr):
    """Scales and minima of sub-blocks 2g and 2g + 1 of Q4_K and Q5_K, as float32.

    `words_ptr + offsets` is the 12-byte field. With a_k, m_k, h_k its bytes k, 4 + k, 8 + k:
    sub-block k has scale a_k & 63 and minimum m_k & 63; sub-block k + 4 has scale
    (h_k & 15) | (a_k >> 6) << 4 and minimum (h_k >> 4) | (m_k >> 6) << 4. Sub-blocks 2g and 2g + 1
    have neighbouring bytes, so three 16-bit loads give all four numbers.
    """
    at = offsets + (group & 1)
    a = tl.load(words_ptr + at, mask=mask, other=0).to(tl.int32)
    m = tl.load(words_ptr + at + 2, mask=mask, other=0).to(tl.int32)
    h = tl.load(words_ptr + at + 4, mask=mask, other=0).to(tl.int32)
    low = group < 2
    scale_even = tl.where(low, a & 63, (h & 15) | ((a >> 2) & 48))
    scale_odd = tl.where(low, (a >> 8) & 63, ((h >> 8) & 15) | ((a >> 10) & 48))
    min_even = tl.where(low, m & 63, ((h >> 4) & 15) | ((m >> 2) & 48))
    min_odd = tl.where(low, (m >> 8) & 63, (h >> 12) | ((m >> 10) & 48))
    return (
        to_float(scale_even, 0, MANTISSA),
        to_float(scale_odd, 0, MANTISSA),
        to_float(min_even, 0, MANTISSA),
        to_float(min_odd, 0, MANTISSA),
    )


@triton.jit
def codebook_value(code, unit: tl.constexpr, MANTISSA: tl.constexpr):
    """The IQ4 codebook's entry of `code * unit` in 0..15, as float32.

    The entries are C4 * x**4 + ... + C0 rounded to the nearest integer, at most 0.44 from it before
    rounding: four multiply-adds where a table costs seven integer operations. Adding and taking
    away 1.5 * 2**23 rounds. `unit` is 1/16 for a code that stands in the high nibble.
    """
    x = to_float(code, 0, MANTISSA)
    y = x * (0.001586043 * unit) + (0.03108644)
    y = y * (x * unit) + (-1.371927)
    y = y * (x * unit) + (24.17383)
    y = y * (x * unit) + (-126.567)
    return (y + 12582912.0) - 12582912.0
