"""The 48 contractions of the GETT paper: `python -m benchmarks.contractions --help`.

Ours, as the cost model chooses and (`--search`) after a search of so many candidates, beside `torch.einsum`,
`numpy.einsum(optimize=True)`, and `torch.mm` of the equally sized matrix product, which moves no data around and is
the paper's upper bound. Only einsum computes the same thing and is a peer; its result is brought into the order of the
indices asked for, in which ours stands. What it takes without, as a view of a result in an order that suited it, stands
beside. The regret of the model is what its choice takes longer than the best candidate that the search found.

`--random N` draws N others instead (`random_contractions.py` says how), which `--seed` determines.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tensor_comprehensions

from .random_contractions import draw as draw_contraction
from .report import machine
from .runner import OURS, using_threads
from .timing import Quartiles, interleave, keep_memory, ratios, release_memory

BOUND, EINSUM, VIEW, NUMPY = "torch.mm", "torch.einsum", "einsum's view", "numpy.einsum"
SEARCHED = "searched"
SIZES = ("odd", "ci", "bench", "full", "full_float64")
TYPES = {torch.float16: "half", torch.float32: "float", torch.float64: "double"}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}
LEAST = 3
"""Rounds of turns, even where one takes longer than the time for all."""
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
        schedule: how ours was lowered. searched: the pipeline that the search found, if there was one; the
            schedule where that is what no pipeline says.
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
    searched: str = ""

    def speed(self, who: str) -> float | None:
        """Median GFLOP/s of a contender."""
        return 2e-9 * math.prod(self.product) / self.times[who].median if who in self.times else None

    def over(self, who: str, ours: str = OURS) -> float:
        """How many times as fast `ours`, which is the model's choice or `SEARCHED`, is as `who`."""
        return self.ratios[who].median / (1 if ours == OURS else self.ratios[ours].median)

    @property
    def regret(self) -> float | None:
        """The extra time of the model's choice over the searched kernel, relative to the latter; 0 if equal."""
        over = self.ratios.get(SEARCHED)
        return None if over is None else max(0.0, 1 / over.median - 1)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Attributes:
        threads: of every contender.
        seconds: about how long to time a contraction.
        search: how many candidates are measured; 0: no search.
        search_seconds: what the search of one contraction may take.
        left_out: contenders that do not run.
        seed: of the inputs and of the order of turns.
    """

    threads: int = 1
    seconds: float = 1.5
    search: int = 0
    search_seconds: float = 20.0
    left_out: tuple[str, ...] = ()
    seed: int = 0


def contractions(size: str) -> list[Contraction]:
    """The whole list at one of `SIZES`."""
    entries = json.loads(Path(__file__).with_suffix(".json").read_text())
    dtype = torch.float64 if size.endswith("float64") else torch.float32
    return [Contraction(e["id"], e["name"], e["group"], e["sizes"][size], dtype) for e in entries]


def random_contractions(count: int, seed: int) -> list[Contraction]:
    """`count` draws of `random_contractions.py`. Their names are reversed, as the paper's are."""
    choose = random.Random(seed)
    found = []
    for number in range(count):
        row_major, sizes = draw_contraction(choose)
        name = "-".join(tensor[::-1] for tensor in row_major.split("-"))
        found.append(Contraction(f"random{number}", name, "random", sizes, torch.float32))
    return found


def measure(case: Contraction, size: str, settings: Settings) -> Measured:
    """Check and time one contraction in this process."""
    threads, seed = settings.threads, settings.seed
    with using_threads(threads), torch.no_grad():
        limit_numpy(threads)
        generator = torch.Generator().manual_seed(seed)
        _, *factors = case.tensors
        rows, columns, inner = case.product
        shapes = (*map(case.shape, factors), (rows, inner), (inner, columns))
        a, b, x, y = (torch.empty(shape, dtype=case.dtype).normal_(generator=generator) for shape in shapes)
        found = _contenders(case, a, b, settings)
        if BOUND not in settings.left_out:
            found.calls[BOUND] = lambda: torch.mm(x, y)
        clock = time.thread_time if threads == 1 else time.perf_counter
        samples = interleave(found.calls, seconds=settings.seconds, clock=clock, seed=seed, least=LEAST).seconds
    if found.searched and SEARCHED not in samples and OURS in samples:
        samples = {**samples, SEARCHED: samples[OURS]}  # the search found the model's choice
    others = [name for name in samples if name != OURS and OURS in samples]
    return Measured(
        case.id, case.name, case.group, case.equation, size, case.product, threads,
        {name: Quartiles.of(values) for name, values in samples.items()},
        {name: ratios(samples[name], samples[OURS]) for name in others},
        found.errors, found.failures, found.schedule, found.searched,
    )  # fmt: skip


Call = Callable[[], object]


@dataclass(slots=True)
class _Field:
    """Those whose result is right, the errors of all, why others are out, and how ours was lowered."""

    calls: dict[str, Call] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    schedule: str = ""
    searched: str = ""


def _contenders(case: Contraction, a: Tensor, b: Tensor, settings: Settings) -> _Field:
    operator = tensor_comprehensions.define(case.source).contract
    x, y = a.numpy(), b.numpy()
    everyone: dict[str, Callable[[], Any]] = {
        EINSUM: lambda: torch.einsum(case.equation, a, b).contiguous(),
        VIEW: lambda: torch.einsum(case.equation, a, b),
        OURS: lambda: operator(a, b),
        NUMPY: lambda: np.ascontiguousarray(np.einsum(case.equation, x, y, optimize=True)),
    }
    expected = everyone[VIEW]()
    if expected.is_contiguous():  # no view is less work
        del everyone[VIEW]
    sampled = sampled_error(case, a, b, expected, settings.seed)
    admitted = _Field()

    def admit(name: str, call: Callable[[], Any]) -> None:
        try:
            result = torch.as_tensor(call())
            error = max(sampled, ((result - expected).abs().max() / expected.abs().max()).item())
        except Exception as failure:  # one contender's failure must not end the others' measurement
            admitted.failures[name] = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
            return
        admitted.errors[name] = error
        if error <= TOLERANCE[case.dtype]:
            admitted.calls[name] = call
        else:
            admitted.failures[name] = f"wrong result: relative error {error:.2g}"

    for name, call in everyone.items():
        if name not in settings.left_out:
            admit(name, call)
    if OURS in admitted.calls:
        admitted.schedule = operator.compile(a, b).source("schedule")
        if settings.search:
            tuned = tensor_comprehensions.define(case.source).contract
            found = tuned.autotune(a, b, search="schedules", population=settings.search, budget=settings.search_seconds)
            admitted.searched = str(found.options.schedule or admitted.schedule)
            if tuned.compile(a, b).source("schedule") != admitted.schedule:
                admit(SEARCHED, lambda: tuned(a, b))
    return admitted


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
    """Set the number of threads of NumPy's BLAS, if it is OpenBLAS."""
    for path in (Path(np.__file__).parent.parent / "numpy.libs").glob("*openblas*"):
        library = ctypes.CDLL(str(path))
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(threads)


# --- reports -----------------------------------------------------------------------------------------------------

CONTENDERS = (OURS, SEARCHED, BOUND, EINSUM, VIEW, NUMPY)
OTHERS = (BOUND, EINSUM, VIEW, NUMPY)
HEAD = ("contraction", "rows x columns x inner", *CONTENDERS, "/mm", "/torch", "/view", "/numpy", "regret")
WIDTHS = (24, 22, 7, 8, 8, 12, 13, 12, 6, 6, 6, 6, 6)


def line(cells: Sequence[str]) -> str:
    return "  ".join(c.ljust(w) if n == 0 else c.rjust(w) for n, (c, w) in enumerate(zip(cells, WIDTHS, strict=True)))


def row(m: Measured) -> tuple[str, ...]:
    """The cells of one line under `HEAD`: GFLOP/s, and how many times as fast ours is."""
    speeds = (m.speed(who) for who in CONTENDERS)
    over = (m.ratios.get(who) for who in OTHERS)
    return (
        m.name,
        "x".join(map(str, m.product)),
        *("-" if s is None else f"{s:.1f}" for s in speeds),
        *("-" if r is None else f"{r.median:.2f}" for r in over),
        "-" if m.regret is None else f"{m.regret:.2f}",
    )


def means(results: Sequence[Measured]) -> Iterator[str]:
    """Geometric mean and the worst of the model's choice and of the searched kernels against each other contender."""
    for ours in (OURS, SEARCHED):
        for who in OTHERS:
            known = sorted((m.over(who, ours), m.name) for m in results if {who, ours} <= set(m.times))
            if known:
                worst = ", ".join(f"{value:.2f} {name}" for value, name in known[:3])
                yield f"{ours} / {who}: geometric mean {_mean(v for v, _ in known):.3f} of {len(known)}; least {worst}"
    regrets = sorted(((m.regret, m.name) for m in results if m.regret is not None), reverse=True)
    if regrets:
        worst = ", ".join(f"{value:.2f} {name}" for value, name in regrets[:3])
        yield f"regret of the model: mean {_mean(1 + r for r, _ in regrets) - 1:.3f} of {len(regrets)}; most {worst}"


def _mean(values: Iterable[float]) -> float:
    """Geometric."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


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
    size = f"random, seed {options.seed}" if options.random else options.size
    cases = random_contractions(options.random, options.seed) if options.random else contractions(size)
    chosen = part(select(cases, options.kernels), options.shard)
    if options.list:
        print("\n".join(f"{c.name:24} {c.group:10} {c.equation}" for c in chosen))
        return 0
    settings = Settings(options.threads, options.seconds, options.search, options.search_seconds,
                        tuple(options.without), options.seed)  # fmt: skip
    results: list[Measured] = []
    print(line(HEAD))
    if options.load:
        names = {c.name for c in chosen}
        results = [m for path in options.load for m in read_json(path) if m.name in names]
        print(*(line(row(m)) for m in results), sep="\n")
    else:
        kept = not options.fresh_pages and keep_memory()
        for case in chosen:
            release_memory()
            results.append(measure(case, size, settings))
            print(line(row(results[-1])), flush=True)
            if options.json:
                write_json(options.json, results, {**asdict(settings), "memory reused": kept})
    print(*means(results), *(f"{m.name}: {who}: {why}" for m in results for who, why in m.failures.items()), sep="\n")
    if options.plot:
        from .bars import draw  # matplotlib is an extra

        draw(results, options.plot)
    return 0


def select(cases: Sequence[Contraction], patterns: Sequence[str] | None) -> list[Contraction]:
    """The contractions whose id, name or group matches one of the shell patterns; all without patterns."""
    wanted = patterns or ["*"]
    return [c for c in cases if any(fnmatch(text, p) for p in wanted for text in (c.id, c.name, c.group))]


def part(cases: Sequence[Contraction], shard: str) -> list[Contraction]:
    """Every N-th of `cases` from the K-th on, for a shard "K/N" counted from 1."""
    number, _, count = shard.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise SystemExit(f"--shard {shard}: expected K/N with K from 1 to N")
    return list(cases)[int(number) - 1 :: int(count)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contractions", description=__doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="ci", help="which of the list's sizes (default ci: about 50 MiB a case)")
    add("--random", type=int, default=0, metavar="N", help="instead of the list, N random ones that --seed determines")
    add("--kernels", nargs="+", metavar="PATTERN", help="names, ids or groups, with shell wildcards; default all")
    add("--threads", type=int, default=1, metavar="N", help="default 1")
    add("--fresh-pages", action="store_true", help="let every call pay for the page faults of its outputs")
    add("--seconds", type=float, default=1.5, help="time per contraction (default 1.5)")
    add("--search", type=int, default=0, metavar="N", help="also search among up to N candidates")
    add("--search-seconds", type=float, default=20.0, metavar="S", help="for one search (default 20)")
    add("--without", nargs="+", default=[], choices=OTHERS, help="contenders that do not run")
    add("--shard", default="1/1", metavar="K/N", help="only every N-th contraction, from the K-th on")
    add("--seed", type=int, default=0, help="of the inputs, of the order of turns and of random contractions")
    add("--json", type=Path, metavar="PATH", help="write everything measured")
    add("--plot", type=Path, metavar="PATH", help="write bars of the speeds (.svg or .png)")
    add("--load", nargs="+", type=Path, metavar="PATH", help="measure nothing: show what --json wrote before")
    add("--list", action="store_true", help="list the contractions and stop")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
