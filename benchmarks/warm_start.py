"""Milliseconds to the first result of a def in a new process, with a cold and with a warm cache.

`python -m benchmarks.warm_start`. Every process imports torch and the package first; then it defines and calls. The
cache is a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from .compile_time import CASES, Case
from .runner import def_name
from .timing import Quartiles

CHOSEN = ("add", "softmax", "layernorm", "matmul", "tbmm", "mlp3", "conv2d", "gconv")
GOAL = 0.030
PROGRAM = """
import sys, time, torch
from tensor_comprehensions import define
tensors = [torch.randn(shape) for shape in {shapes!r}]
start = time.perf_counter()
op = define({source!r})[{name!r}]
op(*tensors)
end = time.perf_counter()
op(*tensors)
print(end - start, time.perf_counter() - end)
"""


def seconds(case: Case, folder: str, mode: str) -> tuple[float, float]:
    """Seconds of a new process to its first result, and then of a second call."""
    program = PROGRAM.format(shapes=case.shapes(0), source=case.source, name=def_name(case.source))
    environment = os.environ | {"TC_CACHE": mode, "TC_CACHE_DIR": folder}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    first, second = map(float, done.stdout.split())
    return first, second


def report(repeat: int, names: Sequence[str]) -> Iterator[str]:
    yield f"{'def':16} {'cold':>8} {'warm':>8} {'quartiles':>18} {'next call':>10}   goal of warm"
    for case in CASES:
        name = def_name(case.source)
        if name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            cold, _ = seconds(case, folder, "readwrite")
            runs = [seconds(case, folder, "readwrite") for _ in range(repeat)]
        warm, later = (Quartiles.of(list(values)) for values in zip(*runs, strict=True))
        spread = f"{warm.low * 1e3:.1f} .. {warm.high * 1e3:.1f} ms"
        verdict = "met" if warm.median <= GOAL else "missed"
        yield (
            f"{name:16} {cold * 1e3:5.0f} ms {warm.median * 1e3:5.1f} ms {spread:>18} {later.median * 1e3:7.2f} ms"
            f"   {GOAL * 1e3:.0f} ms {verdict}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm_start", description=__doc__)
    parser.add_argument("--repeat", type=int, default=7, help="processes per def (default 7)")
    parser.add_argument("names", nargs="*", default=CHOSEN, help="which defs")
    given = parser.parse_args(arguments)
    for text in report(given.repeat, given.names):
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
