"""`python -m benchmarks.gpu`: every kernel on a CUDA device, beside torch eager and torch.compile.

Float32 products run with TF32 off. Times are medians of single calls between two events, with the inputs warm in no
cache: a large buffer is written before each call. The last columns are what the arguments' and results' bytes make of
that time, and the share of the bandwidth of a copy of the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

import tensor_comprehensions as tc

from .__main__ import select
from .kernels import Benchmark

CALLS = 30
FLUSH = 256 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of each way, bytes that must move, and the largest error relative to the largest element."""

    name: str
    ours: float
    peers: dict[str, float]
    bytes: int
    copy: float
    error: float

    def text(self) -> str:
        best = min(self.peers, key=lambda name: self.peers[name])
        speed = self.bytes / self.ours
        times = "  ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in self.peers.items())
        return (
            f"{self.name:28} {self.ours * 1e6:9.1f} us  {self.peers[best] / self.ours:5.2f} x of {best:18} "
            f"{speed / 1e9:7.1f} GB/s {self.copy / self.ours:6.1%} of a copy  error {self.error:.1e}  [{times}]"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--kernels", nargs="+", metavar="PATTERN", help="names or families, with shell wildcards")
    parser.add_argument("--no-compile", action="store_true", help="peers without torch.compile")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA device; nothing is measured")
        return 2
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for benchmark in select(options.kernels):
        print(measured(benchmark, compiled=not options.no_compile).text(), flush=True)
    return 0


def measured(benchmark: Benchmark, *, compiled: bool) -> Row:
    """One kernel against its peers, on random inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = [i.make(generator).cuda() for i in benchmark.inputs]
    op = next(iter(tc.define(benchmark.source)))
    ways: dict[str, Callable[[], object]] = {"ours": lambda: op(*inputs)}
    for peer in benchmark.peers:
        values = tuple(inputs) if peer.prepare is None else peer.prepare(*inputs)
        ways[peer.name] = lambda f=peer.function, v=values: f(*v)  # type: ignore[misc]
        if compiled and peer.compiled:
            fast = torch.compile(peer.function, mode="max-autotune-no-cudagraphs")
            ways[f"{peer.name} compiled"] = lambda f=fast, v=values: f(*v)  # type: ignore[misc]
    ours = _tuple(op(*inputs))
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    exact = _tuple(benchmark.peers[0].function(*wide))
    error = max(
        float((a.double() - e).abs().max() / e.abs().max().clamp_min(1e-30)) for a, e in zip(ours, exact, strict=True)
    )
    moved = sum(x.numel() * x.element_size() for x in (*inputs, *ours))
    times = seconds(ways)
    block = torch.empty(max(1, moved // 2), dtype=torch.uint8, device="cuda")
    copy = seconds({"copy": block.clone})["copy"]
    return Row(benchmark.name, times.pop("ours"), times, moved, copy, error)


def seconds(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median time of a call of each, which take turns."""
    flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    for run in ways.values():
        run()
        run()
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
    return x if isinstance(x, tuple) else (x,)


if __name__ == "__main__":
    raise SystemExit(main())
