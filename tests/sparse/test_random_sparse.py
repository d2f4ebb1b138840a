"""Random defs over sparse and dense tensors: reference, interpreter and machine code give the same values and places.

`python -m tools.fuzz sparse` runs many more. A seed that fails is run again by `check_seed(seed)`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random, SystemRandom
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

import tensor_comprehensions as tc
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.dispatch.sparse.sparse_tensor import SparseTensor
from tensor_comprehensions.tc_lang import compile_source
from tensor_comprehensions.tc_lang.semantics.sparse_rules import with_formats
from tests.helpers.sparse_checks import check_result, filled_memory, interpret_def, reference, remembered_passes, same
from tests.helpers.sparse_programs import (
    RandomDef,
    Unusable,
    laid_out,
    operand_value,
    program_of,
    random_def,
    random_sizes,
)

SETTINGS = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=25, phases=(Phase.explicit, Phase.generate)
)
BLOCKED_CYCLE = "would have to be stored in another order"
"""Said of blocked operands that no order of loops can walk, in whichever of their two formats."""
THREADS = (1, 3)
"""Numbers of threads for which kernels differ."""
CHUNKS = (1, 3, 20, 16384)
"""Sizes of chunks: the smaller ones divide the rows of small operands among threads, and their sums into rounds."""


@SETTINGS
@given(st.integers(0, 2**62))
def test_programs(seed: int) -> None:
    check_seed(seed)


def check_seed(seed: int) -> None:
    """Make a program and call it, with other patterns and sizes, too."""
    r = Random(seed)
    program = random_def(r)
    note(f"seed {seed}\n{program.source}\n{program.sizes} {program.formats}")
    call_with_threads(r.choice(THREADS), lambda: check_program(r, program))


def call_with_threads(threads: int, call: Callable[[], None]) -> None:
    """Call with new memory that is not 0."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with filled_memory(), remembered_passes():
            call()
    finally:
        torch.set_num_threads(before)


def check_program(r: Random, program: RandomDef) -> None:
    options = tc.SparseOptions(hash_rows=r.choice(("auto", "always")), chunk_positions=r.choice(CHUNKS))
    op = tc.define(program.source, options=options).f
    sizes = program.sizes
    for n in range(r.choice((1, 1, 2))):
        if n and program.resizable:
            sizes = random_sizes(r, program)
        try:
            values = {x.name: operand_value(r, x, sizes, program.special) for x in program.operands}
        except Unusable:
            return
        initial = {}
        for x in program.initial:
            dtype = getattr(torch, op.function.tensor(x.name).dtype.name)
            initial[x.name] = operand_value(r, x, sizes, program.special).to(dtype)
        given = [laid_out(r, v) if isinstance(v, SparseTensor) else v for v in values.values()]
        try:
            by_interpreter = interpret_def(op._kernels.sparse, given, initial)  # first: it reads no foreign memory
        except ArgumentError as refusal:
            if "bs" in program.source and BLOCKED_CYCLE in str(refusal):
                return
            raise
        found = op(*given, **initial)
        results = dict(zip(op.function.returns, found if isinstance(found, tuple) else (found,), strict=True))
        check_results(program, values | initial, sizes, results)
        for name, x in results.items():
            if name not in program.rounded:
                assert same(by_interpreter[name], x), f"{name} by the interpreter"
        if any(isinstance(x, SparseTensor) for x in results.values()) and r.random() < 0.3:
            fixed = op.assemble(*given, **initial)
            for _ in range(2):
                again = fixed(*given, **initial)
                again = again if isinstance(again, tuple) else (again,)
                assert all(same(a, b) for a, b in zip(again, results.values(), strict=True)), "assembled"


def check_results(program: RandomDef, values: dict[str, Any], sizes: dict[str, int], results: dict[str, Any]) -> None:
    """The results are those of the reference evaluator."""
    formats = {name: x.format for name, x in values.items() if isinstance(x, SparseTensor)}
    function = with_formats(compile_source(program.source)[-1], formats)
    expected = reference(function, values, sizes)
    for name, x in results.items():
        tolerance = 1e-4 if name in program.rounded else 0.0
        check_result(name, x, expected[name], function.tensor(name).format, tolerance)


FOUND = {
    "places beside a sum of nothing": """def f(double(P) A: s, double(P,N) D) -> (C: s) {
        C(l) +=! A(l) * D(l, N - 1 - h)
    }""",
    "rows of columns with a loop between": """def f(int32(P,M) A: coo, float(M) z) -> (C: ssd) {
        C(j,m,l) = -A(l, j) where m in 0:M
    }""",
    "a loop between repeated coordinates": """def f(double(M,N) A: coo, float(K) z) -> (C: sdu) {
        C(j,k,h) = A(j, h) + A(j, h) where k in 0:K
    }""",
    "a result that reads itself beside a dense operand": """def f(double(M,M) A: csr, double D, double(M) x) -> (C: u) {
        C(j) +=! A(m, j) + D where exists A(m, j)
        C(m) += max(C(m), x(m))
    }""",
    "places that exist in a dense temporary": """def f(double(K,M,P) A: coo, double(M) x) -> (C: s) {
        T(k) +=! A(k, j, 0) * x(j) + abs(A(k, j, l))
        C(k) +=! T(k) * T(k) where exists T(k)
    }""",
    "a dense tail that is read": """def f(double(P,M) A: uc, double(N) x, double(K) z) -> (B: sd, C: coo) {
        B(l,j) = A(l, j) * 1
        C(j,h,l,k) = (B(l, j) + x(h)) * B(l, j) where k in 0:K
    }""",
    "a sum that is read": """def f(double(N,M) A: csr, double(N,M) B: csr) -> (C: csr, y) {
        C(i,j) = A(i,j) + B(i,j)  y(i) +=! C(i,j)
    }""",
    "a sum that reads itself": """def f(double(N,M) A: csr, double(N,M) B: csr) -> (C: csr) {
        C(i,j) = A(i,j) + B(i,j)  C(i,j) += C(i,j) * A(i,j)
    }""",
    "a result in another order": """def f(double(N,N) A: csr, double(N,N) B: csr) -> (C: csr, D: csr) {
        C(i,j) = A(i,j) + B(i,j)  D(i,j) = C(i,j) + C(j,i)
    }""",
    "a result that only exists": """def f(double(N,M) A: csr, double(N,M) B: csr, double(M) x) -> (C: dcsr, y) {
        C(i,j) = A(i,j) + B(i,j)  y(i) max=! x(j) where exists C(i,j)
    }""",
    "rows that are columns": "def f(double(N,P) A: csr) -> (C: csc) { C(j,i) = 3 * A(i,j) }",
    "one instance for each element": """def f(int32(N,K) A: dcsr, int32(K) x) -> (y) {
        y(k) +=! (A(3, k) + x(k)) + min(x(k), 2)
    }""",
    "a number that is not stored": """def f(double(P) A: s, double(N) x, double(N) B: s) -> (y) {
        y(i) = x(i) * A(4) + B(i)
    }""",
    "a number alone": "def f(double(P) A: s) -> (y) { y = A(4) }",
    "nothing but identities": """def f(int32(K,M,N) A: csf, double(M) x) -> (C: csr, y) {
        C(m,h) *=! 1 where m in 0:M, h in 0:N, exists A(k, j, h)
        y(h) *=! 1 where exists A(k, j, h)
    }""",
    "rows below a number": "def f(double(P,M) A: ss, double(N,M) B: csr) -> (C: csr) { C(i,j) = A(1,j) * B(i,j) }",
    "blocks in two orders": """def f(int32(N,N) A: bsc(4,4), double(N,N) B: bsr(4,4)) -> (C: bsr(4,4)) {
        C(i,j) = A(i,j) - B(j,i)
    }""",
    "one coordinate for each row": "def f(int64(P,M) A: dq, int64(M,P) B: csr) -> (y) { y(l) +=! A(l,j) * B(j,l) }",
    "a temporary in another order": """def f(double(N,M) A: csr, double(M,N) B: csr) -> (y) {
        t(i,j) = exp(A(i,j)) where exists A(i,j)  y(j) +=! t(i,j) * B(j,i)
    }""",
    "a sum into a maximum": """def f(double(N,M) A: csr, double(M,N) B: csc) -> (C: coo) {
        C(i,j) max=! A(i,j)  C(i,j) += B(j,i) + A(i,j)
    }""",
    "repeats of Booleans": "def f(bool(M,N) A: su, bool(M) x) -> (y: s) { y(j) min=! (A(j, h) || x(j)) }",
    "a minimum of Booleans that is sorted": """def f(bool(N,P) A: dcsr, bool(P,N) x) -> (y: s) {
        y(l) min=! (A(i,l) && x(l,i)) where i in 0:4
    }""",
    "a constant that leaves nothing": """def f(bool(K) A: s, bool(K) x) -> (y: s) {
        y(k) max=! ((A(k) && (2 < 1)) && (x(k) && A(k)))
    }""",
    "a temporary with a part of the places": """def f(double(P,M) A: csr, double(P,M) x) -> (y) {
        t(l,m) = 2 * A(l,m) where l in 1:4  y(l) +=! t(l,m) * x(l,m)
    }""",
    "products of one factor": """def f(int64(M) A: s, double(N,M) B: csr) -> (y: s, z: csr) {
        y(m) *=! 1 + A(m)  z(i,j) min=! 2 - B(i,j) where exists B(i,j)
    }""",
    "places of one operand with a part of the factors": """def f(int64(N,M) A: csr, int64(N,M) B: csr) -> (y) {
        t(i,j) *=! 2 * B(i,j) where exists A(i,j), exists B(i,j)  y(i) +=! t(i,j) * A(i,j)
    }""",
    "nothing to sum at places that exist": """def f(double(N,K) D, double(K) A: s) -> (y: s) {
        y(k) min=! D(h,k) - A(k) where h in 0:0, exists A(k)
    }""",
    "rows of values below repeated coordinates": """def f(double(K,M) D, double(M) A: u, float(P) z) -> (
        T: uqd(2,1,0)
    ) {
        T(j,l,k) +=! max(D(k,j), A(j)) where l in 0:P
    }""",
    "coordinates of positions": """def f(bool(N) A: s, bool(K,N) B: dcsr, bool(K,N) C: dcsr, bool(N,K) D) -> (y) {
        y(k) max=! (!A(h) || (B(k, h) && C(k, h))) || ((1 < 2) || D(h, k))
    }""",
    "a dimension without extent": """def f(float(M,M,N) A: uqd(2,0,1), float(K) z) -> (T) {
        T(h,m,j,i) = A(m, j, i) where h in 0:K, j in 1:1
    }""",
    "a minimum that is sorted": """def f(int64(K,N) A: coo, int64(M,N) D, int64(K,M) B: sc) -> (T: u) {
        T(k) min=! (A(k, h) > D(m, h) ? -A(k, h) : D(m, h)) where exists B(1, m)
    }""",
    "a temporary without the places of one operand": """def f(double(M) A: s, double(M) B: s, double(M,M) D) -> (T: s) {
        t(j) +=! (D(m, j) * A(j)) * (B(m) + A(j)) where exists B(m)  T(j) +=! t(j) + max(t(j), A(j))
    }""",
    "the same statement twice": """def f(double(N,M) A: csr, double(N,M) B: coo) -> (C: csr) {
        C(i,j) = A(i,j) + B(i,j)  C(i,j) += A(i,j)  C(i,j) += A(i,j)
    }""",
    "its own target at other places": """def f(double(N,N) A: csr, double(N) x) -> (y) {
        y(i) = x(i)  y(i) += A(i,j) * y(j)
    }""",
    "its own target where another exists": """def f(double(N,M) A: csr) -> (y) {
        y(i,j) +=! 2 * A(i,j)  y(i,j) = min(y(i,j), A(i,j) * A(i,j)) where exists A(i,j)
    }""",
    "places of what is void": """def f(double(K) A: s, double(K) B: u, double(K,M) C: csr, double(K,M) D: coo) -> (
        T: s, U: u, V: coo
    ) {
        T(k) = min(1, A(2)) where k in 0:K, exists A(k)
        U(k) = A(k) * A(3) where exists B(k)
        V(k,m) +=! C(k,m) * D(k,m) where exists D(k,m)
    }""",
    "five operands below each other": """def f(
        double(N,M) A: dcsr, double(N,M) B: dcsr, double(N,M) C: dcsr, double(N,M) D: coo, double(N,M) E: dcsr
    ) -> (T: dcsr) { T(i,j) = max(max(A(i,j), B(i,j)), C(i,j)) + max(D(i,j), E(i,j)) }""",
    "operands that end at different indices": """def f(
        double(N,M) A: dcsr, double(N,M) B: csr, double(N,M) C: uc, double(N) D: s, double(N,M) E: dcsr, double(M) F: s
    ) -> (T) { T(i) +=! max(A(i,j) + B(i,j), C(i,j)) * F(j) + max(D(i), E(i,j)) }""",
    "a value at every place of five operands": """def f(
        double(N,M) A: dcsr, double(N,M) B: dcsr, double(N,M) C: csc, double(N) D: s, double(N,M) E: dcsr
    ) -> (T) { T(i,j) = exp(max(A(i,j), B(i,j))) + C(i,j) + max(D(i), E(i,j)) }""",
    "four operands at three indices": """def f(
        double(N,M,K) A: sss, double(N,M,K) B: sss, double(N,M,K) C: sds, double(N,M,K) D: ssd
    ) -> (T: sss) { T(i,j,k) = max(A(i,j,k), B(i,j,k)) + max(C(i,j,k), D(i,j,k)) where exists D(i,j,k) }""",
    "sums of sums of two operands": """def f(
        int64(M,N) A: dcsc, float(M,M) B: dcsr, int64(K,N) C: csr, int64(M,M) D, int64(M) E: s
    ) -> (T: s, U: s, V: csr) {
        T(j) +=! (-A(m, i) + B(m, j)) + (C(k, i) * D(m, M - 1 - j) + E(j))
        U(h) +=! A(m, h) + A(m, i)  V(m,h) +=! A(m, h) + A(m, i)
    }""",
    "identities at places that exist": """def f(
        double(N,M) A: csr, double(N,M) B: csr, bool(N,M) D: csr, double(N,K) U
    ) -> (C: csr, E: csr, F: csr, G: csr) {
        C(i,j) *=! 1 + B(i,j) where exists A(i,j)
        E(i,j) min=! (1 < 2) || D(i,j) where exists D(i,j)
        F(i,j) *=! 1 + U(i,k) * B(i,j) where exists A(i,j)
        G(i,j) *=! 1 + U(i,k) * B(k,j) where k in 0:min(N, K), exists A(i,j)
    }""",
    "a window of places that exist": """def f(double(P) A: s, double(N,P) B: csr) -> (T: coo, U: csr) {
        T(i,l) +=! A(l) where i in 1:3, exists B(i,l)  U(i,l) = A(l) where i in 1:3, exists B(i,l)
    }""",
    "its own places, some of which it leaves out": """def f(double(N,M) A: csr, double(N,M) B: csr) -> (y) {
        t(i,j) = A(i,j)  t(i,j) = 2 * t(i,j) where exists A(i,j), exists B(i,j)  y(i) +=! t(i,j)
    }""",
    "its own places beside those that it stores": """def f(double(N,N) A: csr, double(N,N) B: csr) -> (y, C: csr) {
        t(i,j) = A(i,j)  t(i,j) += t(i,k) * B(k,j) where exists A(i,j)  y(i) +=! t(i,j)
        C(i,j) = A(i,j)  C(i,j) += C(i,k) * B(k,j) where exists A(i,j)
    }""",
    "its own places in another order": """def f(double(N,N) A: csr) -> (y, z) {
        t(i,j) = A(i,j)  t(i,j) = t(i,j) + 2 * t(j,i) where exists A(i,j)  y(i) +=! t(i,j)
        u(i,j) = 2 * A(i,j)  u(i,j) = u(i,j) * u(j,i)  z(i) +=! u(i,j)
    }""",
    "places of a temporary in both orders": """def f(double(N,N) A: csr, double(N) x) -> (y, z, C: csr) {
        t(i,j) = 2 * A(i,j)  u(i,j) = t(i,j) * t(j,i)  y(i) +=! u(i,j)
        C(i,j) = u(j,i) + t(i,j) where exists A(i,j)  t(i,j) = t(i,j) * y(i)  z(j) max=! t(i,j) * x(i)
    }""",
    "a maximum stored by columns of rows": """def f(
        double(N,M) A: su(1,0), float(N,M) B: sd(1,0), double(N,M) C: csc
    ) -> (y) {
        t(i,j) max=! B(i,j) + B(i,j) where exists B(i,j)  y(i) +=! C(i,j) * B(i,j) + A(i,j) * t(i,j)
    }""",
    "repeated padding above a constant coordinate": """def f(bool(P,N) A: ss, bool(N,P,M,K) B: dudq(2,1,3,0)) -> (T) {
        T(h,l,j,k) = (A(l, h) && B(h, l, j, 3)) where k in 0:K
    }""",
    "a constant coordinate inside": """def f(double(N,M) A: csr, double(M,P,N) B: csf) -> (y) {
        y(i) +=! A(i,j) * B(j,3,i)
    }""",
    "sums of dense operands that cancel": """def f(int64(K) a, int64(M,K) B) -> (T: s) {
        T(k) +=! (1 + (a(k) * B(j,k))) where j in 2:M
    }""",
    "a dense product that nothing reads": """def f(double(M,P) D, double(N,P) E, double(P) a: s) -> (T: u) {
        U(l,j) +=! D(j,l) * E(h,l)
        T(l) +=! a(l) * l where l in 1:P
    }""",
    "a sum with equal runs": """def f(int64(N,P) A: csr, int64(N,P) B: csr) -> (C: csr, D: csr) {
        C(i,j) = A(i,j) + B(i,j)  D(i,j) = A(i,j) - 2 * A(i,j) + (B(i,j) - j * B(i,j))
    }""",
}
"""Programs that this suite has found, or that are near them."""


@pytest.mark.parametrize("what", FOUND)
def test_found(what: str) -> None:
    """With two sizes and two numbers of threads, in one of the two ways to pair them."""
    blocked, order = "bs" in FOUND[what], SystemRandom().choice((THREADS, THREADS[::-1]))
    print("threads", order)
    for seed, threads in enumerate(order):
        sizes = dict.fromkeys("NMKP", 8) if blocked or not seed else {"N": 4, "M": 3, "K": 5, "P": 17}
        program = program_of(FOUND[what], sizes | ({"N": 0} if "nothing" in what else {}))
        call_with_threads(threads, partial(check_program, Random(seed), program))
