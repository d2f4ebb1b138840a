"""Kernels for a range of sizes beside kernels for exact sizes: `python -m benchmarks.dynamic_sizes`.

For each def, the processor time to compile the first range kernel, divided by that to compile an exact one for the
typical size, and for several sizes the time of a call of the range kernel, divided by that of an exact one. Times that
are divided are measured in turns, in processor time, on one thread, without the cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import torch

import tensor_comprehensions
from tensor_comprehensions.api import Op
from tensor_comprehensions.core import knobs

from . import sources as tc
from .runner import def_name
from .timing import interleave, keep_memory, ratios

TYPICAL = 100
"""The size of the exact kernel with which compile times are compared."""
COMPILE_BAR, BATCH_BAR, SIZE_BAR, WORST_BAR = 4.0, 1.05, 1.15, 1.5
"""Ratios not to exceed: of compile times, geometric means over batches and over other sizes, and at any size."""

LAYER = """
def layer(float(N,I) x, float(O,I) w, float(O) c) -> (y) {
    y(n,o) = c(o)
    y(n,o) += x(n,i) * w(o,i)
    y(n,o) = fmax(y(n,o), 0)
}"""
PRODUCT = "def product(float(M,K) a, float(K,N) b) -> (c) { c(m,n) +=! a(m,k) * b(k,n) }"
WEIGHTS_GRADIENT = "def gradient(float(N,I) x, float(N,O) g) -> (w) { w(o,i) +=! g(n,o) * x(n,i) }"
POINTWISE = "def scale(float(N,D) x, float(D) g) -> (y) { y(n,d) = x(n,d) * g(d) }"
TRANSPOSITION = "def transpose(float(N,D) x) -> (y) { y(d,n) = x(n,d) }"
ATTENTION = """
def attention(float(T,D) q, float(T,D) k, float(T,D) v) -> (o) {
    s(t,u) +=! q(t,d) * k(u,d)
    m(t) max=! s(t,u)
    e(t,u) = exp(s(t,u) - m(t))
    z(t) +=! e(t,u)
    o(t,d) +=! e(t,u) * v(u,d)
    o(t,d) = o(t,d) / z(t)
}"""
MASKED_SCORES = """
def attention(float(T,D) q, float(T,D) k, float(T,D) v) -> (o) {
    s(t,u) +=! q(t,d) * k(u,d)
    s(t,u) = u <= t ? s(t,u) : -inf
    m(t) max=! s(t,u)
    e(t,u) = exp(s(t,u) - m(t))
    z(t) +=! e(t,u)
    o(t,d) +=! e(t,u) * v(u,d)
    o(t,d) = o(t,d) / z(t)
}"""
MASKED_TERMS = """
def causal_attention(float(B,H,Q,D) query, float(B,H,K,D) key, float(B,H,K,E) value) -> (out) {
    score(b,h,q,k) +=! query(b,h,q,d) * key(b,h,k,d)
    largest(b,h,q) max=! k <= q ? score(b,h,q,k) : -inf
    weight(b,h,q,k) = k <= q ? exp((score(b,h,q,k) - largest(b,h,q)) * rsqrt(float(D))) : 0
    total(b,h,q) +=! weight(b,h,q,k)
    mixed(b,h,q,e) +=! k <= q ? weight(b,h,q,k) * value(b,h,k,e) : 0
    out(b,h,q,e) = mixed(b,h,q,e) / total(b,h,q)
}"""
MASKED_SOFTMAX = """
def causal_softmax(float(T,U) x) -> (out) {
    peak(t) max=! u <= t ? x(t,u) : -inf
    e(t,u) = u <= t ? exp(x(t,u) - peak(t)) : 0
    total(t) +=! e(t,u)
    out(t,u) = e(t,u) / total(t)
}"""
DECODING = """
def decode(float(H,D) q, float(H,T,D) keys, float(H,T,D) values) -> (o) {
    s(h,t) +=! q(h,d) * keys(h,t,d)
    m(h) max=! s(h,t)
    e(h,t) = exp(s(h,t) - m(h))
    z(h) +=! e(h,t)
    o(h,d) +=! e(h,t) * values(h,t,d)
    o(h,d) = o(h,d) / z(h)
}"""
CONVOLUTION = """
def conv(float(N,C,H,W) x, float(O,C,KH,KW) weight) -> (out) {
    out(n,o,h,w) +=! x(n,c,h+kh,w+kw) * weight(o,c,kh,kw)
}"""
STENCIL = """
def stencil(float(H,W) x) -> (y) {
    y(i,j) = 0.25 * (x(i+1,j) + x(i+1,j+2) + x(i,j+1) + x(i+2,j+1)) - x(i+1,j+1)
}"""

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A def, its dynamic sizes, its shapes for a value of these, and the values to time, the typical one among them."""

    name: str
    source: str
    dynamic: frozenset[str]
    shapes: Callable[[int], Shapes]
    sizes: tuple[int, ...] = (8, 33, TYPICAL, 256)
    is_batch: bool = False

    def define(self) -> Op:
        """The operator, which has no kernels."""
        made = tensor_comprehensions.define(self.source, dynamic=False)
        return getattr(made, def_name(self.source))  # type: ignore[no-any-return]

    def arguments(self, size: int) -> list[torch.Tensor]:
        """Random arguments."""
        return [torch.randn(shape) for shape in self.shapes(size)]


def names(text: str) -> frozenset[str]:
    """The sizes in `text`, a letter each."""
    return frozenset(text)


CASES = (
    Case("layer by batch", LAYER, names("N"), lambda n: ((n, 256), (512, 256), (512,)), is_batch=True),
    Case("layer by outputs", LAYER, names("O"), lambda n: ((128, 256), (n, 256), (n,))),
    Case("layer by inputs", LAYER, names("I"), lambda n: ((128, n), (256, n), (256,))),
    Case("layer by all", LAYER, names("NOI"), lambda n: ((n, n), (n, n), (n,))),
    Case("product by batch", PRODUCT, names("M"), lambda n: ((n, 256), (256, 256)), is_batch=True),
    Case("product by columns", PRODUCT, names("N"), lambda n: ((128, 256), (256, n))),
    Case("product by inner size", PRODUCT, names("K"), lambda n: ((128, n), (n, 256))),
    Case("product by all", PRODUCT, names("MNK"), lambda n: ((n, n), (n, n))),
    Case("gradient by batch", WEIGHTS_GRADIENT, names("N"), lambda n: ((n, 256), (n, 512)), is_batch=True),
    Case("batch norm by batch", tc.BATCHNORM, names("N"), lambda n: ((n, 64, 7, 7), (64,), (64,)), is_batch=True),
    Case("softmax by batch", tc.SOFTMAX, names("N"), lambda n: ((n, 256),), is_batch=True),
    Case("softmax by length", tc.SOFTMAX, names("D"), lambda n: ((128, n),)),
    Case("softmax by all", tc.SOFTMAX, names("ND"), lambda n: ((n, n),)),
    Case("layer norm by batch", tc.LAYERNORM, names("N"), lambda n: ((n, 256), (256,), (256,)), is_batch=True),
    Case("layer norm by length", tc.LAYERNORM, names("D"), lambda n: ((128, n), (n,), (n,))),
    Case("layer norm by all", tc.LAYERNORM, names("ND"), lambda n: ((n, n), (n,), (n,))),
    Case("pointwise by length", POINTWISE, names("D"), lambda n: ((128, n), (n,))),
    Case("transposition by length", TRANSPOSITION, names("D"), lambda n: ((128, n),)),
    Case("attention", ATTENTION, names("T"), lambda n: ((n, 64),) * 3),
    Case("attention, masked scores", MASKED_SCORES, names("T"), lambda n: ((n, 64),) * 3),
    Case("attention, masked terms", MASKED_TERMS, names("QK"), lambda n: ((1, 2, n, 64),) * 3),
    Case("causal softmax", MASKED_SOFTMAX, names("TU"), lambda n: ((n, n),), (8, 33, TYPICAL, 256, 700)),
    Case("decoding by cache", DECODING, names("T"), lambda n: ((8, 64), (8, n, 64), (8, n, 64))),
    Case(
        "convolution by image", CONVOLUTION, names("HW"),
        lambda n: ((2, 16, n + 2, n + 2), (32, 16, 3, 3)), (8, 33, TYPICAL),
    ),
    Case("stencil by all", STENCIL, names("HW"), lambda n: ((n + 2, n + 2),)),
)  # fmt: skip


def compile_ratio(case: Case, repeat: int) -> tuple[float, float]:
    """Processor seconds to compile a range kernel, and that divided by those of an exact one: the least of `repeat`."""
    arguments = case.arguments(TYPICAL)
    case.define().compile(*arguments, dynamic=False)  # warms the process up

    def compile_kernel(is_range: bool) -> float:
        op = case.define()
        start = time.process_time()
        op.compile(*arguments, dynamic=case.dynamic if is_range else False)
        return time.process_time() - start

    taken = [(compile_kernel(True), compile_kernel(False)) for _ in range(repeat)]
    mine, exact = (min(column) for column in zip(*taken, strict=True))
    return mine, mine / exact


def run_ratios(case: Case, seconds: float) -> dict[int, float]:
    """For each size, the time of a call of the range kernel, divided by that of the exact one."""
    range_op = case.define()
    return {size: _run_ratio(case, range_op, size, seconds) for size in case.sizes}


def _run_ratio(case: Case, range_op: Op, size: int, seconds: float) -> float:
    arguments = case.arguments(size)
    mine = range_op.compile(*arguments, dynamic=case.dynamic)
    exact = case.define().compile(*arguments, dynamic=False)
    contenders = {"range": lambda: mine(*arguments), "exact": lambda: exact(*arguments)}
    samples = interleave(contenders, seconds=seconds, clock=time.process_time)
    return ratios(samples.seconds["range"], samples.seconds["exact"]).median


def report(chosen: Sequence[Case], repeat: int, seconds: float) -> Iterator[str]:
    """A line for each def, and the geometric means."""
    means: dict[bool, list[float]] = {False: [], True: []}
    for case in chosen:
        text = f"{case.name:26}"
        if repeat:
            taken, ratio = compile_ratio(case, repeat)
            text += f" compiles in {taken:5.2f} s, {ratio:5.2f} of exact{' (missed)' * (ratio > COMPILE_BAR):10}"
        if seconds:
            found = run_ratios(case, seconds)
            means[case.is_batch] += found.values()
            text += "".join(f" {n}: {x:4.2f}{'!' if x > WORST_BAR else ' '}" for n, x in found.items())
        yield text
    for is_batch, bar in ((True, BATCH_BAR), (False, SIZE_BAR)):
        if means[is_batch]:
            what = "batches" if is_batch else "other sizes"
            yield f"geometric mean of {what}: {statistics.geometric_mean(means[is_batch]):.3f} (at most {bar})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dynamic_sizes", description=__doc__)
    parser.add_argument("--cases", nargs="*", default=["*"], help="patterns of names (default: all)")
    parser.add_argument("--repeat", type=int, default=5, help="compilations of each kernel (default 5; 0: none)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each size (default 1; 0: compile times only)")
    options = parser.parse_args(arguments)
    chosen = [c for c in CASES if any(fnmatch(c.name, pattern) for pattern in options.cases)]
    keep_memory()
    torch.set_num_threads(1)
    with knobs.override_knobs(cache="off"):
        for text in report(chosen, options.repeat, options.seconds):
            print(text, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
