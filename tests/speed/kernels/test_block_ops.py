"""The fused parts of a block against torch in float64, on fresh random inputs."""

import pytest
import torch
from speed_tier.speed.kernels import block_ops_reference as twin
from speed_tier.speed.kernels.launch import kernel_refusal

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.skipif(bool(kernel_refusal(DEVICE)), reason=str(kernel_refusal(DEVICE)))


@pytest.fixture
def ops():
    from speed_tier.speed.kernels import block_ops

    return block_ops


def random(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def exact(value):
    return value.double() if isinstance(value, torch.Tensor) else value


def assert_rounded_once(got, expected, dtype):
    """As near to the exact value as one rounding of the output, or an fp32 computation, allows."""
    eps = torch.finfo(dtype).eps
    bound = expected.abs() * (0.5 * eps * 1.01) + 3e-6 * (1 + expected.abs())
    wrong = (got.double() - expected).abs() - bound
    assert float(wrong.max()) <= 0, float(wrong.max())
    assert got.dtype is dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("parts", ["wss", "w", "ss", "s", ""])
def test_norm_modulate(ops, dtype, layer_norm, parts):
    batch, tokens, cols = 2, 3, 200
    x = random(batch, tokens, cols, dtype=dtype, scale=3) + (1 if layer_norm else 0)
    both = random(batch, 3 * cols, dtype=dtype)
    weight = random(cols) if "w" in parts else None
    scale = both[:, cols : 2 * cols] if "s" in parts else None
    shift = both[:, :cols] if "ss" in parts else None
    got = ops.norm_modulate(x, weight, scale, shift, 1e-5, layer_norm)
    given = map(exact, (x, weight, scale, shift))
    assert_rounded_once(got, twin.norm_modulate(*given, 1e-5, layer_norm), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("parts", ["wg", "w", "g", ""])
def test_gated_add(ops, dtype, tanh, parts):
    batch, tokens, cols = 2, 5, 96
    x = random(batch, tokens, cols, dtype=dtype)
    y = random(batch, tokens + 4, cols, dtype=dtype)[:, 2:-2]  # as a slice of a joint sequence
    gate = random(batch, 4 * cols, dtype=dtype, scale=4)[:, cols : 2 * cols]
    weight = random(cols, dtype=torch.bfloat16)
    given = (x, y, gate if "g" in parts else None, weight if "w" in parts else None)
    got = ops.gated_add(*given, 1e-5, tanh)
    assert_rounded_once(got, twin.gated_add(*map(exact, given), 1e-5, tanh), dtype)


def test_the_gate_does_not_overflow(ops):
    x, y = random(1, 1, 8), torch.ones(1, 1, 8, device=DEVICE)
    gate = torch.tensor([[-1e4, -100.0, -20, -0.0, 0, 20, 100, 1e4]], device=DEVICE)
    got = ops.gated_add(x, y, gate, None, 1e-5, True)
    assert_rounded_once(got, exact(x) + exact(gate).tanh()[:, None], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared_turns", [True, False])
@pytest.mark.parametrize(("heads", "dim"), [(3, 32), (4, 16)])
def test_qk_norm_rope(ops, dtype, shared_turns, heads, dim):
    batch, tokens, first, after = 2, 4, 3, 2
    width, total = heads * dim, first + tokens + after
    fused = random(batch, tokens, 3 * width, dtype=dtype)
    q, k, v = fused.split(width, dim=-1)
    weights = random(dim), random(dim, dtype=torch.bfloat16)
    angle = random(1 if shared_turns else batch, total, 1, dim // 2)
    turns = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
    turns = turns.unflatten(-1, (2, 2))
    out = [torch.zeros(batch, total, heads, dim, dtype=dtype, device=DEVICE) for _ in range(3)]
    ops.qk_norm_rope(q, k, v, *weights, turns, tuple(out), first, 1e-6)
    part = slice(first, first + tokens)
    for got, source, weight in zip(out[:2], (q, k), weights, strict=True):
        by_head = exact(source).unflatten(-1, (heads, dim))
        expected = twin.norm_rope(by_head, exact(weight), exact(turns[:, part]), 1e-6)
        assert_rounded_once(got[:, part], expected, dtype)
    assert torch.equal(out[2][:, part], v.unflatten(-1, (heads, dim)))
    for got in out:
        assert not got[:, :first].any() and not got[:, first + tokens :].any()
    untouched = out[2].clone()
    ops.qk_norm_rope(q, k, None, *weights, turns, (out[0], out[1], None), first, 1e-6)
    assert torch.equal(out[2], untouched)


def test_q_and_k_that_lie_differently(ops):
    """One of two projections fused, the other not."""
    heads, dim, tokens = 2, 16, 3
    fused = random(2, tokens, 2 * heads * dim)
    q, k = fused.split(heads * dim, dim=-1)
    turns = torch.eye(2, device=DEVICE).expand(1, tokens, 1, dim // 2, 2, 2).contiguous()
    weight = random(dim)
    found = []
    for given in ((q, k, q), (q, k.contiguous(), q), (q, k, q.mT.contiguous().mT)):
        out = tuple(torch.zeros(2, tokens, heads, dim, device=DEVICE) for _ in range(3))
        ops.qk_norm_rope(*given, weight, weight, turns, out, 0, 1e-6)
        found.append(torch.stack(out))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(ops, dtype):
    a, b = random(3, 1501, dtype=dtype, scale=8), random(3, 1501, dtype=dtype)
    assert_rounded_once(ops.swiglu(a, b), twin.swiglu(exact(a), exact(b)), dtype)


def test_the_twin_is_what_torch_computes():
    x, weight = random(2, 3, 64).double(), random(64).double()
    rms = torch.nn.functional.rms_norm(x, (64,), weight, 1e-5)
    torch.testing.assert_close(twin.norm_modulate(x, weight, None, None, 1e-5, False), rms)
    layer = torch.nn.functional.layer_norm(x, (64,), None, None, 1e-5)
    torch.testing.assert_close(twin.norm_modulate(x, None, None, None, 1e-5, True), layer)
