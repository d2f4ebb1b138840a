"""One run of a sparse kernel: pass addresses of arrays, allocate memory between phases, and build the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...compiler.compiled_sparse_kernel import CompiledSparseKernel
from ...core.dtypes import INT32, INT64
from ...core.errors import ArgumentError, InternalError
from ...core.lazy_import import lazy_module
from ...runtime.cpu.huge_pages import advise_huge_pages
from ...sparse.call_plan import AssembledLevels, CallPlan, PlannedOperand, PlannedResult, Version
from ...tc_lang.formats import Format, LevelKind
from ...tc_lang.ir import Role
from ...tc_lang.size_polynomial import Value
from ..arguments import TORCH_TYPES
from .fast_call import ArraySlice, FastCall, KnownCount, KnownResult, list_storage_arrays, trim_array
from .sparse_tensor import Level, SparseTensor
from .structure import Structure, convert_format

if TYPE_CHECKING:
    from . import pack
else:
    pack = lazy_module("dispatch.sparse.pack")

INDEX_TYPES = {torch.int32: INT32, torch.int64: INT64}


@dataclass(frozen=True, slots=True)
class SparseCall:
    """The operands of a call by name, with contiguous arrays.

    Attributes:
        sparse, dense: the operands.
        structures: the structures of sparse operands.
        device: the GPU that they are on; None: the CPU.
        unversioned: the operands whose stored places may change without a trace, as those of SciPy do.
    """

    sparse: Mapping[str, SparseTensor]
    dense: Mapping[str, Tensor]
    structures: Mapping[str, Structure]
    device: torch.device | None = None
    unversioned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StoredCounts:
    """The results of the phases that only count elements, for later calls with the same patterns.

    Attributes:
        totals: the array `totals` after a phase, by (threads, refills, phase).
        rows: the array of row starts of a result, by the number of the result.
        levels: the levels of all sparse results, by name; empty if they are not known.
        parts: the counts of each part of a split def, by the number of the part.
    """

    totals: dict[tuple[int, bool, int], np.ndarray[Any, Any]] = field(default_factory=dict)
    rows: dict[int, Tensor] = field(default_factory=dict)
    levels: dict[str, tuple[Level, ...]] = field(default_factory=dict)
    parts: dict[int, StoredCounts] = field(default_factory=dict)


class ProgramRun:
    """One run of a program: its operands, and memory for temporaries and results."""

    def __init__(self, plan: CallPlan, call: SparseCall, sizes: Mapping[str, int]) -> None:
        self.plan, self.call = plan, call
        problem = plan.problem
        self.function, self.sizes = problem.function, sizes
        self.shared = dict(problem.shared)
        self.sparse = dict(call.sparse)
        self._convert(call.structures)
        self.numbers = [sizes[n] for n in problem.sizes] or [0]
        self.values = {o.name: self._values(o) for o in self.plan.operands}
        self.arrays: dict[int, tuple[Tensor, ...]] = {}  # of sparse results

    def _convert(self, structures: Mapping[str, Structure]) -> None:
        """Add the operands that are conversions of other operands to another format."""
        for c in self.plan.conversions:
            if c.source in structures:
                self.sparse[c.name] = convert_format(self.sparse[c.source], c.format, structures[c.source])

    def _values(self, o: PlannedOperand) -> Tensor:
        if o.name in self.sparse:
            return self.sparse[o.name].values.detach().resolve_neg().contiguous()
        dtype = TORCH_TYPES[self.function.tensor(o.name).dtype]
        if o.role is Role.INPUT and o.name in self.call.dense:
            return self.call.dense[o.name].detach()
        if o.role is Role.INPUT:  # a result that is not computed yet
            return torch.empty(0, dtype=dtype)
        if o.name in self.shared:
            source = self.sparse[self.shared[o.name]].values
            shape = (*source.shape, *self._dense_tail(o.name))
            if o.name in self.plan.unfilled:
                return _empty(shape, dtype, o.name, self.function.name, self.call.device)
            return torch.zeros(shape, dtype=dtype, device=source.device)
        if self.function.tensor(o.name).is_sparse:
            return torch.empty(0, dtype=dtype)
        if o.role is Role.INOUT:
            return self.call.dense[o.name].detach().clone()
        return _empty(self._shape(o.name), dtype, o.name, self.function.name, self.call.device)

    def _shape(self, name: str) -> tuple[int, ...]:
        extents = self.plan.problem.ranges.shape(name)
        return tuple(_evaluate_value(x, self.sizes) for x in extents)

    def _dense_tail(self, name: str) -> tuple[int, ...]:
        """The extents that a tensor has in addition to those of the operand whose pattern it shares."""
        own, source = self.function.tensor(name).format, self.function.tensor(self.shared[name]).format
        assert own is not None
        assert source is not None
        shape = self._shape(name)
        return tuple(shape[d] for d in own.order[len(source.order) :])

    def _stored_result(self, name: str) -> Tensor | SparseTensor:
        """A result that is dense, or shares the pattern of an operand."""
        if name not in self.shared:
            return self.values[name]
        source = self.sparse[self.shared[name]]
        return SparseTensor(source.format, source.shape, source.levels, self.values[name])

    def _result(self, name: str) -> Tensor | SparseTensor:
        if name in self.shared or not self.function.tensor(name).is_sparse:
            return self._stored_result(name)
        return self._sparse_result(name, len(self.function.statements))

    def _sparse_result(self, name: str, stop: int) -> SparseTensor:
        """The content of a sparse result before the statement `stop`."""
        symbol = self.function.tensor(name)
        assert symbol.format is not None
        return self._sort_collected(symbol.format, self._shape(name), self._numbers_of(name, stop))

    def _numbers_of(self, name: str, stop: int) -> list[int]:
        """The numbers of the planned results of statements before `stop` that together are one sparse result."""
        return [n for n, r in enumerate(self.plan.results) if r.tensor == name and r.statement < stop]

    def _allocate_collected(self, r: PlannedResult, count: int) -> tuple[Tensor, ...]:
        """Memory for the coordinates and the values of `count` elements."""
        symbol, device = self.function.tensor(r.tensor), self.call.device
        types = (*(torch.int64 for _ in range(symbol.rank)), TORCH_TYPES[symbol.dtype])
        return tuple(_new_array(count, t, device) for t in types)

    def _add_completed_results(self, phase: int) -> None:
        """Add the sparse results that are complete before a phase to the operands."""
        for version in (v for p, v in self.plan.versions if p == phase):
            t, structure = self._version_content(version)
            is_wide = self.plan.problem.index_type(version.name) == INT64
            index = torch.int64 if is_wide else torch.int32
            levels = tuple(None if x is None else (_cast(x[0], index), x[1].to(index)) for x in t.levels)
            self.sparse[version.name] = SparseTensor(t.format, t.shape, levels, t.values)
            self._convert({version.name: structure})
            made = {version.name, *(c.name for c in self.plan.conversions if c.source == version.name)}
            self.values |= {o.name: self._values(o) for o in self.plan.operands if o.name in made}

    def _version_content(self, version: Version) -> tuple[SparseTensor, Structure]:
        """The content of a sparse tensor before a statement, and its structure."""
        if version.source not in self.shared:
            t = self._sparse_result(version.source, version.statement)
            return t, Structure(len(t.values))
        source = self.shared[version.source]
        t, values = self.sparse[source], self.values[version.source].clone()
        if tail := self._dense_tail(version.source):
            format, shape = self.function.tensor(version.source).format, self._shape(version.source)
            assert format is not None
            t = SparseTensor(format, shape, (*t.levels, *(None for _ in tail)), values)
            return t, Structure(len(values))
        return t.with_values(values), self.call.structures.get(source) or Structure(len(values))

    def _sort_collected(self, format: Format, shape: tuple[int, ...], mine: list[int]) -> SparseTensor:
        """A sparse tensor of collected elements, which may be unsorted.

        All definitions but the first add to the existing elements.
        """
        collected = [self.plan.results[n] for n in mine]
        operator = self.function.statements[collected[0].statement].reduction or "+"
        lists = [(torch.stack(self.arrays[n][:-1]), self.arrays[n][-1]) for n in mine]
        if len(lists) > 1 and operator != "+":
            first = self._sort_collected(format, shape, mine[:1])
            lists[0], operator = (first.coordinates(), first.values.reshape(-1)), "+"
        places, values = torch.cat([x for x, _ in lists], 1), torch.cat([x for _, x in lists])
        types = {t.index_dtype for t in self.call.sparse.values()}
        index = torch.int64 if torch.int64 in types else torch.int32
        is_sorted = len(lists) == 1 and collected[0].is_sorted
        pack_list = pack.from_sorted_coordinates if is_sorted else pack.from_coordinates
        made = pack_list(places, values, shape, format.with_unique_elements, index, operator)
        return SparseTensor(format, shape, made.levels, made.values)


class SparseRun(ProgramRun):
    """One run of a CPU kernel."""

    def __init__(
        self, kernel: CompiledSparseKernel, call: SparseCall, sizes: Mapping[str, int], counts: StoredCounts | None
    ) -> None:
        super().__init__(kernel.plan, call, sizes)
        self.counts, self.kernel = counts, kernel
        self.size_array = np.array(self.numbers, np.int64)
        self.totals = np.zeros(max(1, self.plan.slots), np.int64)
        self.rows: dict[int, Tensor] = {}

    def results(self) -> dict[str, Tensor | SparseTensor]:
        """Run all phases. Returns the results of the def, by name. Raises ArgumentError if memory runs out."""
        for number, executable in enumerate(self.kernel.executables):
            self._add_completed_results(number)
            for n, r in enumerate(self.plan.results):
                if r.levels is not None and r.levels.counts_rows and r.phase == number + 1:
                    self.rows[n] = self._row_starts(r.tensor, r.levels)
                if r.phase == number:
                    self.arrays[n] = self._allocate(n, r)
            key = (self.plan.problem.threads, self.plan.problem.refills, number)
            if self.counts is not None and key in self.counts.totals:
                self.totals[:] = self.counts.totals[key]
                self.rows |= self.counts.rows
                continue
            code, value = executable(self._addresses())
            if code:
                raise _make_launch_error(self.function.name, code, value)
            if self.counts is not None and number in self.plan.counting:
                self.counts.totals[key] = self.totals.copy()
                self.counts.rows.update(self.rows)
        return {name: self._result(name) for name in self.function.returns}

    def make_fast_call(self, values: Sequence[object], results: Mapping[str, Tensor | SparseTensor]) -> FastCall | None:
        """The fast path for calls like this one, with `values` and `results`; None if it cannot have one."""
        names = [p.name for p in self.function.parameters]
        returns = self.function.returns
        if [o.name for o in self.plan.operands] != [*names, *returns]:  # there are temporaries
            return None
        operands = [
            (v, self.sparse[n] if n in self.sparse else self.call.dense[n]) for n, v in zip(names, values, strict=True)
        ]
        places: dict[str, list[ArraySlice]] = {}  # the arrays of each tensor, by name
        count = 2  # after `sizes` and `totals`
        for n, (_, x) in zip(names, operands, strict=True):
            own = len(list_storage_arrays(x)) if isinstance(x, SparseTensor) else 1
            places[n] = [ArraySlice(k) for k in range(count, count + own)]
            count += own
        made: list[Tensor] = []
        for name in returns:
            x = results[name]
            places[name] = [ArraySlice(count + len(made))]
            array = x.values if isinstance(x, SparseTensor) else x
            has_own_levels = isinstance(x, SparseTensor) and name not in self.shared
            made.append(array[:0] if has_own_levels else array)
        for number, r in enumerate(self.plan.results):
            x = results[r.tensor]
            assert isinstance(x, SparseTensor)
            assert r.levels is not None
            exact = list_storage_arrays(x)
            arrays = self._level_arrays(number, r, r.levels, x.values.dtype) if r.levels.bound else exact
            lengths = [None if len(y) == len(z) else len(z) for y, z in zip(arrays, exact, strict=True)]
            places[r.tensor] = [ArraySlice(count + len(made) + k, n) for k, n in enumerate(lengths)]
            made += arrays
        known = [self._describe_result(results[name], name, places) for name in returns]
        sizes, totals = torch.from_numpy(self.size_array), torch.from_numpy(self.totals)
        counts = [c for r in self.plan.results for c in _list_counts(r, results[r.tensor])]
        return FastCall(self.kernel.executables, sizes, totals, operands, made, known, counts)

    def _describe_result(
        self, x: Tensor | SparseTensor, name: str, places: Mapping[str, Sequence[ArraySlice]]
    ) -> KnownResult:
        """How to build a result from the arrays in `places`."""
        *_, values = places[name]
        if not isinstance(x, SparseTensor):
            return KnownResult(None, (), (), values)
        held = iter(places[self.shared.get(name, name)])
        levels = tuple(
            None if level is None else (None if level[0] is None else next(held), next(held)) for level in x.levels
        )
        return KnownResult(x.format, x.shape, levels, values)

    def _allocate(self, number: int, r: PlannedResult) -> tuple[Tensor, ...]:
        """Allocate a sparse result, of its counted size or of an upper bound, the total size of its operands."""
        dtype = TORCH_TYPES[self.function.tensor(r.tensor).dtype]
        if r.levels is None:
            return self._allocate_collected(r, int(self.totals[r.first]))
        if r.levels.is_known:
            arrays = [
                x
                for level in self._levels_of_earlier_run(r.tensor)
                if level is not None
                for x in level
                if x is not None
            ]
            return (*arrays, _new_array(len(arrays[-1]), dtype))
        return self._level_arrays(number, r, r.levels, dtype)

    def _levels_of_earlier_run(self, name: str) -> tuple[Level, ...]:
        """The levels of a result in an earlier run."""
        assert self.counts is not None
        return self.counts.levels[name]

    def _row_starts(self, name: str, x: AssembledLevels) -> Tensor:
        """Memory for the row starts (pos) of a result."""
        rows = x.format.extents(self._shape(name))[0]
        return torch.empty(rows + 1, dtype=_index_dtype(x))

    def _level_arrays(
        self, number: int, r: PlannedResult, x: AssembledLevels, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        most = sum(self.sparse[name].values.numel() for name in x.bound)
        extents, parents = x.format.extents(self._shape(r.tensor)), 1
        index = _index_dtype(x)
        arrays: list[Tensor] = []
        for n, level in enumerate(x.format.levels[: x.format.depth]):
            if level.is_dense:
                parents *= extents[n]
                continue
            compressed = level.kind is LevelKind.COMPRESSED
            entries = (most if x.bound else int(self.totals[r.first + n])) if compressed else parents
            if compressed:
                arrays.append(self.rows[number] if x.counts_rows else torch.empty(parents + 1, dtype=index))
            arrays.append(_new_array(entries, index))
            parents = entries
        tail = x.format.tail(self._shape(r.tensor))
        count = parents * prod(tail)
        return (*arrays, torch.zeros(count, dtype=dtype) if tail else _new_array(count, dtype))

    def _addresses(self) -> list[int]:
        found = [self.size_array.ctypes.data, self.totals.ctypes.data]
        for o in self.plan.operands:
            if o.has_levels and o.name not in self.sparse:
                found += [0] * o.num_level_arrays
            elif o.has_levels:
                for level in self.sparse[o.name].levels:
                    if level is not None:
                        found += [x.data_ptr() for x in level if x is not None]
            found.append(self.values[o.name].data_ptr())
        for n, r in enumerate(self.plan.results):
            arrays = self.arrays.get(n)
            if arrays is None and n in self.rows:  # the array of the rows comes first
                found += [self.rows[n].data_ptr(), *[0] * (r.num_arrays - 1)]
            else:
                found += [0] * r.num_arrays if arrays is None else [x.data_ptr() for x in arrays]
        return found

    def _sparse_result(self, name: str, stop: int) -> SparseTensor:
        number, *others = self._numbers_of(name, stop)
        r = self.plan.results[number]
        if r.levels is not None and not others:
            return self._make_assembled(number, r, r.levels)
        return ProgramRun._sparse_result(self, name, stop)

    def _make_assembled(self, number: int, r: PlannedResult, x: AssembledLevels) -> SparseTensor:
        """A sparse tensor whose levels the kernel has written, without excess memory."""
        shape = self._shape(r.tensor)
        if x.is_known:
            return SparseTensor(x.format, shape, self._levels_of_earlier_run(r.tensor), self.arrays[number][-1])
        arrays = list(self.arrays[number])
        extents, parents = x.format.extents(shape), 1
        levels: list[tuple[Tensor | None, Tensor] | None] = []
        for n, level in enumerate(x.format.levels):
            if level.is_dense:
                parents *= extents[n] if n < x.format.depth else 1
                levels.append(None)
                continue
            compressed = level.kind is LevelKind.COMPRESSED
            pos = arrays.pop(0)[: parents + 1] if compressed else None
            parents = int(self.totals[r.first + n]) if compressed else parents
            levels.append((pos, trim_array(arrays.pop(0), parents)))
        tail = x.format.tail(shape)
        return SparseTensor(
            x.format, shape, levels, trim_array(arrays[0], parents * prod(tail)).reshape(parents, *tail)
        )


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)


def _index_dtype(x: AssembledLevels) -> torch.dtype:
    return torch.int64 if x.index == INT64 else torch.int32


def _list_counts(r: PlannedResult, x: Tensor | SparseTensor) -> Iterator[KnownCount]:
    """The counts of a result with the lengths of `x`; a counted result has them before the phase that stores it."""
    assert isinstance(x, SparseTensor)
    assert r.levels is not None
    for n, (level, arrays) in enumerate(zip(r.levels.format.levels, x.levels, strict=True)):
        if arrays is not None and level.kind is LevelKind.COMPRESSED:
            yield KnownCount(r.first + n, len(arrays[1]), r.phase if r.levels.bound else r.phase - 1)


def _new_array(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Uninitialized memory for a kernel to write, in huge pages on the CPU."""
    x = torch.empty(shape, dtype=dtype, device=device or "cpu")
    if device is None:
        advise_huge_pages(x.data_ptr(), x.nbytes)
    return x


def _empty(shape: tuple[int, ...], dtype: torch.dtype, name: str, op: str, device: torch.device | None) -> Tensor:
    try:
        return _new_array(shape, dtype, device)
    except RuntimeError as error:
        raise ArgumentError(
            f"there is no memory for '{name}' of {op}",
            found=f"a dense tensor of the shape {shape}", suggestion=f"return it in a sparse format: {name}: csr",
        ) from error  # fmt: skip


def _evaluate_value(x: Value, sizes: Mapping[str, int]) -> int:
    return x if isinstance(x, int) else max(0, x.evaluate(sizes))


def _make_launch_error(op: str, code: int, value: int) -> Exception:
    if code == -1:
        return ArgumentError(f"there is no memory for {op}: {value} bytes")
    return InternalError(f"{op}: a launch failed with code {code}")
