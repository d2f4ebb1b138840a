"""Whether memory stays where it is over many calls and many compiles: `python -m benchmarks.memory`."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import sources as tc
from .overhead import operator


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(step: Callable[[int], object], warm: int, count: int) -> float:
    """Bytes per step by which the process grows over `count` steps after `warm` of them."""
    for n in range(warm):
        step(n)
    before = resident()
    for n in range(warm, warm + count):
        step(n)
    return (resident() - before) / count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--compiles", type=int, default=1_000)
    options = parser.parse_args(arguments)
    call, x = operator(tc.SOFTMAX), torch.randn(8, 64)
    print(f"{growth(lambda _: call(x), 1_000, options.calls):8.2f} bytes per call")

    def fresh(n: int) -> object:
        return operator(tc.ADD)(torch.zeros(2, 3 + n), torch.zeros(2, 3 + n))

    print(f"{growth(fresh, 50, options.compiles):8.0f} bytes per compile")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
