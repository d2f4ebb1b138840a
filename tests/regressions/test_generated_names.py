"""Names of programs that lowering once gave to things of its own: wrong results, crashes, and a poisoned cache."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random, SystemRandom

import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.core.errors import CannotLower, InternalError
from tensor_comprehensions.core.knobs import override_knobs
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.binding_checks import check_bindings
from tensor_comprehensions.loop_ir.nodes import Kernel, Module, Space, Stmt
from tensor_comprehensions.schedules import gett, pack, tile, unroll, vectorize
from tensor_comprehensions.tc_lang.binding.bind import bind
from tensor_comprehensions.tc_lang.semantics.check import compile_source
from tensor_comprehensions.tc_lang.transforms.canonical_bound import translate_errors

from ..helpers.hostile_programs import check_hostile_program

ROUNDS = 5
PROGRAMS = int(os.environ.get("TC_HOSTILE_PROGRAMS", "300")) // ROUNDS


def d(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


MET: list[tuple[str, list[tuple[int, ...]], Callable[..., Tensor]]] = [
    (
        "def f(float(M,K) A, float(N,K) W) -> (O) { O(i,j) +=! A(i,acc) * W(j,acc) O(i,j) = fmax(O(i,j), 0) }",
        [(64, 32), (48, 32)],
        lambda a, w: (a @ w.T).clamp(min=0),
    ),
    (
        "def f(float(M,N) A, float(K) B) -> (O) { O(i,j,i_j) = A(i,j) * B(i_j) }",
        [(30, 40), (50,)],
        lambda a, b: a[:, :, None] * b,
    ),
    ("def f(float(M,N) A) -> (O) { O(i) +=! A(i,i_tile) }", [(3000, 4000)], lambda a: a.sum(1)),
    ("def f(float(M,N) A) -> (O) { O(i,i_tile) = A(i_tile,i) + 1 }", [(3000, 4000)], lambda a: a.T + 1),
    (
        "def f(float(M,N) A) -> (O) { mx(i) max=! A(i,tile) O(i,tile) = A(i,tile) - mx(i) }",
        [(500, 700)],
        lambda a: a - a.max(1, keepdim=True)[0],
    ),
    (
        "def f(float(M,K) A, float(N,K) B) -> (S0_acc) { S0_acc(i,j) +=! A(i,k) * B(j,k) }",
        [(256, 128), (200, 128)],
        lambda a, b: a @ b.T,
    ),
    (
        "def f(float(M,K) A, float(N,K) S0_right) -> (O) { O(i,j) +=! A(i,k) * S0_right(j,k) }",
        [(256, 128), (200, 128)],
        lambda a, b: a @ b.T,
    ),
    (
        "def f(float(M,K) A, float(N,K) B, float(M,N) S0_sums) -> (O) "
        "{ O(i,j) +=! A(i,k) * B(j,k) O(i,j) = tanh(O(i,j)) + S0_sums(i,j) }",
        [(256, 128), (200, 128), (256, 200)],
        lambda a, b, s: torch.tanh(a @ b.T) + s,
    ),
]


@pytest.mark.parametrize(("source", "shapes", "expected"), MET, ids=[m[0].partition("{")[2].strip() for m in MET])
def test_names_that_lowering_gave(source: str, shapes: list[tuple[int, ...]], expected: Callable[..., Tensor]) -> None:
    inputs = [numbers(*shape) for shape in shapes]
    found = tc.define(source).f(*inputs)
    torch.testing.assert_close(d(found), expected(*map(d, inputs)), rtol=1e-3, atol=1e-3)


def test_a_gather_along_an_index_called_as_a_tile() -> None:
    table, places = numbers(300, 64), torch.arange(4000) * 7 % 300
    op = tc.define("def f(float(M,N) A, int64(K) I) -> (O) { O(i,i_tile) = A(I(i),i_tile) }").f
    assert torch.equal(op(table, places), table[places])


def test_a_program_with_such_names_leaves_a_right_kernel_to_others(tmp_path: Path) -> None:
    """Another process gets the kernel that the first one kept, since the programs differ in names alone."""
    program = """
import sys, torch
import tensor_comprehensions as tc
a, b = torch.randn(30, 40), torch.randn(50)
kernel = tc.define(sys.argv[1]).f.compile(a, b)
torch.testing.assert_close(kernel(a, b), a[:, :, None] * b)
print(*(name for name, _ in kernel.compiled.seconds))
"""
    source = "def f(float(M,N) A, float(K) B) -> (O) {{ O({0},{1},{2}) = A({0},{1}) * B({2}) }}"
    with override_knobs(cache="readwrite", cache_dir=str(tmp_path), verify=False):
        made = tc.define(source.format("i", "j", "i_j")).f.compile(torch.randn(30, 40), torch.randn(50))
    assert "emit" in dict(made.compiled.seconds)
    environment = {**os.environ, "TC_CACHE": "readwrite", "TC_CACHE_DIR": str(tmp_path), "TC_VERIFY": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, source.format("a", "b", "c")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    assert done.stdout.split() == ["found"]


def test_schedules_name_loops_as_the_program_does() -> None:
    """Digits in the names of indices are not the numbers of loops, nor are the names those of the canonical form."""
    inputs = numbers(96, 80), numbers(80, 160)
    texts = []
    for a, b, m, n, k in (
        ("A", "B", "m", "n", "k"),
        ("i0", "a0", "i1", "i", "i11"),
        ("a1", "i2", "tile", "acc", "i_j"),
    ):
        op = tc.define(
            f"def f(float(M,K) {a}, float(K,N) {b}) -> (C) {{ C({m},{n}) +=! {a}({m},{k}) * {b}({k},{n}) }}"
        ).f
        outer, inner = tile(**{m: 48, n: 64, k: 40}), tile(**{m: 6, n: 32})
        packed = pack(**{a: f"{m}.1", b: f"{n}.1"})
        kernel = op.compile(*inputs, schedule=outer >> inner >> packed >> vectorize(n) >> unroll(**{k: 4}))
        torch.testing.assert_close(kernel(*inputs), inputs[0] @ inputs[1], rtol=1e-4, atol=1e-4)
        assert f"tile({m}=48, {n}=64, {k}=40) >> tile({m}=6, {n}=32)" in kernel.source("schedule")
        assert f"float {a}[restrict 96][80]" in kernel.source("c")
        texts.append(kernel.source("llvm"))
        texts.append(op.compile(*inputs, schedule=gett).source("llvm"))
    assert len(set(texts)) == 2
    with pytest.raises(tc.ArgumentError, match="S0 has no iterator 'm'") as caught:
        op.compile(*inputs, schedule=tile(m=4))
    assert caught.value.expected == "tile, acc, i_j"


def test_iterators_that_are_walked_together_beside_one_of_their_name() -> None:
    x, y = numbers(4, 12, 16), numbers(16, 24)
    op = tc.define("def f(float(A,B,K) x, float(K,N) y) -> (z) { z(b,s,b_s) +=! x(b,s,k) * y(k,b_s) }").f
    kernel = op.compile(x, y, schedule=tile(**{"b.s": 4, "b_s": 16}) >> vectorize("b_s"))
    torch.testing.assert_close(kernel(x, y), x @ y, rtol=1e-4, atol=1e-4)
    assert "tile(**{'b.s': 4, 'b_s': 16})" in kernel.source("schedule")


def test_errors_of_lowering_name_what_the_program_names() -> None:
    """They come from the canonical form."""
    (function,) = compile_source("def f(float(M,N) a1) -> (y) { t(p,q) = a1(p,q) + 1 y(r) +=! t(r,c) }")
    bound = bind(function, {"M": 3, "N": 5})
    with pytest.raises(tc.ArgumentError) as caught, translate_errors(bound):
        raise tc.ArgumentError("no vectors along i3 of 'a1'", expected="i0_i1, i0", found="i2", suggestion="a0(i0)")
    error = caught.value
    found = (error.message, error.expected, error.found, error.suggestion)
    assert found == ("no vectors along c of 'y'", "p_q, p", "r", "a1(p)")
    assert str(error).startswith("no vectors along c of 'y'")
    with pytest.raises(CannotLower, match=r"^c depends on r$"), translate_errors(bound):
        raise CannotLower("i3 depends on i2")


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_random_programs_with_names_that_lowering_gives(turn: int) -> None:
    first = SystemRandom().randrange(2**32)
    print(f"programs {first} to {first + PROGRAMS - 1}")
    for seed in range(first, first + PROGRAMS):
        check_hostile_program(Random(seed))


# --- the check that is always on ----------------------------------------------------------------------------------

A = build.buffer("A", FLOAT32, (4,))
READ = build.store(A, (build.var("i"),), build.load(A, build.var("i")))


def module(body: Stmt, *more: Kernel) -> Module:
    return Module("m", (A,), (), (Kernel("m", body), *more), written=("A",))


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (build.loops([("i", 4), ("i", 4)], READ), "i is bound twice"),
        (build.loops([("A", 4)], build.NOTHING), "A is bound twice"),
        (READ, "i is used and not bound"),
        (build.block(build.loops([("i", 4)], READ), READ), "i is used and not bound"),
        (build.allocate([build.buffer("A", FLOAT32, (4,), Space.SCRATCH)], build.NOTHING), "A is bound twice"),
        (build.store(build.buffer("B", FLOAT32, (4,)), (0,), 1.0), "B is used and not bound"),
        (build.store(A, (0,), build.load(build.buffer("B", FLOAT32, (4,)), 0)), "B is used and not bound"),
    ],
)
def test_names_that_mean_two_things_or_nothing(body: Stmt, fault: str) -> None:
    check_bindings(module(build.loops([("i", 4)], READ)))
    with pytest.raises(InternalError, match=fault):
        check_bindings(module(body))


def test_two_kernels_or_buffers_of_one_name() -> None:
    twice = module(build.NOTHING, Kernel("m", build.NOTHING))
    with pytest.raises(InternalError, match="two kernels have one name"):
        check_bindings(twice)
    with pytest.raises(InternalError, match="two buffers have one name"):
        check_bindings(Module("m", (A, A), (), ()))
