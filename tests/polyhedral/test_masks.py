"""Masks that make terms neutral: results stay the same, to the last inf and NaN, and only the rest is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensor_comprehensions as tc
from tensor_comprehensions.compiler.compiled_kernel import PassContext
from tensor_comprehensions.compiler.cpu_passes import lower_only
from tensor_comprehensions.loop_ir.interpret.interpreter import Interpreter, Run, interpret
from tensor_comprehensions.loop_ir.nodes import Store
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.polyhedral.scop.collapse import collapse
from tensor_comprehensions.target import AVX512
from tensor_comprehensions.tc_lang import bind, compile_source
from tensor_comprehensions.tc_lang.ir import BoundFunction, BoundStatement, Inequality
from tensor_comprehensions.tc_lang.transforms.legalize import legalize
from tensor_comprehensions.tc_lang.transforms.restrict_domains import restrict_domains

MASKS = (
    "k <= q", "k < q", "k >= q + 3", "q - k < 4 && k - q < 4", "q/4 == k/4", "k < 7", "2*k <= q + 5", "!(k > q)",
    "k <= q && q < 20", "k <= q || k < 3", "k >= 2 && k <= q + 1 && q != 5", "q < 9", "k != q", "q <= 40",
)  # fmt: skip
ATTENTION = """def attention(float(B,H,Q,D) query, float(B,H,K,D) key, float(B,H,K,E) value) -> (out) {{
    score(b,h,q,k) +=! query(b,h,q,d) * key(b,h,k,d)
    largest(b,h,q) max=! {mask} ? score(b,h,q,k) : -inf
    weight(b,h,q,k) = {mask} ? exp((score(b,h,q,k) - largest(b,h,q)) * rsqrt(float(D))) : 0
    total(b,h,q) +=! weight(b,h,q,k)
    mixed(b,h,q,e) +=! {mask} ? weight(b,h,q,k) * value(b,h,k,e) : 0
    out(b,h,q,e) = mixed(b,h,q,e) / total(b,h,q)
}}"""
SOFTMAX = """def softmax(float(Q,K) x, float(K,E) v) -> (total, mixed) {{
    masked(q,k) = {mask} ? x(q,k) : -inf
    largest(q) max=! masked(q,k)
    weight(q,k) = exp((masked(q,k) - largest(q)) * 0.5)
    total(q) +=! weight(q,k)
    mixed(q,e) +=! {mask} ? weight(q,k) * v(k,e) : 0
}}"""
DEFS = (
    "def f(float(Q,K) A, float(K,E) B) -> (O) {{ O(q,e) +=! {mask} ? A(q,k) * B(k,e) : 0.0 }}",
    "def f(float(Q,E) A, float(E,K) B) -> (O) {{ O(q,k) +=! {mask} ? A(q,e) * B(e,k) : 0.0 }}",
    "def f(float(Q,K) A) -> (O) {{ O(q) max=! {mask} ? A(q,k) : -inf }}",
    "def f(float(Q,K) A) -> (O) {{ O(k) +=! {mask} ? A(q,k) : 0 }}",
    "def f(float(Q,K) A) -> (O) {{ O(q) *=! {mask} ? A(q,k) : 1 }}",
    "def f(int32(Q,K) A) -> (O) {{ O(k) min=! {mask} ? A(q,k) : 2147483647 }}",
    "def f(float(Q,K,E) A) -> (O) {{ O(k,q) +=! {mask} ? A(q,k,e) : 0 }}",
    "def f(float(Q,E) A, float(E,K) B) -> (O) {{ T(q,k) +=! A(q,e) * B(e,k)\n O(q) +=! {mask} ? tanh(T(q,k)) : 0 }}",
    "def f(float(Q,K) A, float(Q,E) B) -> (O, P) {{ T(q,k) = {mask} ? A(q,k) * A(q,k) : 0\n"
    " O(k,e) +=! {mask} ? T(q,k) * B(q,e) : 0\n P(q) +=! T(q,k) }}",
    "def f(half(Q,K) A, half(K,E) B) -> (O) {{ O(q,e) +=! {mask} ? A(q,k) * B(k,e) : 0.0 }}",
    "def f(float(Q,K) A, float(K,E) B, float(E) c) -> (O) {{ O(q,e) = c(e)\n O(q,e) += {mask} ? A(q,k) * B(k,e) : 0\n"
    " O(q,e) = relu(O(q,e)) }}",
)  # fmt: skip


def same(a: Any, e: Any, tolerance: float) -> None:
    pairs = zip(a, e, strict=True) if isinstance(a, tuple) else [(a, e)]
    for x, y in pairs:
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)


def arguments(function: Any, sizes: dict[str, int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for p in function.parameters:
        shape = [sizes[e.name] for e in p.extents]
        x = torch.rand(shape, generator=generator) * 4 - 2
        found.append(x.to(getattr(torch, p.dtype.name)))
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from((*DEFS, ATTENTION, SOFTMAX)),
    st.sampled_from(MASKS),
    st.tuples(*(st.integers(1, 45),) * 3),
    st.builds(
        CpuOptions,
        fusion=st.sampled_from(("min", "preserve3", "max")),
        use_microkernels=st.booleans(),
        grain_size=st.sampled_from((0, 1, 32768)),
        tile=st.sampled_from(((), (4,), (8, 3), (0, 5, 2))),
        split_k=st.sampled_from((0, 2)),
    ),
    st.sampled_from((None, np.inf, -np.inf, np.nan)),
    st.integers(0, 1000),
)
def test_results_stay_the_same(
    text: str, mask: str, sizes: tuple[int, int, int], options: CpuOptions, planted: float | None, seed: int
) -> None:
    op = tc.define(text.format(mask=mask))
    op = getattr(op, compile_source(text.format(mask=mask))[0].name)
    extents = dict(zip("QKE", sizes, strict=True)) | {"B": 1, "H": 2, "D": 3}
    given = arguments(compile_source(text.format(mask=mask))[0], extents, seed)
    if planted is not None and given[0].dtype.is_floating_point:
        for x in given:
            x.view(-1)[seed % x.numel()] = planted
    same(op.compile(*given, options=options)(*given), op.reference(*given), 1e-2 if "half" in text else 2e-4)


@pytest.mark.sampled  # `test_results_stay_the_same` draws all masks
@pytest.mark.parametrize("mask", MASKS)
def test_large_enough_for_every_tile(mask: str) -> None:
    before = torch.get_num_threads()
    try:
        for text in (DEFS[0], DEFS[1], ATTENTION):
            function = compile_source(text.format(mask=mask))[0]
            op = getattr(tc.define(text.format(mask=mask)), function.name)
            given = arguments(function, {"Q": 210, "K": 190, "E": 70, "B": 1, "H": 2, "D": 40}, 1)
            wanted = op.reference(*given)
            for threads in (1, 2):  # of one kernel
                torch.set_num_threads(threads)
                same(op(*given), wanted, 1e-3)
    finally:
        torch.set_num_threads(before)


# --- how much is computed ------------------------------------------------------------------------------------------


class Counter(Interpreter):
    """A machine that counts the elements that it combines or stores."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = 0

    def store(self, s: Store) -> Run:
        run = super().store(s)

        def counted() -> None:
            self.stored += s.value.type.lanes
            run()

        return counted


def bound_of(text: str, sizes: dict[str, int]) -> BoundFunction:
    function = compile_source(text)[0]
    return legalize(bind(function, {n: sizes[n] for n in function.sizes}))


def count_stores(text: str, sizes: dict[str, int], options: CpuOptions, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the interpreter stores while it runs the loops of a def, accumulators in registers included."""
    bound = bound_of(text, sizes)
    module = lower_only(bound, text, PassContext(options, AVX512))["lower"]
    machines: list[Counter] = []

    def machine() -> Counter:
        machines.append(Counter())
        return machines[-1]

    monkeypatch.setattr("tensor_comprehensions.loop_ir.interpret.interpreter.Interpreter", machine)
    rng = np.random.default_rng(0)
    arrays = {b.name: rng.uniform(-1, 1, b.shape).astype(b.type.dtype.name) for b in module.arguments}
    assert interpret(module, arrays) == []
    return machines[0].stored


@pytest.mark.sampled  # masks
@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("text", [ATTENTION, SOFTMAX, DEFS[0]])
def test_a_triangle_is_half_of_the_work(text: str, structured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"Q": 64, "K": 64, "E": 24, "B": 1, "H": 1, "D": 6}
    options = CpuOptions(use_microkernels=structured)
    half, whole = (count_stores(text.format(mask=m), sizes, options, monkeypatch) for m in ("k <= q", "k < 1000"))
    assert half < (0.75 if structured else 0.55) * whole  # tiles along the diagonal are computed whole


def restrict_statements(text: str, **sizes: int) -> dict[str, BoundStatement]:
    """The statements by target."""
    found = restrict_domains(collapse(bound_of(text, {"Q": 60, "K": 50, "E": 20, "B": 1, "H": 2, "D": 6} | sizes)))
    return {s.target: s for s in found.statements}


LOWER = (Inequality((("k", -1), ("q", 1)), 0),)


def test_attention_is_restricted_from_end_to_end() -> None:
    s = restrict_statements(ATTENTION.format(mask="k <= q"))
    assert {name: (x.elements, x.terms) for name, x in s.items()} == {
        "score": (LOWER, ()), "largest": ((), LOWER), "weight": (LOWER, ()), "total": ((), LOWER),
        "mixed": ((), LOWER), "out": ((), ()),
    }  # fmt: skip
    assert "?" not in repr(s["mixed"].value)
    assert "Select" not in repr([x.value for x in s.values()])


def test_a_softmax_follows_from_minus_infinity() -> None:
    s = restrict_statements(SOFTMAX.format(mask="k <= q"))
    assert s["largest"].terms == s["total"].terms == s["mixed"].terms == LOWER
    assert s["masked"].elements == s["weight"].elements == LOWER


def test_the_verifier_accepts_tiles_of_a_mask_that_nothing_fulfills() -> None:
    op = tc.define("""
    def f(float(Q,E) A, float(E,K) B) -> (O) {
        T(q,k) +=! A(q,e) * B(e,k)
        O(q) +=! k >= 2 && k <= q + 1 ? tanh(T(q,k)) : 0
    }""").f
    given = torch.ones(1, 1), torch.ones(1, 4)
    assert op.compile(*given, options=CpuOptions(tile=(8, 3)))(*given).tolist() == [0.0]


def test_rows_without_a_term_stay_nan() -> None:
    s = restrict_statements(SOFTMAX.format(mask="k < q"))  # row 0 has none: its weights are NaN
    assert s["largest"].terms
    assert not s["total"].terms


REDUCTION = "def f(float(Q,K) A, float(K,E) B) -> (O) {{ O(q,e) +=! {} }}"


@pytest.mark.parametrize(
    "text",
    [
        REDUCTION.format("(k <= q ? A(q,k) : 0) * B(k,e)"),  # 0 * inf is NaN
        REDUCTION.format("k <= q ? A(q,k) * B(k,e) : 1e-30"),
        REDUCTION.format("A(q,k) > 0 ? A(q,k) * B(k,e) : 0"),  # data decides
        REDUCTION.format("k <= q + 49 ? A(q,k) * B(k,e) : 0"),  # always
        "def f(float(Q,K) A) -> (O) { O(q) max=! k <= q ? A(q,k) : -1e30 }",  # not neutral
        "def f(float(Q,K) A) -> (O) { O(q) +=! k <= q ? A(q,k) : -inf }",
        "def f(float(Q,K) A) -> (O) { O(q,k) = k <= q ? A(q,k) : 0 }",  # all of an output is wanted
        "def f(float(Q,K) A) -> (O) { O(q) +=! k + q < 50 ? A(q, k + q) : 0 where k in 0:50 }",  # the mask guards
        "def f(float(Q) A) -> (O) { O(q) +=! q < 20 ? A(q) : 0 }",  # nothing is summed
    ],
)
def test_what_is_not_neutral_stays(text: str) -> None:
    bound = collapse(bound_of(text, {"Q": 60, "K": 50, "E": 20}))
    assert restrict_domains(bound) is bound


def test_a_reader_that_wants_all_gets_all() -> None:
    text = "def f(float(Q,K) A) -> (O, P) {{ T(q,k) = A(q,k) * 2 O(q) +=! k <= q ? T(q,k) : 0 P(q,k) = {} }}"
    assert restrict_statements(text.format("k <= q ? T(q,k) : 0"))["T"].elements == LOWER
    assert not restrict_statements(text.format("T(q,k)"))["T"].elements
    assert not restrict_statements(text.format("k <= q ? 0 : T(q,k)"))["T"].elements
    assert restrict_statements(text.format("k <= q - 3 ? T(q,k) : 0"))["T"].elements == LOWER
    assert restrict_statements(text.format("k <= q && k < 9 ? T(q,k) : 0"))["T"].elements == LOWER


def test_the_schedule_says_what_is_left() -> None:
    op = tc.define(ATTENTION.format(mask="k <= q")).attention
    schedule = op.compile(*(torch.empty(1, 2, 64, 16) for _ in range(3))).source("schedule")
    assert schedule.count("where k <= q") == 5
