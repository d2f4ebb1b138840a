"""The 48 contractions of the GETT paper: `python -m benchmarks.contractions --help`.

Ours beside `torch.einsum`, `numpy.einsum(optimize=True)`, and `torch.mm` of the equally sized matrix product, which
moves no data around and is the paper's upper bound. Only the first two compute the same thing and are peers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tensor_comprehensions

from .report import machine
from .runner import OURS, using_threads
from .timing import Quartiles, interleave, keep_memory, ratios

BOUND, EINSUM, NUMPY = "torch.mm", "torch.einsum", "numpy.einsum"
SIZES = ("odd", "ci", "bench", "full", "full_float64")
TYPES = {torch.float32: "float", torch.float64: "double"}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}
SAMPLED = 512
"""Elements of a result that are compared with sums in float64."""


@dataclass(frozen=True, slots=True)
class Contraction:
    """`C = A * B`, summed over the indices that C lacks, in row-major order (the paper's names are column-major).

    Attributes:
        name: the paper's, `C-A-B` with the index of unit stride first.
        sizes: the extent of each index.
    """

    id: str
    name: str
    group: str
    sizes: Mapping[str, int]
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[str, str, str]:
        """Indices of C, A and B, the one of unit stride last."""
        c, a, b = (part[::-1] for part in self.name.split("-"))
        return c, a, b

    @property
    def equation(self) -> str:
        c, a, b = self.tensors
        return f"{a},{b}->{c}"

    @property
    def source(self) -> str:
        """The contraction as a def."""
        c, a, b = self.tensors
        first, second = (f"{TYPES[self.dtype]}({','.join(t.upper())})" for t in (a, b))
        value = f"left({','.join(a)}) * right({','.join(b)})"
        return f"def contract({first} left, {second} right) -> (out) {{ out({','.join(c)}) +=! {value} }}"

    @property
    def product(self) -> tuple[int, int, int]:
        """Rows, columns and inner size of the equally sized matrix product."""
        c, a, b = self.tensors
        rows, columns = ([i for i in t if i in c] for t in (a, b))
        return self._count(rows), self._count(columns), self._count(i for i in a if i not in c)

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.product)

    def shape(self, indices: str) -> tuple[int, ...]:
        return tuple(self.sizes[i] for i in indices)

    def _count(self, indices: Any) -> int:
        return math.prod(self.sizes[i] for i in indices)


@dataclass(frozen=True, slots=True)
class Measured:
    """One contraction.

    Attributes:
        product: rows, columns and inner size of the equal matrix product.
        times: seconds per call of each contender.
        ratios: time of each other contender over ours, round by round; above 1 ours is faster.
        errors: of each contender, relative to the largest element.
        failures: why a contender has no times.
        schedule: how ours was lowered.
    """

    id: str
    name: str
    group: str
    equation: str
    size: str
    product: tuple[int, int, int]
    threads: int
    times: Mapping[str, Quartiles]
    ratios: Mapping[str, Quartiles]
    errors: Mapping[str, float]
    failures: Mapping[str, str] = field(default_factory=dict)
    schedule: str = ""

    def speed(self, who: str) -> float | None:
        """Median GFLOP/s of a contender."""
        return 2e-9 * math.prod(self.product) / self.times[who].median if who in self.times else None


def contractions(size: str) -> list[Contraction]:
    """The whole list at one of `SIZES`."""
    entries = json.loads(Path(__file__).with_suffix(".json").read_text())
    dtype = torch.float64 if size.endswith("float64") else torch.float32
    return [Contraction(e["id"], e["name"], e["group"], e["sizes"][size], dtype) for e in entries]


def measure(case: Contraction, size: str, threads: int, seconds: float, seed: int = 0) -> Measured:
    """Check and time one contraction in this process."""
    with using_threads(threads), torch.no_grad():
        limit_numpy(threads)
        generator = torch.Generator().manual_seed(seed)
        _, *factors = case.tensors
        rows, columns, inner = case.product
        shapes = (*map(case.shape, factors), (rows, inner), (inner, columns))
        a, b, x, y = (torch.empty(shape, dtype=case.dtype).normal_(generator=generator) for shape in shapes)
        calls, errors, failures, schedule = _contenders(case, a, b, seed)
        calls[BOUND] = lambda: torch.mm(x, y)
        clock = time.thread_time if threads == 1 else time.perf_counter
        samples = interleave(calls, seconds=seconds, clock=clock, seed=seed, least=5).seconds
    others = [name for name in samples if name != OURS and OURS in samples]
    return Measured(
        case.id, case.name, case.group, case.equation, size, case.product, threads,
        {name: Quartiles.of(values) for name, values in samples.items()},
        {name: ratios(samples[name], samples[OURS]) for name in others},
        errors, failures, schedule,
    )  # fmt: skip


Call = Callable[[], object]


def _contenders(
    case: Contraction, a: Tensor, b: Tensor, seed: int
) -> tuple[dict[str, Call], dict[str, float], dict[str, str], str]:
    """Those whose result is right, the errors of all, why others are out, and the schedule of ours."""
    operator = tensor_comprehensions.define(case.source).contract
    x, y = a.numpy(), b.numpy()
    everyone: dict[str, Callable[[], Any]] = {
        EINSUM: lambda: torch.einsum(case.equation, a, b),
        OURS: lambda: operator(a, b),
        NUMPY: lambda: np.einsum(case.equation, x, y, optimize=True),
    }
    expected = everyone[EINSUM]()
    sampled = sampled_error(case, a, b, expected, seed)
    calls: dict[str, Call] = {}
    errors, failures = {}, {}
    for name, call in everyone.items():
        try:
            result = torch.as_tensor(call())
            errors[name] = max(sampled, ((result - expected).abs().max() / expected.abs().max()).item())
        except Exception as failure:  # one contender's failure must not end the others' measurement
            failures[name] = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
            continue
        if errors[name] <= TOLERANCE[case.dtype]:
            calls[name] = call
        else:
            failures[name] = f"wrong result: relative error {errors[name]:.2g}"
    schedule = operator.compile(a, b).source("schedule") if OURS in calls else ""
    return calls, errors, failures, schedule


def sampled_error(case: Contraction, a: Tensor, b: Tensor, result: Tensor, seed: int) -> float:
    """The error of randomly chosen elements of `result`, relative to the largest of them."""
    c, *factors = case.tensors
    choose = random.Random(seed)
    worst = largest = 0.0
    for _ in range(min(SAMPLED, result.numel())):
        at = {i: choose.randrange(case.sizes[i]) for i in c}
        x, y = (
            t[tuple(at.get(i, slice(None)) for i in indices)].double()
            for t, indices in zip((a, b), factors, strict=True)
        )
        left, right = ([i for i in indices if i not in c] for indices in factors)
        exact = (x * y.permute([right.index(i) for i in left])).sum().item()
        worst = max(worst, abs(exact - result[tuple(at[i] for i in c)].item()))
        largest = max(largest, abs(exact))
    return worst / largest


def limit_numpy(threads: int) -> None:
    """Make the BLAS that comes with NumPy use so many threads, where it is OpenBLAS."""
    for path in (Path(np.__file__).parent.parent / "numpy.libs").glob("*openblas*"):
        library = ctypes.CDLL(str(path))
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(threads)


# --- reports -----------------------------------------------------------------------------------------------------

HEAD = ("contraction", "rows x columns x inner", "ours", BOUND, EINSUM, NUMPY, "/mm", "/torch", "/numpy")
WIDTHS = (24, 22, 7, 8, 12, 12, 6, 6, 6)
CONTENDERS = (OURS, BOUND, EINSUM, NUMPY)


def line(cells: Sequence[str]) -> str:
    return "  ".join(c.ljust(w) if n == 0 else c.rjust(w) for n, (c, w) in enumerate(zip(cells, WIDTHS, strict=True)))


def row(m: Measured) -> tuple[str, ...]:
    """The cells of one line under `HEAD`: GFLOP/s, and how many times as fast ours is."""
    speeds = (m.speed(who) for who in CONTENDERS)
    over = (m.ratios.get(who) for who in CONTENDERS[1:])
    return (
        m.name,
        "x".join(map(str, m.product)),
        *("-" if s is None else f"{s:.1f}" for s in speeds),
        *("-" if r is None else f"{r.median:.2f}" for r in over),
    )


def means(results: Sequence[Measured]) -> Iterator[str]:
    """Geometric mean and the worst of ours against each other contender."""
    for who in CONTENDERS[1:]:
        known = sorted((m.ratios[who].median, m.name) for m in results if who in m.ratios)
        if known:
            mean = math.exp(sum(math.log(value) for value, _ in known) / len(known))
            worst = ", ".join(f"{value:.2f} {name}" for value, name in known[:3])
            yield f"ours / {who}: geometric mean {mean:.3f} of {len(known)}; least {worst}"


def write_json(path: Path, results: Sequence[Measured], settings: Mapping[str, Any]) -> None:
    """Everything measured. Times in seconds."""
    document = {"machine": machine(), "settings": settings, "results": [asdict(r) for r in results]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def read_json(path: Path) -> list[Measured]:
    """The results that `write_json` wrote to `path`."""
    found = []
    for entry in json.loads(path.read_text())["results"]:
        quartiles = {key: {name: Quartiles(**q) for name, q in entry[key].items()} for key in ("times", "ratios")}
        found.append(Measured(**{**entry, **quartiles, "product": tuple(entry["product"])}))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    chosen = select(contractions(options.size), options.kernels)
    if options.list:
        print("\n".join(f"{c.name:24} {c.group:10} {c.equation}" for c in chosen))
        return 0
    results: list[Measured] = []
    print(line(HEAD))
    if options.load:
        names = {c.name for c in chosen}
        results = [m for path in options.load for m in read_json(path) if m.name in names]
        print(*(line(row(m)) for m in results), sep="\n")
    else:
        kept = not options.fresh_pages and keep_memory()
        for case in chosen:
            results.append(measure(case, options.size, options.threads, options.seconds, options.seed))
            print(line(row(results[-1])), flush=True)
        if options.json:
            settings = {"seconds": options.seconds, "seed": options.seed, "memory reused": kept}
            write_json(options.json, results, settings)
    print(*means(results), *(f"{m.name}: {who}: {why}" for m in results for who, why in m.failures.items()), sep="\n")
    if options.plot:
        from .bars import draw  # matplotlib is an extra

        draw(results, options.plot)
    return 0


def select(cases: Sequence[Contraction], patterns: Sequence[str] | None) -> list[Contraction]:
    """The contractions whose id, name or group matches one of the shell patterns; all without patterns."""
    wanted = patterns or ["*"]
    return [c for c in cases if any(fnmatch(text, p) for p in wanted for text in (c.id, c.name, c.group))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contractions", description=__doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="ci", help="which of the list's sizes (default ci: about 50 MiB a case)")
    add("--kernels", nargs="+", metavar="PATTERN", help="names, ids or groups, with shell wildcards; default all")
    add("--threads", type=int, default=1, metavar="N", help="default 1")
    add("--fresh-pages", action="store_true", help="let every call pay for the page faults of its outputs")
    add("--seconds", type=float, default=1.5, help="time per contraction (default 1.5)")
    add("--seed", type=int, default=0, help="of the inputs and of the order of turns")
    add("--json", type=Path, metavar="PATH", help="write everything measured")
    add("--plot", type=Path, metavar="PATH", help="write bars of the speeds (.svg or .png)")
    add("--load", nargs="+", type=Path, metavar="PATH", help="measure nothing: show what --json wrote before")
    add("--list", action="store_true", help="list the contractions and stop")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
