from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc

SOURCE = """
def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }
def scale(float(N) in, float alpha) -> (out) { out(i) = alpha * in(i) }
def accumulate(float(N) x) -> (total) { total += x(i) }
"""


@pytest.fixture(scope="module")
def ops() -> tc.Library:
    return tc.define(SOURCE)


def test_defs_are_attributes_and_items(ops: tc.Library) -> None:
    assert ops.matmul is ops["matmul"]
    assert [op.__name__ for op in ops] == ["matmul", "scale", "accumulate"]
    assert len(ops) == 3
    assert "scale" in ops
    assert "scala" not in ops
    assert {"matmul", "scale"} <= set(dir(ops))


def test_the_empty_program_has_no_defs() -> None:
    assert list(tc.define("")) == []


def test_an_unknown_name_suggests_the_nearest(ops: tc.Library) -> None:
    with pytest.raises(AttributeError, match="did you mean 'matmul'") as caught:
        _ = ops.matmull
    assert isinstance(caught.value, tc.ArgumentError)
    with pytest.raises(tc.ArgumentError, match="no def 'nothing'"):
        _ = ops["nothing"]
    assert not hasattr(ops, "nothing")
    assert getattr(ops, "nothing", 5) == 5


def test_repr_shows_the_signatures(ops: tc.Library) -> None:
    assert repr(ops.matmul) == "matmul(float32(M,K) A, float32(K,N) B) -> (float32(M,N) C)"
    assert repr(ops.matmul) in repr(ops)


def test_the_docstring_tells_shapes_errors_and_source(ops: tc.Library) -> None:
    text = ops.accumulate.__doc__ or ""
    for part in ("float32(N) x", "total: initial value, passed by keyword", "ArgumentError", "total += x(i)"):
        assert part in text


def test_python_signatures(ops: tc.Library) -> None:
    assert str(inspect.signature(ops.matmul)) == "(A, B, /, *, out=None)"
    assert str(inspect.signature(ops.scale)) == "(in_, alpha, /, *, out=None)"
    assert str(inspect.signature(ops.accumulate)) == "(x, /, *, total, out=None)"


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_operators_and_libraries_are_copied_as_their_text(ops: tc.Library, clone: Callable[[Any], Any]) -> None:
    x = torch.randn(5)
    assert torch.equal(clone(ops.scale)(x, 2.0), 2 * x)
    assert repr(clone(ops)) == repr(ops)
    assert torch.equal(clone(ops).scale(x, 2.0), 2 * x)


def test_python_names_do_not_collide() -> None:
    op = tc.define("def f(float out, float in, float in_) -> (y) { y = out + in + in_ }").f
    assert str(inspect.signature(op)) == "(out_, in_, in__, /, *, out=None)"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def f(", tc.ParseError),
        ("def f(float(N) a) -> (b) { b(i) = c(i) }", tc.CheckError),
        (None, tc.ParseError),
        (3, tc.ParseError),
        (b"\xff", tc.ParseError),
        ("\x00", tc.ParseError),
        ("def f(float(N) a) -> (b) { b(i) = " + "-" * 10000 + "a(i) }", tc.ParseError),
    ],
    ids=range(7),
)
def test_what_is_not_a_program_is_refused(source: object, error: type[tc.TCError]) -> None:
    with pytest.raises(error):
        tc.define(source)  # type: ignore[arg-type]


def test_importing_the_package_loads_no_library() -> None:
    """What is slow to import waits until it is used; defining loads torch, the first compilation the compilers."""
    program = (
        "import sys; import tensor_comprehensions as tc;"
        "heavy = {'torch', 'islpy', 'llvmlite', 'lark', 'numpy'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("frozen", [False, True])
def test_what_the_import_makes_counts_as_old_and_garbage_stays_garbage(frozen: bool) -> None:
    program = f"""
import gc, weakref, torch, tensor_comprehensions
class Node: pass
node = Node(); node.itself = node; gone = weakref.ref(node); del node
if {frozen}: gc.freeze()
kept = gc.get_freeze_count()
tensor_comprehensions.define
assert gc.isenabled()
young = sum(len(gc.get_objects(generation=g)) for g in (0, 1))
after = gc.get_freeze_count()
gc.collect()
print(young, kept, after, gone() is None)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    young, kept, after, collected = done.stdout.split()
    if frozen:
        assert int(after) > 0.99 * int(kept) > 10_000
        assert collected == "False"
    else:
        assert (kept, after, collected) == ("0", "0", "True")
        assert int(young) < 1_000


def test_public_names_are_there() -> None:
    assert all(hasattr(tc, name) for name in tc.__all__)
    assert set(tc.__all__) <= set(dir(tc))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tc.nothing  # type: ignore[attr-defined]


# --- what is allowed and probably not meant ------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1/2", "exp(-1/3)", "(7/2)", "float(3/2)", "(x(i) > 0 ? 1/2 : 0)"])
def test_a_fraction_that_is_lost_among_floats_is_reported(value: str) -> None:
    for body in (f"y(i) = {value} * x(i)", f"y(i) = c * x(i) where c = {value}"):
        with pytest.warns(UserWarning, match="rounds down") as caught:
            tc.define(f"def f(float(N) x) -> (y) {{ {body} }}")
        (warning,) = caught
        assert warning.filename == __file__
        assert "^^^" in str(warning.message)
        assert ".0/" in str(warning.message)


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_to_be_an_error_stays_a_warning() -> None:
    with pytest.raises(UserWarning, match="7/2 is 3"):
        tc.define("def f(float(N) x) -> (y) { y(i) = x(i) * (7/2) }")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", ["4/2 * x(i)", "x(i)/2", "1.0/2 * x(i)", "x(i + 1/2)", "x(i) * 1/2", "N/2 * x(i)"])
def test_other_quotients_are_nothing_to_talk_about(value: str) -> None:
    tc.define(f"def f(float(N) x) -> (y) {{ y(i) = {value} }}")
    tc.define("def f(int(N) x) -> (y) { y(i) = x(i) + 7/2 }")
