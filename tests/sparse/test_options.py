"""`SparseOptions`: every option changes loops and no result; they are checked, kept, stored and searched."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.autotuner import sparse_search
from tensor_comprehensions.autotuner.sparse_search import _single_option_changes
from tensor_comprehensions.cache import options_proto
from tensor_comprehensions.cache.measurement_store import all_measurements
from tensor_comprehensions.cache.store import Store, current_store
from tensor_comprehensions.core import knobs
from tensor_comprehensions.dispatch.sparse import sparse_cache
from tensor_comprehensions.runtime.cpu.host import host

SPGEMM = "def f(double(N,K) A: csr, double(K,M) B: csr) -> (C: csr) { C(i,j) +=! A(i,k) * B(k,j) }"
PROGRAMS = {
    "product": (SPGEMM, "csr csr"),
    "sum": ("def f(double(N,M) A: csr, double(N,M) B: csr) -> (C: csr) { C(i,j) = A(i,j) + B(i,j) }", "csr csr"),
    "dense columns": ("def f(double(N,K) A: csr, double(K,M) B) -> (C) { C(i,j) +=! A(i,k) * B(k,j) }", "csr dense"),
}


def operands(formats: str) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    made: list[Any] = []
    for format in formats.split():
        x = torch.rand(16, 16, dtype=torch.float64, generator=generator)
        x[torch.rand(16, 16, generator=generator) > 0.3] = 0
        made.append(x if format == "dense" else tc.as_sparse(x, format))
    return made


def dense(x: Any) -> torch.Tensor:
    return x.check().to_dense() if isinstance(x, tc.SparseTensor) else x


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_option_changes_a_result(name: str) -> None:
    text, formats = PROGRAMS[name]
    op, given, loops = tc.define(text).f, operands(formats), set()
    for field, value in dict(reversed([*_single_option_changes(tc.SparseOptions(), op.function)])).items():
        kernel = op.compile(*given, options=replace(tc.SparseOptions(), **{field: value}))
        torch.testing.assert_close(dense(kernel(*given)), dense(op(*given)))
        loops.add(kernel.source("loops"))
    assert len(loops) > 2


def test_an_order_of_loops_is_followed() -> None:
    given = operands("csr csr")
    op = tc.define(SPGEMM, options=tc.SparseOptions(order=("k", "i"))).f
    assert "loops k, i, j" in op.compile(*given).source("schedule")
    torch.testing.assert_close(dense(op(*given)), dense(tc.define(SPGEMM).f(*given)))
    copy = pickle.loads(pickle.dumps(op))
    assert "loops k, i, j" in copy.compile(*given).source("schedule")


def test_conversions_are_ruled_out() -> None:
    text = "def f(double(N,M) A, double(N,M) B) -> (double(N,M) C: csr) { C(i,j) = A(i,j) * B(i,j) }"
    op, (a, b) = tc.define(text).f, operands("csr csc")
    assert "converted" in op.compile(a, b).source("schedule")
    with pytest.raises(tc.ArgumentError, match="would have to be converted, which the options rule out"):
        op.compile(a, b, options=tc.SparseOptions(convert=False))
    op.compile(a, a, options=tc.SparseOptions(convert=False))


@pytest.mark.parametrize("clause", ["", "where exists A(i,j)"])
def test_a_maximum_in_another_order_than_stored_is_right_or_refused(clause: str) -> None:
    """Dense temporaries of maxima are -inf where the operand has no element, not 0: they gave -inf sums."""
    text = f"t(i,j) max=! A(i,j) * X(j,k) where exists A(i,j) y(i) +=! t(i,j) {clause}"
    op = tc.define(f"def f(double(N,M) A: csr, double(M,K) X) -> (y) {{ {text} }}").f
    a, x = torch.rand(7, 9).double() * (torch.rand(7, 9) < 0.4), torch.rand(9, 3).double()
    given, wanted = (tc.as_sparse(a, "csr"), x), (a[:, :, None] * x).amax(2).sum(1)
    torch.testing.assert_close(op(*given), wanted)
    options = tc.SparseOptions(order=("j", "i", "k"))
    if clause:
        torch.testing.assert_close(op.compile(*given, options=options)(*given), wanted)
    else:
        with pytest.raises(tc.ArgumentError, match="where exists A"):
            op.compile(*given, options=options)


def test_options_are_part_of_the_key_and_of_what_is_stored() -> None:
    op, given = tc.define(SPGEMM).f, operands("csr csr")
    problem = op.compile(*given).compiled.program.problem
    other = replace(problem, options=tc.SparseOptions(prefetch_distance=0))
    first, second = (sparse_cache._make_key(p, host()) for p in (problem, other))
    assert first is not None
    assert second is not None
    assert first.difference(second) == ("kernel",)
    options = tc.SparseOptions(order=("k", "i", "j"), gather="never", chunk_positions=0)
    assert options_proto.from_message(options_proto.to_message(options)) == options
    with pytest.raises(FrozenInstanceError):
        options.convert = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"order": "ij"}, r"such as \('i',\)"),
        ({"order": ("i", "i")}, "each index once"),
        ({"gather": "alway"}, "the option gather is 'alway'(.|\n)*did you mean 'always'"),
        ({"max_vectors": 0}, "at least 1"),
        ({"chunk_positions": -1}, "chunk_positions is -1"),
    ],
)
def test_mistakes(values: dict[str, Any], words: str) -> None:
    with pytest.raises(tc.ArgumentError, match=words):
        tc.SparseOptions(**values)


def test_options_of_another_kind() -> None:
    op, given = tc.define(SPGEMM).f, operands("csr csr")
    with pytest.raises(tc.ArgumentError, match="options is a CpuOptions, and an operand is sparse"):
        op.compile(*given, options=tc.CpuOptions())


def test_sparse_options_are_not_for_dense_kernels() -> None:
    op = tc.define("def f(double(N) x) -> (y) { y(i) = x(i) }").f
    with pytest.raises(tc.ArgumentError, match="SparseOptions"):
        op.compile(torch.ones(3, dtype=torch.float64), options=tc.SparseOptions())


def test_a_search_keeps_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Races are decided by hand: nothing here depends on times."""
    wanted = {"prefetch_distance": 0, "gather": "never"}

    def race(_: Any, best: Any, candidate: Any, past_end: bool = False) -> Any:
        count = [sum(getattr(o, f) == v for f, v in wanted.items()) for o in (best, candidate)]
        times = sparse_search.Times((1.0, 1.0))
        return sparse_search._Race(1.5 if count[1] > count[0] else 0.5, times, times)

    monkeypatch.setattr(sparse_search._SparseCoordinateSearch, "_race", race)
    monkeypatch.setattr(sparse_search, "_list_loop_orders", lambda _: [()])
    op, given = tc.define(PROGRAMS["dense columns"][0]).f, operands("csr dense")
    expected = dense(op(*given))
    found = op.autotune(*given, budget=100.0).options
    assert found == replace(tc.SparseOptions(), **wanted)
    assert op.compile(*given).compiled.program.problem.options == found
    torch.testing.assert_close(dense(op(*given)), expected)


def test_a_search_by_times_gives_options() -> None:
    op, given = tc.define(PROGRAMS["dense columns"][0]).f, operands("csr dense")
    found = op.autotune(*given, budget=0.5)
    assert isinstance(found.options, tc.SparseOptions)
    assert found.seconds > 0
    assert found.default == tc.SparseOptions()
    assert {o.kind for o in found.outcomes} <= {"ok", "invalid"}
    with pytest.raises(tc.ArgumentError, match="no devices, executor or report"):
        op.autotune(*given, devices=("cpu:0",))
    with pytest.raises(tc.ArgumentError, match=r"expected: SparseOptions\(...\)"):
        op.autotune(*given, options=tc.CpuOptions())
    with pytest.raises(tc.ArgumentError, match="no schedule applies to"):
        op.autotune(*given, search="schedules")


def test_what_a_search_found_is_kept_for_operators_that_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As dense options are: for these sizes and amounts, or else for the nearest."""
    text = PROGRAMS["dense columns"][0]
    given = operands("csr dense")

    def race(_: Any, best: Any, candidate: Any, past_end: bool = False) -> Any:
        gain = 1.5 if candidate.prefetch_distance == 32 != best.prefetch_distance else 0.5
        times = (sparse_search.Times((2e-6 - 1e-7 * x.prefetch_distance,) * 2) for x in (best, candidate))
        return sparse_search._Race(gain, *times)

    monkeypatch.setattr(sparse_search._SparseCoordinateSearch, "_race", race)
    monkeypatch.setattr(sparse_search, "_list_loop_orders", lambda _: [()])
    with knobs.override_knobs(cache="readwrite", cache_dir=str(tmp_path / "cache")):
        found = tc.define(text).f.autotune(*given, budget=100.0).options
        assert found == tc.SparseOptions(prefetch_distance=32)
        (key, measurements), *others = all_measurements(current_store()).items()
        assert not others
        assert key["kind"] == "sparse tuning"
        assert [m.options for m in measurements] == [found, tc.SparseOptions()]
        again = tc.define(text, options="tuned").f
        assert again.compile(*given).compiled.program.problem.options == found
        torch.testing.assert_close(again(*given), given[0].to_dense() @ given[1])
        smaller = tc.as_sparse(given[0].to_dense()[:9], "csr"), given[1]
        nearest = tc.define(text, options="tuned").f
        assert nearest.compile(*smaller).compiled.program.problem.options == found
        untuned = tc.define(text).f
        assert untuned.compile(*given).compiled.program.problem.options == tc.SparseOptions()
        columns = tc.define(text.replace(": csr", ""), options="tuned").f  # other formats know nothing
        assert columns.compile(given[0].to("csc"), given[1]).compiled.program.problem.options == tc.SparseOptions()
    own = tmp_path / "own"
    tc.define(text).f.autotune(*given, budget=100.0, store=own)
    assert all_measurements(Store(own))


@pytest.mark.parametrize(
    ("dtype", "close", "far"),
    [
        (torch.float64, 4e-15, 1e-9),
        (torch.float32, 1e-6, 1e-3),
        (torch.float16, 1e-2, 0.5),
        (torch.int32, 0, 1),
        (torch.bool, 0, 1),
    ],
)
def test_results_of_candidates_agree_but_for_rounding_of_their_type(
    dtype: torch.dtype, close: float, far: float
) -> None:
    right = torch.ones(4).to(dtype)
    assert sparse_search._results_agree(right + close if close else right, right, 4)
    wrong = ~right if dtype is torch.bool else right + torch.tensor(far, dtype=dtype)
    assert not sparse_search._results_agree(wrong, right, 4)
    if dtype.is_floating_point:
        nothing = torch.full_like(right, torch.nan)
        assert not sparse_search._results_agree(nothing, right, 4)
        assert sparse_search._results_agree(nothing, nothing, 4)
