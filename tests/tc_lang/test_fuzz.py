"""Whatever the text, the sizes and the arrays: a TCError or a result."""

from __future__ import annotations

import re
from contextlib import suppress
from math import prod

import numpy as np
from cases import CASES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensor_comprehensions.core.errors import TCError
from tensor_comprehensions.tc_lang import bind, compile_source
from tensor_comprehensions.tc_lang.ir import BoundFunction, Role
from tensor_comprehensions.tc_lang.reference.evaluator import evaluate_def
from tensor_comprehensions.tc_lang.reference.numpy_expression import numpy_dtype
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

TOKEN = re.compile(r"\s+|[A-Za-z_]\w*|\d+\.?\d*|->|[-+*]=!?|min=!?|max=!?|.", re.DOTALL)
PROGRAMS = [TOKEN.findall(c.source) for c in CASES]
WORDS = "? : && || ! exists where i j k N M 0 1 2 float(N) % / a.0 b.1 sigmoid min max int8 float16 uint8 bool inf e"
TOKENS = sorted({t for p in PROGRAMS for t in p}) + WORDS.split()


@st.composite
def mutants(draw: st.DrawFn) -> str:
    """A conformance program with some tokens replaced, removed, repeated or swapped."""
    tokens = list(draw(st.sampled_from(PROGRAMS)))
    for _ in range(draw(st.integers(0, 3))):
        at, other = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, len(tokens) - 1))
        match draw(st.sampled_from(["foreign", "own", "remove", "insert", "swap"])):
            case "foreign":
                tokens[at] = draw(st.sampled_from(TOKENS))
            case "own":
                tokens[at] = tokens[other]
            case "remove":
                tokens[at] = " "
            case "insert":
                tokens.insert(at, draw(st.sampled_from(TOKENS)))
            case "swap":
                tokens[at], tokens[other] = tokens[other], tokens[at]
    return "".join(tokens)


def small(b: BoundFunction) -> bool:
    points = [prod(i.extent for i in s.indices) for s in b.statements]
    return max([t.size for t in b.tensors] + points, default=0) < 100_000


def arrays(b: BoundFunction, seed: int) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    made: dict[str, object] = {}
    for t in b.tensors:
        if t.role in (Role.INPUT, Role.INOUT):
            x = rng.uniform(-1, 1, t.shape) if t.dtype.is_float else rng.integers(0, 4, t.shape)
            made[t.name] = np.asarray(x).astype(numpy_dtype(t.dtype))
    return made


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(mutants(), st.data())
def test_mutated_programs(source: str, data: st.DataObject) -> None:
    with suppress(TCError):
        for f in compile_source(source):
            assert compile_source(f.canonical)[0].canonical == f.canonical
            sizes = {n: data.draw(st.integers(0, 6)) for n in f.sizes}
            scalars = {n: data.draw(st.integers(-2, 3)) for n in f.scalars}
            b = bind(f, sizes, scalars)
            if not small(b):
                continue
            inputs = arrays(b, data.draw(st.integers(0, 9)))
            result = evaluate_def(b, inputs)
            legal = evaluate_def(legalize(b), inputs)
            for name in b.returns:
                assert result[name].shape == b.tensor(name).shape
                assert result[name].dtype == numpy_dtype(b.tensor(name).dtype)
                np.testing.assert_allclose(legal[name].astype("f8"), result[name].astype("f8"), rtol=1e-3, atol=1e-3)


@settings(max_examples=300)
@given(st.one_of(st.binary(), st.text(), st.text(alphabet="def(){}->=+*!<>?:.,0123 aiN#\n&|%/", max_size=60)))
def test_random_texts(source: str | bytes) -> None:
    with suppress(TCError):
        compile_source(source)


@settings(max_examples=100)
@given(st.text(max_size=10), st.sampled_from(PROGRAMS), st.data())
def test_random_insertions(text: str, tokens: list[str], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens)))
    with suppress(TCError):
        compile_source("".join([*tokens[:at], text, *tokens[at:]]))


SIZES = st.one_of(st.integers(-2, 9), st.integers(), st.none(), st.text(max_size=2), st.floats())


@settings(max_examples=200)
@given(st.sampled_from([c for c in CASES if c.error is None]), st.data())
def test_any_sizes(case: object, data: st.DataObject) -> None:
    for f in compile_source(case.source):  # type: ignore[attr-defined]
        sizes = {n: data.draw(SIZES) for n in f.sizes if data.draw(st.integers(0, 9))}
        scalars = {n: data.draw(SIZES) for n in f.scalars if data.draw(st.integers(0, 9))}
        with suppress(TCError):
            bind(f, sizes, scalars)


def show_error(source: str) -> str:
    """The error of a text, as people see it."""
    try:
        compile_source(source)
    except TCError as e:
        return str(e)
    return "^"


def test_every_error_has_a_caret() -> None:
    assert all("^" in show_error(c.source) for c in CASES)
