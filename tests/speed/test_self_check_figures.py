"""What the self-check measures, and what is too far."""

from dataclasses import replace

import pytest
import torch
from speed_tier.speed.bounds import CHECK_BOUNDS, check_bounds
from speed_tier.speed.errors import is_out_of_memory
from speed_tier.speed.self_check import Comparison, Deviation, FiniteWatch, _quantises
from speed_tier.tests.speed import tiny

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WHOLE = "the whole forward"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("values", "broken"),
    [([1.0, -2.0], False), ([6e4, 6e4], False), ([1.0, float("inf")], True), ([1, -1], False)],
)
def test_the_watch(values, broken, dtype):
    watch = FiniteWatch()
    assert not watch.is_broken()
    watch.add((torch.tensor(values).to(dtype), torch.tensor([1, 2])))
    watch.add(torch.ones(3))
    assert watch.is_broken() is watch.ended_broken() is broken
    watch.forget()
    assert not watch.ended_broken()


OFF = Deviation("layers.1", error=0.0, size=1.0, update=0.5, gain=0.0, broken=0, off_broken=0)
FP32 = CHECK_BOUNDS[torch.float32]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"error": 5e-5}, ""),
        ({"error": 7e-5}, "layers.1 is 0.01% from off's"),
        ({"error": 3e-5, "gain": -3e-5}, "layers.1 is 1.0000 times off's"),
        ({"broken": 2}, "layers.1 has 2 values that are not finite, off has none"),
        ({"error": float("nan"), "off_broken": 3}, ""),
        ({"size": 0.0}, ""),
        ({"size": 0.0, "error": 0.1}, "layers.1 is not zero as off's is"),
        ({"place": WHOLE, "error": 9e-4}, ""),
        ({"place": WHOLE, "error": 2e-3}, f"{WHOLE} is 0.20% from off's"),
    ],
)
def test_what_is_too_far(changed, said):
    assert replace(OFF, **changed).problem(FP32) == said


def test_layers_that_quantise_their_input_have_bounds_of_their_own():
    wide = check_bounds(torch.bfloat16, with_tf32=False, with_quantised_activations=True)
    assert wide.update > CHECK_BOUNDS[torch.bfloat16].update
    assert not _quantises(tiny.toy())
    fp8 = tiny.toy()
    fp8.blocks[0].mlp[0].weight.data = fp8.blocks[0].mlp[0].weight.data.to(torch.float8_e4m3fn)
    assert _quantises(fp8)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("no room"), True),
        (RuntimeError("CUDA error: out of memory\nmore"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_by_any_name(error, is_one):
    assert is_out_of_memory(error) is is_one


def test_tf32_has_bounds_of_its_own():
    assert check_bounds(torch.float32, with_tf32=True).gain > FP32.gain
    assert check_bounds(torch.float32, with_tf32=False) is FP32
    assert check_bounds(torch.bfloat16, with_tf32=True) is CHECK_BOUNDS[torch.bfloat16]


def test_figures_against_float64():
    generator = torch.Generator().manual_seed(3)
    off, given, noise = (torch.randn(2, 7, 9, generator=generator) for _ in range(3))
    tiered = 1.01 * off + 1e-3 * noise
    comparison = Comparison()
    comparison.add("layers.0", (tiered, 3), (off, 3), ((given,), {"scale": torch.ones(2)}))
    (found,) = comparison.deviations()
    d, r = (tiered.double() - off.double()), off.double()
    assert found.error == pytest.approx(float(d.norm()), rel=1e-5)
    assert found.size == pytest.approx(float(r.norm()), rel=1e-6)
    assert found.update == pytest.approx(float((r - given.double()).norm()), rel=1e-6)
    assert found.gain == pytest.approx(float((d * r).sum() / r.norm() ** 2), rel=1e-4)
    assert found.gain == pytest.approx(0.01, rel=1e-2)


def figures(tiered, off, *given):
    comparison = Comparison()
    comparison.add("layers.0", tiered, off, given)
    return comparison.deviations()


def test_the_rounding_of_one_massive_element_is_no_gain():
    off = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    off[:, 5] = 3e3
    tiered = off.clone()
    tiered[:, 5] *= 1.004
    (found,) = figures(tiered, off, off * 0.5)
    assert found.gain == 0
    assert found.problem(CHECK_BOUNDS[torch.bfloat16]) == ""
    (found,) = figures(off * 1.01, off, off * 0.5)
    assert "1.0100 times off's" in found.problem(CHECK_BOUNDS[torch.bfloat16])


def test_each_of_two_streams_of_one_length_is_held_against_its_own_input():
    text, image = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(5)).unbind()
    outputs = (text + 0.01, image + 0.02)
    found = figures(outputs, outputs, image, text)
    updates = [pytest.approx(each * 128**0.5, rel=1e-3) for each in (0.01, 0.02)]
    assert [one.update for one in found] == updates
