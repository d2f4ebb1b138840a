"""One mistake of a caller at a time: its kind, and what the message must say."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core import knobs

OPS = tc.define("""
def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }
def gemm(float(M,K) A, float(K,N) B, float alpha) -> (C) {
    C(m,n) = 0.5 * C(m,n)
    C(m,n) += alpha * A(m,k) * B(k,n)
}
def moments(float(N,D) x) -> (mean, square) {
    mean(n) +=! x(n,d)
    square(n) +=! x(n,d) * x(n,d)
}
def fixed(float(4,N) x) -> (y) { y(i,j) = x(i,j) }
def pool(float(N) x, int k) -> (y) { y(i) max=! x(i+j) where j in 0:k }
def brain(bfloat16(N) x) -> (y) { y(i) = x(i) }
def numbers(float alpha) -> (y) { y = bfloat16(alpha) }
def big(float(N) x) -> (y) { y(i,j,k,l) = x(i) * x(j) * x(k) * x(l) }
""")
A, B, C = torch.ones(3, 4), torch.ones(4, 5), torch.ones(3, 5)

MISTAKES: dict[str, tuple[Callable[[], object], type[tc.TCError], list[str]]] = {
    "too few": (lambda: OPS.matmul(A), tc.ArgumentError, ["takes 2 arguments", "not 1", "pass B"]),
    "too many": (lambda: OPS.matmul(A, B, C), tc.ArgumentError, ["takes 2 arguments", "not 3"]),
    "sizes differ": (lambda: OPS.matmul(A, C), tc.ArgumentError, ["K", "4", "3", "A", "B"]),
    "fixed size": (lambda: OPS.fixed(A), tc.ArgumentError, ["x", "4", "3"]),
    "parameter by keyword": (lambda: OPS.matmul(A, B=B), tc.ArgumentError, ["'B'", "by position"]),
    "unknown keyword": (lambda: OPS.matmul(A, B, outt=C), tc.ArgumentError, ["'outt'", "did you mean 'out'?"]),
    "initial value of no in/out": (lambda: OPS.matmul(A, B, C=C), tc.ArgumentError, ["starts 'C' itself"]),
    "no initial value": (lambda: OPS.gemm(A, B, 1.0), tc.ArgumentError, ["initial value", "C=...", "float32(M,N) C"]),
    "initial value of another size": (
        lambda: OPS.gemm(A, B, 1.0, C=torch.ones(3, 6)), tc.ArgumentError, ["C", "6", "5"],
    ),
    "initial value of another type": (
        lambda: OPS.gemm(A, B, 1.0, C=C.double()), tc.ArgumentError, ["'C'", "float64"],
    ),
    "negative range": (lambda: OPS.pool(torch.ones(3), 7), tc.RangeError, ["i"]),
    "out of another shape": (
        lambda: OPS.matmul(A, B, out=A), tc.ArgumentError, ["out (C)", "another shape", "(3, 4)"],
    ),
    "out of another type": (lambda: OPS.matmul(A, B, out=C.double()), tc.ArgumentError, ["out (C)", "float64"]),
    "out is no tensor": (lambda: OPS.matmul(A, B, out=3), tc.ArgumentError, ["out (C)", "is an int"]),
    "out is an array": (lambda: OPS.matmul(A, B, out=C.numpy()), tc.ArgumentError, ["out (C)", "is a ndarray"]),
    "out overlaps itself": (
        lambda: OPS.matmul(A, B, out=torch.ones(5).expand(3, 5)), tc.ArgumentError, ["share memory", "clone()"],
    ),
    "out is an input": (
        lambda: OPS.matmul(A[:, :3], A[:, 1:], out=A[:, :3]), tc.ArgumentError, ["'C'", "shares memory with 'A'"],
    ),
    "out overlaps the initial value": (
        lambda: (lambda c: OPS.gemm(A, B, 1.0, C=c[:3], out=c[1:]))(torch.ones(4, 5)),
        tc.ArgumentError, ["shares memory with the initial value of 'C'"],
    ),
    "one out for two": (
        lambda: OPS.moments(A, out=torch.ones(3)), tc.ArgumentError, ["'out' of moments has 1", "mean, square"],
    ),
    "one memory for two outputs": (
        lambda: (lambda m: OPS.moments(A, out=(m, m)))(torch.ones(3)),
        tc.ArgumentError, ["shares memory with the destination of 'mean'"],
    ),
    "out requires a gradient": (
        lambda: OPS.matmul(A, B, out=torch.ones(3, 5, requires_grad=True)), tc.ArgumentError, ["gradient"],
    ),
    "array of a type that numpy lacks": (lambda: OPS.brain(np.ones(3, "f4")), tc.ArgumentError, ["NumPy has no type"]),
    "no memory for the output": (
        lambda: OPS.big(torch.ones(30000)), tc.ArgumentError, ["no memory for", "(30000, 30000, 30000, 30000)"],
    ),
    "infer with a bare number": (lambda: OPS.matmul.infer(3, 4), tc.ArgumentError, ["'A'", "has no shape"]),
    "infer with another rank": (lambda: OPS.matmul.infer((3,), (4, 5)), tc.ArgumentError, ["'A'", "1 dimensions"]),
    "infer with a negative size": (
        lambda: OPS.matmul.infer((-3, 4), (4, 5)), tc.ArgumentError, ["'A'", "not a number of elements"],
    ),
    "infer without the value of a number": (lambda: OPS.pool.infer((9,), ()), tc.ArgumentError, ["'k'"]),
    "unknown source": (
        lambda: OPS.matmul.compile(A, B).source("ptx"), tc.ArgumentError, ["'ptx'", "schedule, loops"],
    ),
    "options of no kind": (
        lambda: OPS.matmul.compile(A, B, options={"fusion": "max"}), tc.ArgumentError, ["options", "CpuOptions"],
    ),
    "options that are tuned": (
        lambda: OPS.matmul.compile(A, B, options="tuned"),  # type: ignore[arg-type]
        tc.ArgumentError, ["options is a str", "'tuned'", 'tc.define(text, options="tuned")'],
    ),
    "target without its kind": (
        lambda: OPS.matmul.compile(A, B, target="sm_91"), tc.ArgumentError, ["'sm_91'", "cuda:sm_90"],
    ),
    "options with a wrong value": (
        lambda: OPS.matmul.compile(A, B, options=tc.CpuOptions(fusion="most")), tc.ArgumentError, ["fusion", "most"],
    ),
    "argument that a function does not take": (
        lambda: tc.define("def f(float(N) x) -> (y) { y(i) = x(i) }", optoins=None),  # type: ignore[call-arg]
        tc.ArgumentError, ["'optoins'", "backward, options", "did you mean 'options'?"],
    ),
    "argument that a function lacks": (
        lambda: tc.define(), tc.ArgumentError, ["'source'"],  # type: ignore[call-arg]
    ),
    "number of too many digits": (
        lambda: OPS.matmul(A, 10**5000), tc.ArgumentError, ["more than 4300 digits"],
    ),
    "def of no text": (lambda: OPS[["matmul"]], tc.ArgumentError, ["no def ['matmul']"]),
    "gradient without a def": (
        lambda: tc.define("def f(float(N) x) -> (y) { y(i) = x(i) }", {"f": ""}), tc.CheckError, ["'f' has no def"],
    ),
    "formats of no kind": (
        lambda: tc.define("def f(float(N) x) -> (y) { y(i) = x(i) }", formats=torch.ones(2)),  # type: ignore[arg-type]
        tc.ArgumentError, ["formats are given by name"],
    ),
    "type of no text": (
        lambda: tc.from_expression("y(i) = x(i)", x=["int"]), tc.CheckError, ["['int'] is not a type"],
    ),
    "journal of no kind": (
        lambda: OPS.matmul.explain(A, B, journal=3),  # type: ignore[arg-type]
        tc.ArgumentError, ["the journal is 3", "path"],
    ),
    "module with parameters of no kind": (
        lambda: tc.Module(OPS.matmul, 3), tc.ArgumentError, ["parameters is 3"],  # type: ignore[arg-type]
    ),
    "module with a size of no kind": (
        lambda: tc.Module(OPS.matmul, "B", sizes={"K": True, "N": 3}), tc.ArgumentError, ["'K'", "True"],
    ),
    "target of no kind": (
        lambda: OPS.matmul.compile(A, B, target="fpga"), tc.ArgumentError, ["target", "Target"],
    ),
    "target with one cache": (
        lambda: OPS.matmul.compile(A, B, target=tc.CpuTarget("cpu", "haswell", "", 128, 16, (32768,))),
        tc.ArgumentError, ["caches of (32768,)", "two levels"],
    ),
    "options of no name": (
        lambda: tc.define("def f(float(N) x) -> (y) { y(i) = x(i) }", options="fast"),  # type: ignore[arg-type]
        tc.ArgumentError, ["options is 'fast'", '"tuned"'],
    ),
    "backward is a text": (
        lambda: tc.define("def f(float(N) x) -> (y) { y(i) = x(i) }", "def b() -> () {}"),  # type: ignore[arg-type]
        tc.ArgumentError, ["backward is a str", "by the names of defs"],
    ),
    "show before any call": (
        lambda: tc.define("def f(float(N) x) -> (y) { y(i) = x(i) }").f.show(), tc.ArgumentError, ["takes 1 argument"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("interpret", [False, True], ids=["compiled", "interpreted"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported(mistake: str, interpret: bool) -> None:
    call, error, parts = MISTAKES[mistake]
    with knobs.override_knobs(interpret=interpret), pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)
    assert (torch.cat([A.flatten(), B.flatten(), C.flatten()]) == 1).all()


@pytest.mark.parametrize(
    ("method", "keyword", "meant"), [("compile", "optons", "options"), ("explain", "mesure", "measure"),
                                     ("autotune", "budgt", "budget")]
)  # fmt: skip
def test_an_unknown_keyword_of_a_method_names_the_nearest_one(method: str, keyword: str, meant: str) -> None:
    double = tc.define("def double(float(N) x) -> (y) { y(i) = 2 * x(i) }").double
    with pytest.raises(tc.ArgumentError, match=f"(?s)no argument '{keyword}'.*did you mean '{meant}'"):
        getattr(double, method)(torch.zeros(4), **{keyword: 1})


def test_the_end_of_the_stack_is_reported_as_such() -> None:
    """Wherever in the stack a first call runs out of it: never as a bug of this package."""

    def below(depth: int) -> torch.Tensor:
        if depth:
            return below(depth - 1)
        fresh = tc.define("def twice(float(N) x) -> (y) { y(i) = 2 * x(i) }").twice
        result: torch.Tensor = fresh(torch.ones(3))
        return result

    said = set()
    for depth in range(0, sys.getrecursionlimit(), 11):
        try:
            assert torch.equal(below(depth), torch.full((3,), 2.0))
        except tc.ArgumentError as error:
            said.add(error.message.partition(":")[0])
        except RecursionError:  # before the call, or while its error is made
            pass
    assert said == {"the stack is too small"}


def test_a_target_goes_by_the_name_that_nvidia_gives_it() -> None:
    kernel = OPS.matmul.compile(A, B, target="sm_90")
    assert kernel.source("cuda") == OPS.matmul.compile(A, B, target="cuda:sm_90").source("cuda")


SURROGATES = [
    "def f(float(N) x) -> (y) { y(i) = x(i)\ud800 }",
    "def f(float(N) x) -> (y) { # \udfff\n y(i) = z(i) }",
    "\ud800",
    "def f(float(N) x) -> (y) { y(i) = x(i) } # \ud83d\n }",
]


@pytest.mark.parametrize("text", SURROGATES)
def test_every_error_can_be_printed(text: str) -> None:
    with pytest.raises(tc.TCError) as caught:
        tc.define(text)
    str(caught.value).encode("utf-8")
    with pytest.raises(tc.TCError) as caught:
        tc.define("def f(float(N) x) -> (y) { y(i) = x(i) }")[text]
    "".join(traceback.format_exception(caught.value)).encode("utf-8")


def test_a_caret_stands_under_what_it_means_after_a_character_that_cannot_be_printed() -> None:
    with pytest.raises(tc.ParseError) as caught:
        tc.define("def f(float(N) x) -> (y) { y(i) = x(i) \ud800 }")
    _, line, caret, *_ = str(caught.value).splitlines()
    assert line[caret.index("^")] == "\ufffd"


def test_half_a_pair_in_a_comment_means_nothing(tmp_path: Path) -> None:
    with knobs.override_knobs(dump=str(tmp_path)):
        op = tc.define("def f(float(N) x) -> (y) { # \ud800\n y(i) = x(i) + 0.5 }").f
        assert op(torch.ones(2)).tolist() == [1.5, 1.5]
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize("encoded", [False, True])
def test_a_byte_order_mark_is_no_part_of_a_program(encoded: bool) -> None:
    text = "\ufeffdef f(float(N) x) -> (y) { y(i) = 1/2 + x(i) }"
    for _ in range(2):
        with pytest.warns(UserWarning, match="1:35"):
            program = tc.define(text.encode() if encoded else text)  # type: ignore[arg-type]
        assert program.f(torch.ones(1)).item() == 1.0
    with pytest.raises(tc.ParseError, match="1:13"):
        tc.define("\ufeff  definition")
    assert tc.from_expression("\ufeffy(i) = 2 * x(i)")(torch.ones(1)).item() == 2.0
