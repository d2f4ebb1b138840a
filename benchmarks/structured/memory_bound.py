"""Copies, transpositions, reductions and normalizations: bound by memory at every level of the caches."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from .. import sources as tc
from ..kernels import Benchmark, Peer, floats, manual_softmax
from .convolutions import FLOAT, SIZES

MEMORY = ((2048, 2048), (4096, 4096))
"""Planes that no cache holds, or hardly."""
ODD = ((33, 65), (127, 255), (1021, 2039))
ROW_SUM = "def rows(float(M,N) x) -> (y) { y(m) +=! x(m,n) }"
COLUMN_SUM = "def columns(float(M,N) x) -> (y) { y(n) +=! x(m,n) }"
ROW_MAX = "def rows(float(M,N) x) -> (y) { y(m) max=! x(m,n) }"
COLUMN_MAX = "def columns(float(M,N) x) -> (y) { y(n) max=! x(m,n) }"
STRIDED_SUM = "def middle(float(A,B,C) x) -> (y) { y(a,c) +=! x(a,b,c) }"
NORM = "def norm(float(M,N) x) -> (y) { y(m) +=! x(m,n) * x(m,n) y(m) = sqrt(y(m)) }"


def planes() -> Iterator[tuple[str, int, int]]:
    """(cache level, rows, columns)."""
    for level, sizes in SIZES["planes"].items():
        yield from ((level, m, n) for m, n in sizes)
    yield from (("memory", m, n) for m, n in MEMORY)


def odd_planes() -> Iterator[tuple[str, int, int]]:
    yield from planes()
    yield from (("odd", m, n) for m, n in ODD)


def _moving(
    family: str, name: str, source: str, shape: tuple[int, ...], peers: tuple[Peer, ...], moved: int
) -> Benchmark:
    goal = 0.95 if family == "copy" else 1.0
    return Benchmark(name, family, source, floats(shape), peers, goal=goal, moved=FLOAT * moved, operands=FLOAT * moved)


def copies() -> Iterator[Benchmark]:
    peers = (Peer("torch", torch.clone), Peer("copy", lambda x: torch.empty_like(x).copy_(x)))
    for level, m, n in odd_planes():
        yield _moving("copy", f"copy_{level}_{m}x{n}", tc.COPY, (m, n), peers, 2 * m * n)


def transpositions() -> Iterator[Benchmark]:
    flip = (Peer("torch", lambda x: x.t().contiguous(), compiled=True),)
    for level, m, n in odd_planes():
        yield _moving("transpose", f"transpose_{level}_{m}x{n}", tc.TRANSPOSE, (m, n), flip, 2 * m * n)
    for order, shape in (
        ("0213", (32, 64, 16, 64)), ("0213", (8, 512, 16, 64)), ("1302", (32, 24, 16, 48)), ("0231", (16, 64, 56, 56)),
        ("0312", (16, 56, 56, 64)), ("210", (60, 70, 80)), ("102", (100, 200, 33)), ("021", (64, 100, 200)),
        ("3210", (24, 32, 20, 48)), ("01324", (4, 8, 16, 20, 12)),
    ):  # fmt: skip
        yield _permutation(order, shape)


def _permutation(order: str, shape: tuple[int, ...]) -> Benchmark:
    """Dimension d of the result is dimension order[d] of the argument."""
    names = "abcde"[: len(shape)]
    dims = tuple(map(int, order))
    read, write = ", ".join(names), ", ".join(names[d] for d in dims)
    source = f"def permute(float({', '.join(names.upper())}) x) -> (y) {{ y({write}) = x({read}) }}"
    peer = (Peer("torch", lambda x: x.permute(dims).contiguous(), compiled=True),)
    name = f"permute_{order}_{'x'.join(map(str, shape))}"
    return _moving("permute", name, source, shape, peer, 2 * prod(shape))


def reductions() -> Iterator[Benchmark]:
    rows = (
        Peer("torch", lambda x: x.sum(1), compiled=True),
        Peer("mv", lambda x, ones: x @ ones, prepare=lambda x: (x, torch.ones_like(x[0]))),
    )
    columns = (
        Peer("torch", lambda x: x.sum(0), compiled=True),
        Peer("mv", lambda x, ones: ones @ x, prepare=lambda x: (x, torch.ones_like(x[:, 0]))),
    )
    for level, m, n in odd_planes():
        yield _moving("row_sum", f"row_sum_{level}_{m}x{n}", ROW_SUM, (m, n), rows, m * n + 2 * m)
        yield _moving("column_sum", f"column_sum_{level}_{m}x{n}", COLUMN_SUM, (m, n), columns, m * n + 2 * n)
    for m, n in ((160, 240), (1000, 640), (2048, 2048)):
        most = (Peer("torch", lambda x: x.amax(1), compiled=True),)
        yield _moving("row_max", f"row_max_{m}x{n}", ROW_MAX, (m, n), most, m * n + 2 * m)
        most = (Peer("torch", lambda x: x.amax(0), compiled=True),)
        yield _moving("column_max", f"column_max_{m}x{n}", COLUMN_MAX, (m, n), most, m * n + 2 * n)
    for a, b, c in ((16, 64, 100), (64, 49, 512), (8, 3136, 64), (500, 30, 7)):
        middle = (Peer("torch", lambda x: x.sum(1), compiled=True),)
        yield _moving("middle_sum", f"middle_sum_{a}x{b}x{c}", STRIDED_SUM, (a, b, c), middle, a * b * c + 2 * a * c)


def norms() -> Iterator[Benchmark]:
    for m, n in ((16, 128), (200, 320), (1000, 960), (4096, 1024), (512, 77)):
        soft = (Peer("torch", lambda x: torch.softmax(x, 1), compiled=True), Peer("manual", manual_softmax))
        yield _moving("softmax", f"softmax_{m}x{n}", tc.SOFTMAX, (m, n), soft, 2 * m * n)
        length = (Peer("torch", lambda x: torch.linalg.vector_norm(x, dim=1), compiled=True), Peer("squares", _length))
        yield _moving("norm", f"norm_{m}x{n}", NORM, (m, n), length, m * n + 2 * m)
        shapes = floats((m, n), (n,), (n,))
        peer = (Peer("torch", lambda x, w, b: torch.layer_norm(x, w.shape, w, b), compiled=True),)
        moved = FLOAT * 2 * (m * n + n)
        yield Benchmark(
            f"layer_norm_{m}x{n}", "layer_norm", tc.LAYERNORM, shapes, peer, goal=1.0, moved=moved, operands=moved
        )


def _length(x: Tensor) -> Tensor:
    return x.square().sum(1).sqrt()
