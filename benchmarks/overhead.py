"""The cost of calling a compiled op, next to torch's operators: `python -m benchmarks.overhead`.

The tensors are so small that the kernel itself takes nanoseconds; the time is that of the call and of the output.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch

import tensor_comprehensions

from . import sources as tc
from .runner import def_name
from .timing import Quartiles, interleave

GOAL = 3e-6
OPERATOR_GOAL = 1.3


def contenders() -> dict[str, Callable[[], object]]:
    """Calls on tensors of 64 elements, ours and torch's, with and without the allocation of an output."""
    a, b, c, out = (torch.randn(8, 8) for _ in range(4))
    leaf = torch.randn(8, 8, requires_grad=True)
    add, mul_add = (operator(source) for source in (tc.ADD, tc.MUL_ADD_TANH))
    overload = add.overload
    return {
        "torch.empty": lambda: torch.empty(8, 8),
        "torch.add": lambda: torch.add(a, b),
        "torch.add, out=": lambda: torch.add(a, b, out=out),
        "ours, 2 inputs": lambda: add(a, b),
        "ours, 2 inputs, out=": lambda: add(a, b, out=out),
        "ours, 3 inputs": lambda: mul_add(a, b, c),
        "ours, transposed input": lambda: add(a, b.t()),
        "ours, the operator": lambda: overload(a, b),
        "torch.add, recorded": lambda: torch.add(leaf, b),
        "ours, recorded": lambda: add(leaf, b),
    }


def operator(source: str) -> tensor_comprehensions.Op:
    return tensor_comprehensions.define(source)[def_name(source)]


def measure(seconds: float) -> Mapping[str, Quartiles]:
    """Seconds per call of each contender, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: Quartiles.of(v) for name, v in interleave(contenders(), seconds=seconds).seconds.items()}
    finally:
        torch.set_num_threads(before)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to measure (default 2)")
    times = measure(parser.parse_args(arguments).seconds)
    for name, q in times.items():
        print(f"{name:24} {q.median * 1e6:6.2f} us   ({q.low * 1e6:.2f} .. {q.high * 1e6:.2f})")
    beyond = times["ours, 2 inputs"].median - times["torch.empty"].median
    print(f"ours beyond the output's allocation: {beyond * 1e6:.2f} us (goal {GOAL * 1e6:.0f} us)")
    ratio = times["ours, the operator"].median / times["torch.add"].median
    print(f"the operator beside torch.add: {ratio:.2f} (goal {OPERATOR_GOAL})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
