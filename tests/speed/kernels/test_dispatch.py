"""The type table, the path choice and the op."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from speed_tier.speed.errors import KernelConstraintError
from speed_tier.speed.kernels import (
    PATHS,
    QUANT_TYPES,
    chosen_path,
    dequantize,
    dispatch,
    forget_choices,
)
from speed_tier.tests.speed.kernels import cases
from torch._dynamo.testing import CompileCounterWithBackend

REPO = Path(__file__).resolve().parents[3]
ROWS, COLS = 6, 512


TIME_REFERENCES = dispatch._faster_reference


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch):
    """No choice made yet, and none that takes a compile to make."""
    monkeypatch.setattr(dispatch, "_faster_reference", lambda *a: ("reference", "timed"))
    forget_choices()
    torch._dynamo.reset()
    yield
    forget_choices()


def weight(name, rows=ROWS, cols=COLS):
    row = cases.BY_NAME[name]
    blocks = cases.packed(name, "random", rows * cols // row.block_size)
    expected = cases.oracle(name, blocks).reshape(rows, cols)
    return torch.from_numpy(blocks).to(cases.DEVICE), row.id, expected


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["Q4_K"])
def test_each_path_can_be_forced(name, path):
    packed, qtype, expected = weight(name)
    out = dequantize(packed, qtype, ROWS, COLS, torch.bfloat16, path=path)
    assert cases.equal_bits(out, expected.to(torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("row", QUANT_TYPES, ids=lambda row: row.name)
def test_compiled_reference_is_exact(row):
    packed, qtype, expected = weight(row.name)
    out = dequantize(packed, qtype, ROWS, COLS, torch.float32, path="compiled")
    assert cases.equal_bits(out, expected)


def test_compiled_reference_compiles_once_for_every_row_count(monkeypatch):
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(
        dispatch,
        "_compiled_reference",
        lambda: torch.compile(
            dispatch.ref.dequantize_blocks, dynamic=True, fullgraph=True, backend=counter
        ),
    )
    for rows in (4, 6, 9):
        packed, qtype, expected = weight("Q5_K", rows)
        out = dequantize(packed, qtype, rows, COLS, torch.float32, path="compiled")
        assert cases.equal_bits(out, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("row", QUANT_TYPES, ids=lambda row: row.name)
def test_automatic_choice_is_right_and_kept(row, monkeypatch):
    timed = []
    monkeypatch.setattr(
        dispatch, "_faster_reference", lambda *a: timed.append(a) or ("reference", "timed")
    )
    packed, qtype, expected = weight(row.name)
    for _ in range(2):
        out = dequantize(packed, qtype, ROWS, COLS, torch.float16)
        assert cases.equal_bits(out, expected.to(torch.float16))
    path, reason = chosen_path(qtype, torch.device(cases.DEVICE))
    if row.plain:
        assert (path, reason) == ("reference", "a cast")
    elif row.kernel and cases.DEVICE == "cuda":
        assert path == "kernel"
    else:
        assert path == "reference" and reason.endswith("timed")
    assert len(timed) == (0 if path == "kernel" or row.plain else 1)


def test_references_are_timed_against_each_other():
    path, reason = TIME_REFERENCES(cases.BY_NAME["TQ2_0"], torch.device("cpu"))
    assert path in ("compiled", "reference")
    assert "compiled" in reason and "eager" in reason and " ms" in reason


def test_without_a_compiler_the_eager_reference_runs(monkeypatch):
    monkeypatch.setattr(dispatch, "_faster_reference", TIME_REFERENCES)
    monkeypatch.setattr(dispatch.env, "inductor_problem", lambda device: "no C++ compiler here")
    packed, qtype, expected = weight("IQ2_S")
    out = dequantize(packed, qtype, ROWS, COLS, torch.float32)
    assert cases.equal_bits(out, expected)
    assert "no C++ compiler here" in chosen_path(qtype, torch.device(cases.DEVICE))[1]


def test_a_failing_compile_falls_back_with_the_reason(monkeypatch):
    def fail(*args):
        raise RuntimeError("boom")

    monkeypatch.setattr(dispatch, "_compiled_launch", lambda row, device: fail)
    path, reason = TIME_REFERENCES(cases.BY_NAME["IQ2_S"], torch.device("cpu"))
    assert path == "reference" and "RuntimeError" in reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qtype": 99}, "GGUF type 99 is not known"),
        ({"rows": ROWS + 1}, "needs 2016 bytes; found 1728"),
        ({"cols": COLS + 1}, "multiple of 256 weights; found 513"),
        ({"dtype": torch.float64}, "found torch.float64"),
        ({"packed": torch.zeros(1728, dtype=torch.int8)}, "contiguous uint8; found torch.int8"),
        ({"packed": torch.zeros(1728, 2, dtype=torch.uint8)[:, 0]}, "with strides (2,)"),
    ],
)
@pytest.mark.parametrize("through", ["eager", "op"])
def test_what_does_not_fit_is_refused_in_words(change, words, through):
    packed, qtype, _ = weight("Q4_K")
    call = {"packed": packed, "qtype": qtype, "rows": ROWS, "cols": COLS, "dtype": torch.float32}
    call |= change
    function = dequantize if through == "eager" else torch.ops.speed_tier.dequantize
    with pytest.raises(KernelConstraintError) as error:
        function(*call.values())
    assert words in str(error.value)


def test_a_path_that_cannot_run_says_why():
    packed, qtype, _ = weight("IQ3_S")
    with pytest.raises(KernelConstraintError, match="IQ3_S has no kernel"):
        dequantize(packed, qtype, ROWS, COLS, torch.float32, path="kernel")
    with pytest.raises(ValueError, match="kernel, compiled, reference; found 'fast'"):
        dequantize(packed, qtype, ROWS, COLS, torch.float32, path="fast")


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "IQ3_S"])
def test_op_passes_opcheck(name):
    packed, qtype, _ = weight(name)
    args = (packed, qtype, ROWS, COLS, torch.bfloat16)
    torch.library.opcheck(torch.ops.speed_tier.dequantize.default, args)


def test_compile_sees_the_op_whole_and_does_not_recompile(monkeypatch):
    counter = CompileCounterWithBackend("inductor")
    packed, qtype, expected = weight("Q4_K")

    @torch.compile(backend=counter, fullgraph=True)
    def linear(x, packed):
        return torch.nn.functional.linear(x, dequantize(packed, qtype, ROWS, COLS, x.dtype))

    x = torch.randn(3, COLS, device=cases.DEVICE)
    for _ in range(3):
        torch.testing.assert_close(linear(x, packed).cpu(), x.cpu() @ expected.T)
    assert counter.frame_count == 1
    calls = [n for g in counter.graphs for n in g.graph.nodes if "speed_tier" in str(n.target)]
    assert len(calls) == 1


def test_eager_call_costs_little_python(monkeypatch):
    """Everything but the launch itself: under 15 us with the output's allocation."""
    packed, qtype, _ = weight("Q4_K")

    def launch(packed, rows, cols, dtype):
        return torch.empty((rows, cols), dtype=dtype, device=packed.device)

    monkeypatch.setitem(dispatch._chosen, (qtype, packed.get_device()), launch)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(200):
            dequantize(packed, qtype, ROWS, COLS, torch.bfloat16)
        best = min(best, (time.perf_counter() - start) / 200)
    assert best < 15e-6, f"{best * 1e6:.1f} us"


def test_importing_the_kernels_loads_no_triton_and_starts_no_cuda():
    code = (
        "import sys, types, torch\n"
        "for name in ('speed_tier', 'speed_tier.speed'):\n"
        "    module = types.ModuleType(name)\n"
        f"    module.__path__ = [{str(REPO)!r} + ('/speed' if name.endswith('.speed') else '')]\n"
        "    sys.modules[name] = module\n"
        "import speed_tier.speed.kernels\n"
        "print('triton' in sys.modules, 'gguf' in sys.modules, torch.cuda.is_initialized())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["False", "False", "False"], done.stdout
