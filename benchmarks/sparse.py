"""Sparse operators beside SciPy and torch: `python -m benchmarks.sparse --help`.

Products, sums, sampled products and MTTKRP on matrices whose elements lie at random, in a band, or in rows and columns
of very different lengths. All contenders compute on the same elements, results are compared element by element, and
ratios are of the better of SciPy and torch over ours, round by round. SciPy runs on one thread.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tensor_comprehensions as tc

from .report import duration, machine
from .runner import OURS, using_threads
from .timing import Quartiles, interleave, keep_memory, ratios, release_memory

try:
    import scipy.sparse as scipy_sparse
except ImportError:  # an extra
    scipy_sparse = None

SCIPY, TORCH = "SciPy", "torch"
NO_SCIPY = "SciPy is not installed (pip install scipy)"
TYPES = {"float32": ("float", torch.float32), "float64": ("double", torch.float64)}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
LEAST = 5
"""Rounds of turns, even where one takes longer than the time for all."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the data are: rows of square matrices, their elements, columns of dense ones; MTTKRP's tensor."""

    rows: int
    elements: int
    columns: int
    modes: int
    entries: int
    rank: int


SCALES = {
    "full": Scale(100_000, 1_000_000, 64, 1000, 1_000_000, 32),
    "small": Scale(10_000, 100_000, 64, 200, 100_000, 32),
    "tiny": Scale(40, 160, 8, 12, 60, 4),
}

# --- data --------------------------------------------------------------------------------------------------------


def uniform(scale: Scale, generator: torch.Generator) -> Tensor:
    """Every place with the same probability."""
    return torch.randint(scale.rows, (2, scale.elements), generator=generator)


def band(scale: Scale, _: torch.Generator) -> Tensor:
    """21 diagonals."""
    rows = torch.arange(scale.rows)
    columns = rows[:, None] + torch.arange(-10, 11)
    where = torch.stack((rows[:, None].expand_as(columns), columns)).reshape(2, -1)
    return where[:, (columns >= 0).reshape(-1) & (columns < scale.rows).reshape(-1)]


def zipf(scale: Scale, generator: torch.Generator) -> Tensor:
    """Rows and columns whose n-th has a share proportional to n to the power of -0.8, in random order."""
    weights = torch.arange(1, scale.rows + 1, dtype=torch.float64) ** -0.8
    bounds = weights.cumsum(0) / weights.sum()
    drawn = torch.rand((2, scale.elements), generator=generator, dtype=torch.float64)
    ranks = torch.searchsorted(bounds, drawn).clamp(max=scale.rows - 1)
    return torch.stack([torch.randperm(scale.rows, generator=generator)[r] for r in ranks])


PATTERNS: Mapping[str, Callable[[Scale, torch.Generator], Tensor]] = {"uniform": uniform, "band": band, "zipf": zipf}


@dataclass(frozen=True, slots=True)
class Data:
    """The operands and their sizes."""

    scale: Scale
    pattern: str
    dtype: torch.dtype
    seed: int = 0

    def matrix(self, number: int = 0) -> tc.SparseTensor:
        """The matrix `number` of this pattern, in CSR."""
        generator = self._generator(number)
        where = PATTERNS[self.pattern](self.scale, generator)
        shape = (self.scale.rows, self.scale.rows)
        return tc.SparseTensor.from_coordinates(where, self._values(where.shape[1], generator=generator), shape, "csr")

    def dense(self, *shape: int, number: int = 0) -> Tensor:
        """A dense tensor."""
        return self._values(*shape, generator=self._generator(100 + number))

    def tensor(self) -> tc.SparseTensor:
        """A tensor of three dimensions, in CSF."""
        generator, n = self._generator(0), self.scale.modes
        where = torch.randint(n, (3, self.scale.entries), generator=generator)
        values = self._values(self.scale.entries, generator=generator)
        return tc.SparseTensor.from_coordinates(where, values, (n, n, n), "csf")

    def _values(self, *shape: int, generator: torch.Generator) -> Tensor:
        """From 0.1 to 1.1, so that nothing cancels."""
        return (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1).to(self.dtype)

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + number)


# --- kernels -----------------------------------------------------------------------------------------------------

Operands = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operator.

    Attributes:
        source: our def, `T` for the element type.
        operands: ours.
        scipy, torch: the same operator, built from our operands outside of the timing; None: SciPy lacks it.
        goals: the ratio to reach with one thread and float64 on data of full scale, by pattern.
        patterns: the patterns of its data.
        ours: our timed call, built from the operator and the operands outside of the timing.
    """

    source: str
    operands: Callable[[Data], Operands]
    scipy: Callable[..., Callable[[], Any]] | None
    torch: Callable[..., Callable[[], Any]]
    goals: Mapping[str, float]
    patterns: tuple[str, ...] = tuple(PATTERNS)
    ours: Callable[..., Callable[[], Any]] = lambda operator, *operands: lambda: operator(*operands)


def _scipy_product(a: Any, x: Tensor) -> Callable[[], Any]:
    left, right = a.scipy(), x.numpy()
    return lambda: left @ right


def _torch_product(a: Any, x: Tensor) -> Callable[[], Any]:
    left = a.torch()
    return lambda: left @ x


def _scipy_sampled(s: Any, u: Tensor, v: Tensor) -> Callable[[], Any]:
    import numpy as np

    pattern = s.scipy()
    rows = np.repeat(np.arange(s.shape[0]), np.diff(pattern.indptr))
    left, right, columns = u.numpy(), v.numpy(), pattern.indices

    def run() -> Any:
        values = np.einsum("nk,nk->n", left[rows], right[columns])
        return scipy_sparse.csr_array((values, columns, pattern.indptr), shape=pattern.shape)

    return run


def _torch_sampled(s: Any, u: Tensor, v: Tensor) -> Callable[[], Any]:
    pattern, right = s.torch(), v.t()
    return lambda: torch.sparse.sampled_addmm(pattern, u, right, beta=0.0)


def _scipy_sum(*matrices: Any) -> Callable[[], Any]:
    first, *others = (m.scipy() for m in matrices)
    return lambda: sum(others, first)


def _torch_sum(*matrices: Any) -> Callable[[], Any]:
    first, *others = (m.torch() for m in matrices)
    return lambda: sum(others, first)


def _scipy_sparse_product(a: Any, b: Any) -> Callable[[], Any]:
    left, right = a.scipy(), b.scipy()

    def run() -> Any:
        product = left @ right
        product.sort_indices()
        return product

    return run


def _torch_sparse_product(a: Any, b: Any) -> Callable[[], Any]:
    """torch leaves the rows of a product unsorted; SciPy sorts them in place, where it is there."""
    left, right = a.torch(), b.torch()

    def run() -> Any:
        product = left @ right
        if scipy_sparse is None:
            return product.to_sparse_coo().coalesce()
        pos, crd, values = product.crow_indices(), product.col_indices(), product.values()
        found = scipy_sparse.csr_array((values.numpy(), crd.numpy(), pos.numpy()), shape=tuple(product.shape))
        found.has_sorted_indices = False
        found.sort_indices()
        return found

    return run


def _scipy_mttkrp(tensor: Any, c: Tensor, d: Tensor) -> Callable[[], Any]:
    """A matrix with a column for each element, times the products of the rows that they select."""
    import numpy as np

    i, j, k = tensor.coordinates().numpy()
    pos = np.concatenate(([0], np.cumsum(np.bincount(i, minlength=tensor.shape[0]))))
    shape = (tensor.shape[0], len(i))
    matrix = scipy_sparse.csr_array((tensor.values.numpy(), np.arange(len(i)), pos), shape=shape)
    left, right = c.numpy(), d.numpy()
    return lambda: matrix @ (left[j] * right[k])


def _torch_mttkrp(tensor: Any, c: Tensor, d: Tensor) -> Callable[[], Any]:
    i, j, k = tensor.coordinates()
    values = tensor.values[:, None]
    return lambda: c.new_zeros(tensor.shape[0], c.shape[1]).index_add_(0, i, values * c[j] * d[k])


def _assemble(operator: Any, *operands: Any) -> Callable[[], Any]:
    """Calls that compute only values."""
    fixed = operator.assemble(*operands)
    return lambda: fixed(*operands)


def _learning(forward: Callable[[Any, Tensor, Tensor], Tensor], a: Any, x: Tensor, w: Tensor) -> Callable[[], Any]:
    """A forward and a backward call; the gradients by features and weights."""
    leaves = [t.detach().requires_grad_() for t in (x, w)]

    def run() -> Any:
        with torch.enable_grad():
            return torch.cat([g.reshape(-1) for g in torch.autograd.grad(forward(a, *leaves).sum(), leaves)])

    return run


def _torch_convolution(a: Any, x: Tensor, w: Tensor) -> Callable[[], Any]:
    return _learning(lambda a, x, w: torch.relu(torch.sparse.mm(a, x @ w)), a.torch(), x, w)


def _torch_attention(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    """A sampled product, a softmax over the elements of each row, and a product."""
    pattern, right, n = m.torch(), k.t().contiguous(), m.shape[0]
    pos, crd = pattern.crow_indices(), pattern.col_indices()
    rows = torch.arange(n).repeat_interleave(pos.diff(), output_size=len(crd))

    def run() -> Any:
        scores = torch.sparse.sampled_addmm(pattern, q, right, beta=0.0).values()
        most = torch.full((n,), float("-inf"), dtype=scores.dtype).scatter_reduce(0, rows, scores, "amax")
        weights = torch.exp(scores - most[rows])
        total = torch.zeros_like(most).scatter_add(0, rows, weights)
        return torch.sparse.mm(torch.sparse_csr_tensor(pos, crd, weights, (n, n)), v) / total[:, None]

    return run


KERNELS: Mapping[str, Kernel] = {
    "spmv": Kernel(
        "def spmv(T(N,M) A: csr, T(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }",
        lambda data: (data.matrix(), data.dense(data.scale.rows)),
        _scipy_product, _torch_product, {"uniform": 0.95, "band": 0.9, "zipf": 0.95},
    ),
    "spmm": Kernel(
        "def spmm(T(N,M) A: csr, T(M,F) X) -> (Y) { Y(i,f) +=! A(i,j) * X(j,f) }",
        lambda data: (data.matrix(), data.dense(data.scale.rows, data.scale.columns)),
        _scipy_product, _torch_product, {"uniform": 2.4, "band": 2.0, "zipf": 2.6},
    ),
    "sampled": Kernel(
        "def sampled(T(N,M) S: csr, T(N,K) U, T(M,K) V) -> (E: csr) "
        "{ E(i,j) +=! U(i,k) * V(j,k) where exists S(i,j) }",
        lambda data: (
            data.matrix(), *(data.dense(data.scale.rows, data.scale.columns, number=n) for n in range(2)),
        ),
        _scipy_sampled, _torch_sampled, {"uniform": 2.0, "band": 4.5, "zipf": 1.9},
    ),
    "add": Kernel(
        "def add(T(N,M) B: csr, T(N,M) C: csr) -> (A: csr) { A(i,j) = B(i,j) + C(i,j) }",
        lambda data: (data.matrix(), data.matrix(1)),
        _scipy_sum, _torch_sum, {"uniform": 1.8, "band": 1.2, "zipf": 1.3},
    ),
    "add3": Kernel(
        "def add3(T(N,M) B: csr, T(N,M) C: csr, T(N,M) D: csr) -> (A: csr) "
        "{ A(i,j) = B(i,j) + C(i,j) + D(i,j) }",
        lambda data: (data.matrix(), data.matrix(1), data.matrix(2)),
        _scipy_sum, _torch_sum, {"uniform": 1.6, "band": 1.1, "zipf": 1.2},
    ),
    "spgemm": Kernel(
        "def spgemm(T(N,K) B: csr, T(K,M) C: csr) -> (A: csr) { A(i,j) +=! B(i,k) * C(k,j) }",
        lambda data: (data.matrix(), data.matrix(1)),
        _scipy_sparse_product, _torch_sparse_product, {"uniform": 1.4, "band": 1.15, "zipf": 1.0},
    ),
    "mttkrp": Kernel(
        "def mttkrp(T(I,J,K) B: csf, T(J,R) C, T(K,R) D) -> (A) { A(i,r) +=! B(i,j,k) * C(j,r) * D(k,r) }",
        lambda data: (data.tensor(), *(data.dense(data.scale.modes, data.scale.rank, number=n) for n in range(2))),
        _scipy_mttkrp, _torch_mttkrp, {"uniform": 9.0}, ("uniform",),
    ),
    "spgemm_values": Kernel(
        "def spgemm_values(T(N,K) B: csr, T(K,M) C: csr) -> (A: csr) { A(i,j) +=! B(i,k) * C(k,j) }",
        lambda data: (data.matrix(), data.matrix(1)),
        _scipy_sparse_product, _torch_sparse_product, {"uniform": 2.5, "band": 2.5, "zipf": 2.0}, ours=_assemble,
    ),
    "convolution": Kernel(
        "def convolution(T(N,N) A: csr, T(N,F) X, T(F,G) W) -> (Y) "
        "{ H(i,g) +=! X(i,f) * W(f,g)  Y(i,g) +=! A(i,j) * H(j,g)  Y(i,g) = max(Y(i,g), 0) }",
        lambda data: (
            data.matrix(), data.dense(data.scale.rows, data.scale.columns),
            data.dense(data.scale.columns, data.scale.columns),
        ),
        None, _torch_convolution, {"uniform": 1.5, "band": 1.5, "zipf": 1.5}, ours=_learning,
    ),
    "attention": Kernel(
        "def attention(T(N,N) M: csr, T(N,D) Q, T(N,D) K, T(N,D) V) -> (O) {"
        "  s(i,j) +=! Q(i,d) * K(j,d) where exists M(i,j)"
        "  m(i) max=! s(i,j) where exists M(i,j)"
        "  e(i,j) = exp(s(i,j) - m(i)) where exists M(i,j)"
        "  z(i) +=! e(i,j)"
        "  O(i,c) +=! e(i,j) * V(j,c)"
        "  O(i,c) = O(i,c) / z(i) }",
        lambda data: (
            data.matrix(), *(data.dense(data.scale.rows, data.scale.columns, number=n) for n in range(3)),
        ),
        None, _torch_attention, {"band": 2.0}, ("band",),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """One kernel on one pattern.

    Attributes:
        times: seconds per call of each contender.
        ratios: time of each other contender over ours, round by round; above 1 ours is faster.
        failures: why a contender has no times.
        first: seconds of our first call, which compiles.
    """

    kernel: str
    pattern: str
    dtype: str
    threads: int
    elements: int
    goal: float | None
    times: Mapping[str, Quartiles]
    ratios: Mapping[str, Quartiles]
    failures: Mapping[str, str] = field(default_factory=dict)
    first: float | None = None

    @property
    def best(self) -> str | None:
        """The other contender with the least median time."""
        return min((who for who in self.times if who != OURS), key=lambda who: self.times[who].median, default=None)


def measure(name: str, data: Data, threads: int, seconds: float) -> Measured:
    """Compare the results of all contenders with ours, then time them interleaved."""
    kernel = KERNELS[name]
    type_name = next(tc_name for tc_name, dtype in TYPES.values() if dtype is data.dtype)
    operator = tc.define(kernel.source.replace("T(", f"{type_name}("))[name]
    calls: dict[str, Callable[[], Any]] = {}
    failures: dict[str, str] = {} if scipy_sparse is not None else {SCIPY: NO_SCIPY}
    with using_threads(threads), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's sparse layouts are in beta, it says
        operands = kernel.operands(data)
        start = time.perf_counter()
        call_ours = kernel.ours(operator, *operands)
        ours = call_ours()
        first = time.perf_counter() - start
        others = {TORCH: kernel.torch}
        if scipy_sparse is not None and kernel.scipy is not None:
            others[SCIPY] = kernel.scipy
        for who, prepare in others.items():
            try:
                call = prepare(*operands)
                difference = compare(ours, call())
            except Exception as failure:  # one contender's failure must not end the others' measurement
                failures[who] = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
                continue
            if difference <= TOLERANCE[data.dtype]:
                calls[who] = call
            else:
                failures[who] = f"another result: relative difference {difference:.2g}"
        calls[OURS] = call_ours
        clock = time.thread_time if threads == 1 else time.perf_counter
        taken = interleave(calls, seconds=seconds, clock=clock, least=LEAST, seed=data.seed).seconds
    has_goal = threads == 1 and data.dtype is torch.float64 and data.scale == SCALES["full"]
    return Measured(
        name, data.pattern, str(data.dtype).removeprefix("torch."), threads, operands[0].nnz,
        kernel.goals.get(data.pattern) if has_goal else None,
        {who: Quartiles.of(values) for who, values in taken.items()},
        {who: ratios(taken[who], taken[OURS]) for who in taken if who != OURS}, failures, first,
    )  # fmt: skip


def compare(ours: Any, other: Any) -> float:
    """The largest difference of two results, relative to the largest element; infinite if other places are stored."""
    (where, found), (places, expected) = elements(ours), elements(other)
    if where.shape != places.shape or not torch.equal(where, places):
        return float("inf")
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max())


def elements(x: Any) -> tuple[Tensor, Tensor]:
    """The places in order and the values of a sparse tensor of any kind; the shape and all values of a dense one."""
    if isinstance(x, tc.SparseTensor):
        where, values = x.check().coordinates(), x.values.reshape(-1)
    elif scipy_sparse is not None and scipy_sparse.issparse(x):
        coo = x.tocoo()
        where, values = torch.stack([torch.from_numpy(c).long() for c in coo.coords]), torch.from_numpy(coo.data)
    elif isinstance(x, Tensor) and x.layout is not torch.strided:
        coo = x.to_sparse()
        where, values = coo._indices(), coo._values()
    else:
        dense = torch.as_tensor(x)
        return torch.tensor(dense.shape), dense.reshape(-1)
    made = torch.sparse_coo_tensor(where, values, x.shape).coalesce()
    return made.indices(), made.values()


# --- reports -----------------------------------------------------------------------------------------------------

HEAD = ("kernel", "data", "threads", "elements", OURS, SCIPY, TORCH, "ratio", "quartiles", "goal", "first call")
WIDTHS = (8, 8, 7, 9, 9, 9, 9, 6, 13, 10, 10)


def line(cells: Sequence[str]) -> str:
    return "  ".join(c.ljust(w) if n < 2 else c.rjust(w) for n, (c, w) in enumerate(zip(cells, WIDTHS, strict=True)))


def row(m: Measured) -> tuple[str, ...]:
    """The cells of one line under `HEAD`."""
    ratio = m.ratios[m.best] if m.best is not None else None
    verdict = "" if m.goal is None else f"{m.goal:.2f}"
    if ratio is not None and m.goal is not None:
        verdict += " met" if ratio.median >= m.goal else " short"
    return (
        m.kernel, m.pattern, str(m.threads), str(m.elements),
        *(duration(m.times[who].median) if who in m.times else "-" for who in (OURS, SCIPY, TORCH)),
        f"{ratio.median:.2f}" if ratio else "-", f"{ratio.low:.2f} .. {ratio.high:.2f}" if ratio else "-",
        verdict, duration(m.first) if m.first else "-",
    )  # fmt: skip


def notes(results: Sequence[Measured]) -> Iterator[str]:
    """Why contenders have no times, and our speedup by a second thread."""
    for who, why in dict.fromkeys((who, why) for m in results for who, why in m.failures.items()):
        where = ", ".join(dict.fromkeys(f"{m.kernel} {m.pattern}" for m in results if m.failures.get(who) == why))
        yield f"{who}: {why} ({where})"
    alone = {(m.kernel, m.pattern): m.times[OURS].median for m in results if m.threads == 1}
    for m in results:
        if m.threads > 1 and (before := alone.get((m.kernel, m.pattern))):
            gain = before / m.times[OURS].median
            yield f"{m.kernel} {m.pattern}: {gain:.2f} times as fast on {m.threads} threads as on one"


def write_json(path: Path, results: Sequence[Measured], settings: Mapping[str, Any]) -> None:
    """Everything measured. Times in seconds."""
    document = {"machine": machine(), "settings": settings, "results": [asdict(r) for r in results]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def read_json(path: Path) -> list[Measured]:
    """The results that `write_json` wrote to `path`."""
    found = []
    for entry in json.loads(path.read_text())["results"]:
        quartiles = {key: {name: Quartiles(**q) for name, q in entry[key].items()} for key in ("times", "ratios")}
        found.append(Measured(**{**entry, **quartiles}))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    chosen = select(options.kernels, options.data)
    if options.list:
        print("\n".join(f"{name:8} {pattern}" for name, pattern in chosen))
        return 0
    results: list[Measured] = []
    print(line(HEAD))
    if options.load:
        results = [m for path in options.load for m in read_json(path) if (m.kernel, m.pattern) in chosen]
        print(*(line(row(m)) for m in results), sep="\n")
    else:
        kept = not options.fresh_pages and keep_memory()
        scale, (_, dtype) = SCALES[options.scale], TYPES[options.dtype]
        for threads in options.threads or sorted({1, torch.get_num_threads()}):
            for name, pattern in chosen:
                release_memory()
                results.append(measure(name, Data(scale, pattern, dtype, options.seed), threads, options.seconds))
                print(line(row(results[-1])), flush=True)
                if options.json:
                    write_json(options.json, results, {"scale": asdict(scale), "memory reused": kept})
    print(*(f"  {note}" for note in notes(results)), sep="\n")
    return 0


def select(kernels: Sequence[str] | None, patterns: Sequence[str] | None) -> list[tuple[str, str]]:
    """Kernels with the patterns of their data whose names match one of the shell patterns; all without any."""
    return [
        (name, pattern)
        for name, kernel in KERNELS.items()
        for pattern in kernel.patterns
        if any(fnmatch(name, p) for p in kernels or ["*"]) and any(fnmatch(pattern, p) for p in patterns or ["*"])
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse", description=__doc__)
    add = parser.add_argument
    add("--kernels", nargs="+", metavar="PATTERN", help="names, with shell wildcards; default all")
    add("--data", nargs="+", metavar="PATTERN", help=f"of {', '.join(PATTERNS)}; default all")
    add("--scale", choices=SCALES, default="full", help="sizes of the data (default full: 10^5 rows, 10^6 elements)")
    add("--dtype", choices=TYPES, default="float64")
    add("--threads", nargs="+", type=int, metavar="N", help="default 1 and all")
    add("--fresh-pages", action="store_true", help="let every call pay for the page faults of its outputs")
    add("--seconds", type=float, default=1.5, help="per kernel, data and number of threads (default 1.5)")
    add("--seed", type=int, default=0, help="of the data and of the order of turns")
    add("--json", type=Path, metavar="PATH", help="write everything measured")
    add("--load", nargs="+", type=Path, metavar="PATH", help="measure nothing: show what --json wrote before")
    add("--list", action="store_true", help="list kernels with their data and stop")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
