"""What fuses, what is contracted, what is proved: the decisions of the polyhedral lowering on known programs."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest

from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir.nodes import Loop, LoopKind, Module, Space
from tensor_comprehensions.loop_ir.rewrite import allocated_buffers, walk_stmts
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.polyhedral.cpu.lower import explain_cpu, lower_cpu, plan_schedule, scop_nodes
from tensor_comprehensions.polyhedral.schedule.fusion import FusionGroup
from tensor_comprehensions.polyhedral.schedule.legality import check_legal
from tensor_comprehensions.polyhedral.schedule.loop_nest import DimKind, LoopNest
from tensor_comprehensions.polyhedral.schedule.shared_rows import BandMember, find_shared_rows
from tensor_comprehensions.polyhedral.scop.collapse import collapse
from tensor_comprehensions.polyhedral.scop.scop import Scop
from tensor_comprehensions.structured.language.primitives import pack, tile
from tensor_comprehensions.target import AVX512
from tensor_comprehensions.tc_lang import BoundFunction, bind, compile_source
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

from ..conftest import Golden

SOFTMAX = """
def softmax(float(N,D) X) -> (O) {
    m(n) max=! X(n,d)
    e(n,d) = exp(X(n,d) - m(n))
    s(n) +=! e(n,d)
    O(n,d) = e(n,d) / s(n)
}"""
MOMENTS = """
def moments(float(N,K) I) -> (mean, var) {
    mean(n) +=! I(n,k)
    var(n) +=! I(n,k) * I(n,k)
    mean(n) = mean(n) / K
    var(n) = var(n) / K - mean(n) * mean(n)
}"""
REVERSED = """
def f(float(N) I) -> (O) {
    T(n) = I(n) * 2.0
    O(n) = T(N - 1 - n)
}"""
MLP = """
def mlp(float(B,N) I, float(O,N) W1, float(P,O) W2) -> (Y) {
    T(b,o) +=! I(b,n) * W1(o,n)
    T(b,o) = fmaxf(T(b,o), 0)
    Y(b,p) +=! T(b,o) * W2(p,o)
}"""
SCATTER = "def f(int(N) I, float(N) X, float(K) S) -> (H) { H(k) = S(k)  H(I(n)) += X(n) }"
POINTWISE = """
def f(float(A,B,C) X, float(A,B,C) Y) -> (O) {
    T(a,b,c) = X(a,b,c) * Y(a,b,c)
    O(a,b,c) = tanh(T(a,b,c))
}"""


def bound(source: str, **sizes: int) -> BoundFunction:
    (function,) = compile_source(source)
    return legalize(bind(function, sizes))


def module(source: str, options: CpuOptions | None = None, **sizes: int) -> Module:
    return lower_cpu(bound(source, **sizes), options or CpuOptions(), AVX512)


def allocations(m: Module) -> dict[str, tuple[Space, tuple[int, ...]]]:
    found = [b for k in m.kernels for b in allocated_buffers(k.body)]
    return {b.name: (b.space, b.shape) for b in found}


def test_few_elements_are_one_tile() -> None:
    """What no threads share has no loop over tiles."""

    def loops(m: Module) -> int:
        return sum(isinstance(s, Loop) for k in m.kernels for s in walk_stmts(k.body))

    copy = "def f(float(M,N) X) -> (O) { O(i,j) = X(i,j) }"
    assert loops(module(copy, M=90, N=32)) == 1
    assert loops(module(copy, M=900, N=320)) == 2
    assert loops(module(copy, CpuOptions(grain_size=1000), M=90, N=32)) == 2


def test_rows_of_softmax_fuse_and_their_temporaries_stay_in_a_row() -> None:
    m = module(SOFTMAX, N=64, D=1000)
    assert len(m.kernels) == 1
    assert m.temporaries == ()
    assert allocations(m) == {
        "m": (Space.REGISTER, ()),
        "e": (Space.SCRATCH, (1000,)),
        "s": (Space.REGISTER, ()),
    }


def test_reductions_over_one_read_share_their_loop() -> None:
    m = module(MOMENTS, N=128, K=36864)
    vector = [s for k in m.kernels for s in walk_stmts(k.body) if isinstance(s, Loop) and s.kind is LoopKind.VECTOR]
    assert [loop.stop.value for loop in vector if loop.var == "k"] == [36864]


def test_minimal_fusion_keeps_a_kernel_for_each_statement() -> None:
    assert len(module(SOFTMAX, CpuOptions(fusion="min"), N=64, D=100).kernels) == 4


def test_a_consumer_in_reverse_order_waits_for_its_producer() -> None:
    m = module(REVERSED, N=50)
    assert len(m.kernels) == 2
    assert [t.name for t in m.temporaries] == ["T"]


def test_layers_fuse_over_the_batch_when_their_weights_stay_in_cache() -> None:
    assert len(module(MLP, B=256, N=64, O=64, P=32).kernels) == 1
    assert len(module(MLP, B=256, N=1024, O=2048, P=1024).kernels) == 2


def test_layers_over_a_short_batch_share_their_work_one_by_one() -> None:
    """Fused, one thread would do all of it: a tile has 64 rows."""
    assert len(module(MLP, B=32, N=256, O=256, P=256).kernels) == 2
    assert len(module(MLP, B=32, N=64, O=64, P=32).kernels) == 1


def test_maximal_fusion_gives_up_parallelism_and_cached_weights() -> None:
    layers = {"B": 256, "N": 1024, "O": 2048, "P": 1024}
    mirrored = "def f(float(N,D) X) -> (O) { T(n,d) = X(n,d) * 2.0  O(n,d) = T(n, D - 1 - d) }"
    for source, sizes in ((MLP, layers), (mirrored, {"N": 4, "D": 4096})):
        assert len(module(source, CpuOptions(fusion="preserve3"), **sizes).kernels) == 2
        assert len(module(source, CpuOptions(fusion="max"), **sizes).kernels) == 1


def test_other_options_find_the_dependences_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    original = Scop.__dict__["dependences"].func

    def counted(scop: Scop) -> object:
        found.append(scop.function.name)
        return original(scop)

    counting = cached_property(counted)
    counting.__set_name__(Scop, "dependences")
    monkeypatch.setattr(Scop, "dependences", counting)
    source = "def f(float(N,M) x) -> (y, z) { y(i) +=! x(i,j)\n z(i,j) = x(i,j) - y(i) }"
    with knobs.override_knobs(verify=False):  # which looks at each schedule anew
        for rows in (29, 31):
            for fusion in ("max", "min", "preserve3"):
                module(source, CpuOptions(fusion=fusion), N=rows, M=37)
    assert found == ["f", "f"]


def test_dimensions_always_walked_together_become_one() -> None:
    collapsed = collapse(bound(POINTWISE, A=3, B=5, C=7))
    assert [t.shape for t in collapsed.tensors] == [(105,)] * 4
    assert [[i.extent for i in s.indices] for s in collapsed.statements] == [[105], [105]]


def test_small_problems_run_on_one_thread() -> None:
    def parallel(**sizes: int) -> bool:
        loops = [s for k in module(POINTWISE, **sizes).kernels for s in walk_stmts(k.body) if isinstance(s, Loop)]
        return any(loop.kind is LoopKind.PARALLEL for loop in loops)

    assert parallel(A=64, B=64, C=64)
    assert not parallel(A=4, B=4, C=4)


@pytest.mark.parametrize("source", [SOFTMAX, MOMENTS, MLP, POINTWISE, REVERSED])
def test_schedules_are_proved(source: str) -> None:
    scop, plan = schedule_source(source)
    check_legal(scop, plan)


STENCILS = """
def f(float(N) X) -> (O) {
    T(n) = X(n) * 2.0
    U(n) = T(n) + X(n)
    O(n) = U(n) + U(n+1) + T(n)
}"""
TURNED = """
def f(float(N,N) X) -> (O) {
    T(a,b) = X(a,b) * 2.0
    U(a,b) = T(b,a) + 1.0
    O(a,b) = U(a,b) + T(b,a)
}"""


@pytest.mark.parametrize("source", [SOFTMAX, MOMENTS, MLP, POINTWISE, REVERSED, STENCILS, TURNED])
def test_extended_groups_are_those_that_isl_schedules(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def groups() -> list[tuple[list[str], list[dict[str, tuple[str, int]]]]]:
        _, plan = schedule_source(source)
        return [([n.name for n in s.group.nodes], [dict(r.places) for r in s.group.rows]) for s in plan]

    extended = groups()
    monkeypatch.setattr("tensor_comprehensions.polyhedral.schedule.fusion._extend_group", lambda *_: None)
    assert extended == groups()


def schedule_source(source: str) -> tuple[Scop, Any]:
    (function,) = compile_source(source)
    sizes = dict.fromkeys(["N", "D", "K", "A", "B", "C", "O", "P"], 40)
    f = collapse(legalize(bind(function, {k: v for k, v in sizes.items() if f"{k}" in source})))
    scop = Scop(f, scop_nodes(f, CpuOptions(), AVX512))
    return scop, plan_schedule(scop, CpuOptions(), AVX512)


@pytest.mark.parametrize(
    ("source", "independent"),
    [
        ("def f(float(N,K) X) -> (O) { O(k,n) = X(n,k) }", True),
        ("def f(float(N,K) X) -> (O) { O(n) +=! X(n,k) }", True),
        ("def f(float(N) X) -> (O, P) { O(n) = X(n)  P(n) = X(N - 1 - n) }", True),
        ("def f(float(N) X) -> (O) { O(n) = X(n)  O(n) = O(n) + 1 }", False),
        (REVERSED, False),
        (SCATTER, False),
    ],
)
def test_plain_statements_have_no_dependences(source: str, independent: bool) -> None:
    """As isl finds, which is not asked about them."""
    scop, _ = schedule_source(source)
    assert scop._is_independent() == independent
    assert scop.dependences.is_empty() == independent
    assert all(found.is_empty() for _, found in scop.dependences_by_kind()) == independent


def test_a_swapped_order_is_caught() -> None:
    scop, (group,) = schedule_source(SOFTMAX)
    swapped = replace(group, leaves=tuple(reversed(group.leaves)))
    with pytest.raises(InternalError, match="backwards"):
        check_legal(scop, (swapped,))


def test_a_scatter_declared_parallel_is_caught() -> None:
    scop, plan = schedule_source(SCATTER)
    last = plan[-1]
    (node,) = last.group.nodes
    row = BandMember(((node.name, ("n", 0)),), 0, 40)
    parallel = replace(last, group=FusionGroup((node,), (row,)), sizes=(1,), leaves=(LoopNest((node,), ()),))
    with pytest.raises(InternalError, match="parallel"):
        check_legal(scop, (*plan[:-1], parallel))


CONCATENATED = """
def f(float(2,13) x, float(4,14) w) -> (y) {
    a(i,j) = 0.0 where i in 0:2, j in 0:13
    b(i,j) = (i < 2 ? x(i,j) : a(i - 2,j)) where i in 0:4, j in 0:13
    c(i) = 0.0 where i in 0:4
    d(i,j) = (j < 1 ? c(i) : b(i,j - 1)) where i in 0:4, j in 0:14
    e(i,j) +=! d(i, j * 2 + k) * w(i, j * 2 + k) where i in 0:4, j in 0:7, k in 0:2
    y(i,j) = e(i,j) / 2.5
}"""


def test_a_guarded_read_means_the_element_of_its_subscripts() -> None:
    """Taken for any element, the read of `b` would make the rows of `b` and `d` depend on one another."""
    with knobs.override_knobs(verify=True):
        assert len(module(CONCATENATED).kernels) == 2  # the rows of `a` are others


UNLIKE = """
def f(float(N,1024) g, float(N,64) x, float(1024,32) w) -> (a, b, c) {
    t(i,j) = g(i,j) * 2
    a(j,k) +=! t(i,j) * x(i,k)
    b(j) +=! t(i,j)
    c(i,k) +=! t(i,j) * w(j,k)
}"""
TRANSPOSED = """
def f(float(N,N) x) -> (a, b) {
    a(i,j) = x(i,j) + x(j,i)
    b(i,j) = a(j,i) * 2
}"""
SLICED = """
def f(float(N,64) x) -> (a, b) {
    a(i,j) = x(i,j) + 1 where j in 0:32
    b(i,j) = x(i,j + 32) * 2 where j in 0:32
}"""
QUOTIENTS = """
def f(float(N,8,4) x) -> (a, b) {
    a(i,j) = x(i,j / 4,j % 4) where j in 0:32
    b(j,i) = x(i,j / 4,j % 4) + 1 where j in 0:32
}"""


def list_shared_rows(source: str, **sizes: int) -> list[tuple[str, ...]]:
    """The indices of all nodes of `source` in each row that they can share."""
    function = bound(source, **sizes)
    scop = Scop(function, scop_nodes(function, CpuOptions(use_microkernels=False), AVX512))
    return [tuple(row.index_and_shift(n)[0] for n in scop.nodes) for row in find_shared_rows(scop, scop.nodes)]


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        (UNLIKE, []),  # `a` has no row for `c`
        (TRANSPOSED, [("i", "j"), ("j", "i")]),
        (SLICED, []),  # no element is read twice
        (SLICED.replace("j + 32", "j + 1"), [("i", "i"), ("j", "j")]),
        (QUOTIENTS, [("i", "i"), ("j", "j")]),
    ],
)
def test_rows_keep_dependences_and_reads_together(source: str, rows: list[tuple[str, ...]]) -> None:
    assert list_shared_rows(source, N=40) == rows


@pytest.mark.parametrize("source", [SOFTMAX, MOMENTS, REVERSED, MLP, POINTWISE, CONCATENATED, UNLIKE, TRANSPOSED])
def test_shared_rows_are_coincident(source: str) -> None:
    """Every prefix of the nodes is legal in the rows that it can share, by isl's check of all dependences."""
    sizes = {k: 3 + n for n, k in enumerate("ABCDKMNOP")}
    sizes = {k: n for k, n in sizes.items() if f"{k}," in source or f"{k})" in source}
    function, options = bound(source, **sizes), CpuOptions(fusion="max")
    scop = Scop(function, scop_nodes(function, options, AVX512))
    check_legal(scop, plan_schedule(scop, options, AVX512))


def test_serial_scatter_is_not_taken_for_parallel() -> None:
    scop, plan = schedule_source(SCATTER)
    kinds = [d.kind for s in plan for leaf in s.leaves for d in leaf.dims]
    assert DimKind.SERIAL in kinds
    check_legal(scop, plan)


@pytest.mark.parametrize(("name", "source"), [("softmax", SOFTMAX), ("mlp", MLP)])
def test_schedule_text(golden: Golden, name: str, source: str) -> None:
    sizes = {"softmax": {"N": 64, "D": 1000}, "mlp": {"B": 256, "N": 64, "O": 64, "P": 32}}[name]
    schedule = (("T", tile(b=32, o=64) >> tile(b=4)), ("Y", tile(b=4, p=32) >> pack(W2="p1")))
    options = CpuOptions(schedule=schedule)
    golden.check(f"{name}.schedule", explain_cpu(bound(source, **sizes), options, AVX512) + "\n")
