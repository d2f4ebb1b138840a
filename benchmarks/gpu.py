"""`python -m benchmarks.gpu`: every kernel on a CUDA device, beside torch eager and torch.compile.

`--kernels "gemm_*" "fmha_*" "half_*" swiglu lstm mlp` selects those for tensor cores (`gpu_products`). Other products
of float32 run with TF32 off. Times are medians of single calls between two events, with the inputs warm in no
cache: a large buffer is written before each call, which also lets the processor's part of a call pass meanwhile, but
for calls that wait for the device. With `--graphs` each way is captured and replayed: what the device takes alone.
The last columns are what the arguments' and results' bytes make of that time, and the share of the bandwidth of a copy
of the same bytes; for products the floating-point operations.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

import tensor_comprehensions as tc

from .gpu_products import products
from .gpu_rates import calibrate
from .kernels import BENCHMARKS, Benchmark, floats

CALLS = 30
FLUSH = 256 << 20
WARM = 0.3
"""Seconds of work before the first measurement, in which clocks rise."""


def large() -> tuple[Benchmark, ...]:
    """Kernels of the list at sizes that fill a GPU, some only by the length of their sums."""
    known = {b.name: b for b in BENCHMARKS}

    def sized(name: str, like: str, *shapes: tuple[int, ...]) -> Benchmark:
        return replace(known[like], name=name, inputs=floats(*shapes), goal=None)

    return (
        *(sized(f"matmul_{n}", "matmul_1024", (n, n), (n, n)) for n in (2048, 4096)),
        *(sized(f"matmul_{m}x{m}x{k}", "matmul_1024", (m, k), (k, m)) for m, k in ((32, 65536), (128, 16384))),
        sized("tmm_64x64x65536", "tmm_128x1024x1024", (64, 65536), (64, 65536)),
        *(sized(f"softmax_{n}x{d}", "softmax_4096x1024", (n, d)) for n, d in ((65536, 1024), (16384, 8192))),
        sized("layernorm_65536x1024", "layernorm_4096x1024", (65536, 1024), (1024,), (1024,)),
        sized("rmsnorm_swiglu_65536x1024", "rmsnorm_swiglu_4096x1024", (65536, 1024), (65536, 1024), (1024,)),
        sized("moments_4096x36864", "moments_128x36864", (4096, 36864)),
        sized("transpose_8192x8192", "transpose_2048x2048", (8192, 8192)),
        sized("copy_8192x8192", "copy_2048x2048", (8192, 8192)),
        sized("add_8192", "add_2048", (8192, 8192), (8192, 8192)),
        sized("gelu_tanh_8192", "gelu_tanh_2048", (8192, 8192)),
    )


def select(patterns: Sequence[str] | None) -> list[Benchmark]:
    """The kernels whose name or family matches one of the shell patterns; all without patterns."""
    wanted = patterns or ["*"]
    return [
        b
        for b in (*BENCHMARKS, *large(), *products())
        if any(fnmatch(n.lower(), p.lower()) for p in wanted for n in (b.name, b.family))
    ]


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of each way, bytes that must move, and the largest error relative to the largest element.

    flops: floating-point operations of a product, else 0.
    """

    name: str
    ours: float
    peers: dict[str, float]
    bytes: int
    copy: float
    error: float
    flops: int = 0

    def text(self) -> str:
        best = min(self.peers, key=lambda name: self.peers[name])
        speed = self.bytes / self.ours
        times = "  ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in self.peers.items())
        rate = f"  {self.flops / self.ours / 1e12:.2f} TFLOP/s" if self.flops else ""
        return (
            f"{self.name:28} {self.ours * 1e6:9.1f} us  {self.peers[best] / self.ours:5.2f} x of {best:18} "
            f"{speed / 1e9:7.1f} GB/s {self.copy / self.ours:6.1%} of a copy{rate}  error {self.error:.1e}  [{times}]"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--kernels", nargs="+", metavar="PATTERN", help="names or families, with shell wildcards")
    parser.add_argument("--no-compile", action="store_true", help="peers without torch.compile")
    parser.add_argument("--mode", default="default", help="of torch.compile, such as max-autotune-no-cudagraphs")
    parser.add_argument("--graphs", action="store_true", help="time replays of captured calls")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no kernel after so many")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured")
    parser.add_argument("--calibrate", action="store_true", help="measure the rates that the cost models use, instead")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA device; nothing is measured")
        return 2
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True  # peers at their best
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if options.calibrate:
        return _calibrate(options.json)
    return _all(select(options.kernels), options)


def _calibrate(path: Path | None) -> int:
    """Measure and print the rates of the device beside those of the table in `target.py`."""
    rates = calibrate()
    print(f"{'rate':18} {'assumed':>14} {'measured':>14}")
    for rate in rates:
        print(rate.text())
    if path is not None:
        path.write_text(json.dumps([asdict(rate) for rate in rates], indent=1))
    return 0


def _all(benchmarks: Sequence[Benchmark], options: argparse.Namespace) -> int:
    """Measure and print; 1 if a kernel failed, which does not keep the others from their turn."""
    start, rows, failed = perf_counter(), [], 0
    for benchmark in benchmarks:
        if perf_counter() - start > options.seconds:
            print(f"{benchmark.name:28} is not measured: the time is over")
            continue
        try:
            mode = None if options.no_compile else options.mode
            rows.append(measure_benchmark(benchmark, mode=mode, graphs=options.graphs))
            print(rows[-1].text(), flush=True)
        except Exception:
            failed = 1
            print(f"{benchmark.name:28} failed\n{traceback.format_exc(limit=-6)}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return failed


def measure_benchmark(benchmark: Benchmark, *, mode: str | None, graphs: bool, device: str = "cuda") -> Row:
    """One kernel against its peers, on random inputs. mode: of torch.compile, None to leave that out."""
    generator = torch.Generator().manual_seed(0)
    inputs = [i.make(generator).to(device) for i in benchmark.inputs]
    op = benchmark.kernel or next(iter(tc.define(benchmark.source)))
    ways: dict[str, Callable[[], object]] = {"ours": lambda: op(*inputs)}
    torch.compiler.reset()  # else a function that was compiled for other sizes is compiled for all
    for peer in benchmark.peers:
        values = tuple(inputs) if peer.prepare is None else peer.prepare(*inputs)
        ways[peer.name] = lambda f=peer.function, v=values: f(*v)  # type: ignore[misc]
        if mode is not None and peer.compiled:
            fast = torch.compile(peer.function, mode=mode, dynamic=False)
            ways[f"{peer.name} compiled"] = lambda f=fast, v=values: f(*v)  # type: ignore[misc]
    ours = _tuple(op(*inputs))
    error = _error(benchmark, inputs, ours)
    if error > benchmark.tolerance:
        raise ArithmeticError(f"{benchmark.name} is wrong: {error:.1e} of the largest element")
    moved = sum(x.numel() * x.element_size() for x in (*inputs, *ours))
    del ours
    times = seconds({name: capture_graph(run) for name, run in ways.items()} if graphs else ways)
    block = torch.empty(max(1, moved // 2), dtype=torch.uint8, device=device)
    copy = seconds({"copy": capture_graph(block.clone) if graphs else block.clone})["copy"]
    own = times.pop("ours")
    return Row(benchmark.name, own, times, moved, copy, error, benchmark.flops or _flops(benchmark))


def _flops(benchmark: Benchmark) -> int:
    """Of a product of matrices, which the list does not count."""
    if benchmark.family not in ("matmul", "tmm", "C3"):
        return 0
    first, second = (i.shape for i in benchmark.inputs)
    return 2 * first[0] * first[1] * (second[1] if benchmark.family == "matmul" else second[0])


def _error(benchmark: Benchmark, inputs: Sequence[Tensor], ours: Sequence[Tensor]) -> float:
    """The largest error, relative to the first peer in float64 on the same numbers."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    exact = _tuple(benchmark.peers[0].function(*wide))
    pairs = zip(ours, exact, strict=True)
    return max(float((a.double() - e).abs().max() / e.abs().max().clamp_min(1e-30)) for a, e in pairs)


def capture_graph(run: Callable[[], object]) -> Callable[[], object]:
    """The replay of a captured call: the work of the device alone."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def seconds(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median time of a call of each, which take turns."""
    flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    for run in ways.values():
        run()
        run()
    torch.cuda.synchronize()
    start = perf_counter()
    while perf_counter() - start < WARM:
        flush.zero_()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(CALLS):
        for name, run in ways.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3)
    return {name: median(t) for name, t in times.items()}


def _tuple(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


if __name__ == "__main__":
    raise SystemExit(main())
