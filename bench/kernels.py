"""Bandwidth of every dequantisation kernel against a plain copy of the same bytes.

    python -m bench.kernels                     all parts, rows appended to bench/results/
    python -m bench.kernels --sweep             try every (tile, warps, conversion) of every type
    python -m bench.kernels --types Q4_K,Q6_K --parts kernels

Parts: `kernels` (correctness, then bandwidth), `sweep`, `overhead` (Python per launch), `compile`
(the op inside torch.compile), `capture` (CUDA graphs under both allocators, each in a process of
its own, because a failing capture can end it), `paths` (kernel, compiled and eager reference).
A part that fails says so and the others go on; the summary is printed last.

Weights and outputs are rotated through several times the L2 cache. A sample is one pass over all of
them between two CUDA events; p20, p50 and p80 are over samples. Bytes are those read plus written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import traceback
import types
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[1]
if "speed_tier" not in sys.modules:
    pack = types.ModuleType("speed_tier")
    pack.__path__ = [str(REPO)]
    sys.modules["speed_tier"] = pack

from speed_tier.speed.kernels import QUANT_TYPES, dequantize, dispatch  # noqa: E402
from speed_tier.speed.kernels import reference_iq as iq  # noqa: E402

RESULTS = REPO / "bench" / "results" / "kernels.jsonl"
SHAPES = ((10240, 3840), (3072, 12288))
PARTS = ("kernels", "overhead", "compile", "capture", "paths")
ROTATE_BYTES = 512 << 20
TARGETS = {"Q8_0": 0.90, "Q6_K": 0.90, "Q5_K": 0.90, "Q4_K": 0.90, "Q4_0": 0.90}
OTHER_TARGET = 0.80
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82)}
HALVES |= {"Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": ()}
HALVES |= {"NVFP4": ()}
KERNEL_TYPES = [row for row in QUANT_TYPES if row.kernel]
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def random_packed(row, rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Random codes and finite scales near 0.01, `(rows, bytes_per_row) uint8` on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    count = rows * cols // row.block_size
    blocks = torch.randint(
        0, 256, (count, row.type_size), dtype=torch.uint8, device="cuda", generator=generator
    )
    for at in HALVES.get(row.name, (0,)):
        half = torch.randn(count, 1, device="cuda", generator=generator).mul_(0.01).half()
        blocks[:, at : at + 2] = half.view(torch.uint8)
    if row.name == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 16 + 112
    if row.name == "IQ1_M":  # keep the scale's exponent low
        blocks[:, 55] &= 0x2F
    return blocks.view(rows, -1)


def percentiles(samples: list[float]) -> tuple[float, float, float]:
    ordered = sorted(samples)
    return tuple(ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.2, 0.5, 0.8))


def time_passes(launches: list, samples: int = 15) -> tuple[float, float, float]:
    """Milliseconds a launch: p20, p50, p80 over passes of all launches, back to back."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    times = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for launch in launches:
            launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(launches))
    return percentiles(times)


def copies(total_bytes: int) -> int:
    return max(4, math.ceil(ROTATE_BYTES / total_bytes))


def copy_gb_per_s(total_bytes: int) -> float:
    """Bandwidth of `copy_` that reads half of the bytes and writes the other half."""
    half = total_bytes // 2 // 16 * 16
    sources = [
        torch.ones(half, dtype=torch.uint8, device="cuda") for _ in range(copies(total_bytes))
    ]
    pairs = [(source, torch.empty_like(source)) for source in sources]
    _, p50, _ = time_passes([lambda s=s, d=d: d.copy_(s) for s, d in pairs])
    return 2 * half / p50 / 1e6


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.cpu().double() - b.cpu().double()).abs().max().item()


def check(row) -> dict[str, float]:
    """Largest difference from the eager reference on the GPU, by output dtype; odd row count."""
    rows, cols = 517, 3072
    packed = random_packed(row, rows, cols, seed=1)
    errors = {}
    for dtype in DTYPES:
        # Twice: the first launch is Triton's, the second by raw pointer.
        for _ in range(2):
            out = dequantize(packed, row.id, rows, cols, dtype, path="kernel")
        expected = dequantize(packed, row.id, rows, cols, dtype, path="reference")
        errors[str(dtype).removeprefix("torch.")] = difference(out, expected)
    on_cpu = dequantize(packed.cpu(), row.id, rows, cols, torch.float32, path="reference")
    errors["float32_vs_cpu"] = difference(out, on_cpu)
    shifted = torch.empty(packed.numel() + 2, dtype=torch.uint8, device="cuda")[2:]
    shifted.copy_(packed.view(-1))
    again = dequantize(shifted, row.id, rows, cols, torch.float32, path="kernel")
    errors["float32_unaligned"] = difference(again, out)
    return errors


def time_kernel(
    kernel, row, rows: int, cols: int, samples: int = 15
) -> tuple[float, float, float, int]:
    """One kernel configuration over rotated weights and outputs: p20, p50, p80 ms, and bytes."""
    total = row.packed_bytes(rows, cols) + rows * cols * 2
    weights = [random_packed(row, rows, cols, seed=i) for i in range(copies(total))]
    outs = [torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda") for _ in weights]
    kernel.first_launch(weights[0], outs[0])
    raw = kernel._compiled.get((weights[0].get_device(), torch.bfloat16, True))
    n_quant_blocks = rows * cols // row.block_size
    pairs = list(zip(weights, outs, strict=True))
    if raw is None:
        launches = [lambda w=w, o=o: kernel.jit_launch(w, o) for w, o in pairs]
    else:
        pointers = [(w.data_ptr(), o.data_ptr()) for w, o in pairs]
        launches = [lambda w=w, o=o: raw.run(w, o, n_quant_blocks) for w, o in pointers]
    return (*time_passes(launches, samples), total)


def versions() -> dict[str, str]:
    import triton

    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": sys.version.split()[0],
    }


def commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(REPO), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


class Bench:
    """The run: options, result rows, and what the summary prints."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        wanted = options.types.split(",") if options.types else [r.name for r in KERNEL_TYPES]
        self.rows = [r for r in KERNEL_TYPES if r.name in wanted]
        self.summary: list[str] = []
        self.failures: list[str] = []

    def note(self, line: str) -> None:
        print(line, flush=True)
        self.summary.append(line)

    def guarded(self, what: str, part, *args) -> None:
        try:
            part(*args)
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{what} FAILED: {type(error).__name__}: {str(error)[:200]}")

    def write(self, record: dict) -> None:
        record |= {
            "gpu": torch.cuda.get_device_name(),
            "commit": self.options.commit or commit(),
            "versions": versions(),
            "command": " ".join(["python -m bench.kernels", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
        }
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        with open(self.options.out, "a") as file:
            file.write(json.dumps(record) + "\n")

    # ---- parts ----

    def kernels(self) -> None:
        for row in self.rows:
            self.guarded(f"kernels {row.name}", self.one_kernel, row)

    def one_kernel(self, row) -> None:
        kernel = dispatch.kernel_for(row)
        start = time.perf_counter()
        packed = random_packed(row, 64, 3072)
        dequantize(packed, row.id, 64, 3072, torch.bfloat16, path="kernel")
        torch.cuda.synchronize()
        first_s = time.perf_counter() - start
        errors = check(row)
        worst = max(errors.values())
        for rows, cols in SHAPES:
            p20, p50, p80, total = time_kernel(kernel, row, rows, cols)
            copy = copy_gb_per_s(total)
            rate = total / p50 / 1e6
            target = TARGETS.get(row.name, OTHER_TARGET)
            self.write(
                {
                    "qtype": row.name,
                    "rows": rows,
                    "cols": cols,
                    "dtype": "bfloat16",
                    "ms_p20": p20,
                    "ms_p50": p50,
                    "ms_p80": p80,
                    "gb_per_s": rate,
                    "copy_gb_per_s": copy,
                    "ratio": rate / copy,
                    "target": target,
                    "max_abs_error": errors,
                    "first_launch_s": first_s,
                    "tile": kernel.tile,
                    "num_warps": kernel.num_warps,
                    "mantissa": kernel.mantissa,
                    "raw_refusal": kernel.raw_refusal,
                }
            )
            mark = "ok" if rate / copy >= target else "LOW"
            self.note(
                f"{row.name:7} {rows:6}x{cols:<6} {p50 * 1e3:7.1f} us  {rate:6.0f} GB/s  "
                f"copy {copy:6.0f}  ratio {rate / copy:.3f} {mark:3}  error {worst:g}  "
                f"first {first_s:.2f} s  {kernel.raw_refusal or 'raw'}"
            )

    def sweep(self) -> None:
        for row in self.rows:
            self.guarded(f"sweep {row.name}", self.one_sweep, row)

    def one_sweep(self, row) -> None:
        kernel = dispatch.kernel_for(row)
        kept = (kernel.tile, kernel.num_warps, kernel.mantissa)
        rows, cols = SHAPES[0]
        found = []
        try:
            for tile, num_warps in {*kernel.sweep, kept[:2]}:
                for mantissa in (False, True):
                    kernel.tile, kernel.num_warps, kernel.mantissa = tile, num_warps, mantissa
                    kernel._compiled.clear()
                    try:
                        _, p50, _, total = time_kernel(kernel, row, rows, cols, samples=9)
                    except Exception as error:
                        print(f"  {row.name} {tile} {num_warps} {mantissa}: {str(error)[:100]}")
                        continue
                    found.append((total / p50 / 1e6, (tile, num_warps, mantissa)))
        finally:
            kernel.tile, kernel.num_warps, kernel.mantissa = kept
            kernel._compiled.clear()
        copy = copy_gb_per_s(total)
        found.sort(reverse=True)
        for rate, setting in found:
            print(f"  {row.name:7} {setting!s:18} {rate:6.0f} GB/s  {rate / copy:.3f}")
        now = next(rate for rate, setting in found if setting == kept)
        rate, setting = found[0]
        self.note(
            f"sweep {row.name:7} best (tile, warps, mantissa) {setting!s:17} {rate / copy:.3f}   "
            f"now {kept!s:17} {now / copy:.3f}"
        )
        self.write(
            {
                "sweep": row.name,
                "copy_gb_per_s": copy,
                "settings": [[*setting, round(rate)] for rate, setting in found],
            }
        )

    def overhead(self) -> None:
        """Microseconds of Python a launch, on a weight too small to matter."""
        row = next(r for r in KERNEL_TYPES if r.name == "Q4_K")
        kernel = dispatch.kernel_for(row)
        rows, cols, dtype = 8, 256, torch.bfloat16
        packed = random_packed(row, rows, cols)
        out = dequantize(packed, row.id, rows, cols, dtype)
        op = torch.ops.speed_tier.dequantize.default
        ways = {
            "empty": lambda: torch.empty((rows, cols), dtype=dtype, device=packed.device),
            "jit": lambda: kernel.jit_launch(packed, out),
            "raw": lambda: kernel.launch(packed, rows, cols, dtype),
            "dequantize": lambda: dequantize(packed, row.id, rows, cols, dtype),
            "op": lambda: op(packed, row.id, rows, cols, dtype),
        }
        found = {}
        for name, way in ways.items():
            times = []
            for _ in range(20):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(100):
                    way()
                times.append((time.perf_counter() - start) / 100 * 1e6)
            found[name] = round(percentiles(times)[1], 2)
        self.write({"launch_us": found})
        self.note("launch, us of CPU: " + ", ".join(f"{k} {v}" for k, v in found.items()))

    def compile(self) -> None:
        """The op inside a compiled function: equal, one graph, no recompile."""
        row = next(r for r in KERNEL_TYPES if r.name == "Q4_K")
        rows, cols = 1024, 3072
        packed = random_packed(row, rows, cols)
        x = torch.randn(64, cols, device="cuda", dtype=torch.bfloat16)

        def linear(x, packed):
            weight = dequantize(packed, row.id, rows, cols, torch.bfloat16)
            return torch.nn.functional.silu(torch.nn.functional.linear(x, weight))

        compiled = torch.compile(linear, fullgraph=True)
        expected = linear(x, packed)
        results = [compiled(x, packed) for _ in range(3)]
        error = max((r - expected).abs().max().item() for r in results)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        self.write({"compile": {"max_abs_error": error, "graphs": graphs}})
        self.note(f"compile: {graphs} graph, largest difference {error:g}")

    def capture(self) -> None:
        for allocator in ("native", "cudaMallocAsync"):
            environment = {k: v for k, v in os.environ.items() if "ALLOC_CONF" not in k}
            if allocator != "native":
                environment["PYTORCH_CUDA_ALLOC_CONF"] = f"backend:{allocator}"
            done = subprocess.run(
                [sys.executable, "-m", "bench.kernels", "--capture-child"],
                env=environment,
                cwd=REPO,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            found = json.loads(lines[-1]) if lines else {"ended": (done.stderr or "")[-400:]}
            self.write({"capture": found, "allocator": allocator, "rc": done.returncode})
            self.note(f"capture under {allocator}: rc {done.returncode} {json.dumps(found)}")

    def paths(self) -> None:
        """Milliseconds of each path for every type; what the automatic choice would be."""
        rows, cols = 3072, 3072
        for row in QUANT_TYPES:
            if not row.plain:
                self.guarded(f"paths {row.name}", self.one_path, row, rows, cols)

    def one_path(self, row, rows: int, cols: int) -> None:
        packed = random_packed(row, rows, cols)
        found = {}
        for path in (
            ("kernel", "compiled", "reference") if row.kernel else ("compiled", "reference")
        ):
            start = time.perf_counter()
            dequantize(packed, row.id, rows, cols, torch.bfloat16, path=path)
            torch.cuda.synchronize()
            first_s = time.perf_counter() - start
            launch = dispatch._launch_for(row, packed.device, path)
            way = lambda launch=launch: launch(packed, rows, cols, torch.bfloat16)  # noqa: E731
            _, p50, _ = time_passes([way] * 20, samples=9)
            found[path] = {"ms": round(p50, 4), "first_s": round(first_s, 2)}
        self.write({"paths": row.name, "rows": rows, "cols": cols, "ms": found})
        self.note(
            f"paths {row.name:8} "
            + "  ".join(f"{k} {v['ms']:.3f} ms (first {v['first_s']} s)" for k, v in found.items())
        )


def capture_child() -> None:
    """Capture every kernel by raw pointer in one graph; replay with new weights; compare."""
    rows, cols, dtype = 512, 3072, torch.bfloat16
    weights = {row.name: random_packed(row, rows, cols) for row in KERNEL_TYPES}
    x = torch.randn(32, cols, device="cuda", dtype=dtype)

    def forward() -> list[torch.Tensor]:
        return [
            x @ dequantize(weights[row.name], row.id, rows, cols, dtype).T for row in KERNEL_TYPES
        ]

    forward()
    refusals = {r.name: dispatch.kernel_for(r).raw_refusal for r in KERNEL_TYPES}
    refusals = {name: why for name, why in refusals.items() if why}
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        forward()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            outs = forward()
    mismatches = 0
    for seed in range(1, 6):
        for row in KERNEL_TYPES:
            weights[row.name].copy_(random_packed(row, rows, cols, seed))
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        kept = [out.clone() for out in outs]
        mismatches += sum(not torch.equal(a, b) for a, b in zip(kept, forward(), strict=True))
    print(
        json.dumps(
            {
                "backend": torch.cuda.get_allocator_backend(),
                "kernels": len(KERNEL_TYPES),
                "mismatches": mismatches,
                "raw_refusals": refusals,
            }
        ),
        flush=True,
    )


def codebook_without_gguf() -> None:
    """Where the gguf package is missing, IQ4's codebook from here; other codebook types fail."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        print("gguf is not installed: only the IQ4 codebook is known")
        original = iq.codebook
        iq.codebook = lambda name: (
            torch.tensor(IQ4_VALUES, dtype=torch.float32)
            if name.startswith("IQ4")
            else original(name)
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", help="comma-separated names; default all with kernels")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, sweep")
    parser.add_argument("--sweep", action="store_true", help="also try every launch setting")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="for the rows, where there is no git")
    parser.add_argument("--capture-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.kernels needs a CUDA device; found none.")
        return 1
    codebook_without_gguf()
    if options.capture_child:
        capture_child()
        return 0
    bench = Bench(options)
    parts = [*options.parts.split(","), *(["sweep"] if options.sweep else [])]
    for part in parts:
        start = time.perf_counter()
        bench.guarded(part, getattr(bench, part))
        print(f"-- {part}: {time.perf_counter() - start:.0f} s", flush=True)
    print("\n==== " + torch.cuda.get_device_name() + " " + json.dumps(versions()))
    print("\n".join([*bench.summary, *bench.failures]))
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
