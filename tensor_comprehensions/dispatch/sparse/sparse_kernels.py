"""The kernels of a sparse def, and the way of a call: operands to parts, parts to addresses, results to tensors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...compiler.sparse_passes import CompiledSparseKernel
from ...core.dtypes import INT32, INT64
from ...core.errors import ArgumentError, CannotLower, InternalError
from ...core.memory_layout import contiguous_strides
from ...core.single_flight import SingleFlightCache
from ...runtime.cpu.host import host
from ...sparse.lower import Result, gains_from_counting
from ...sparse.share import shared_patterns, with_shared_formats
from ...sparse.sparse_problem import Assembled, Collected, SparseOperand, SparseProblem, fixed_sizes
from ...tc_lang.formats import Format, LevelKind
from ...tc_lang.ir import Function, Role
from ...tc_lang.match_arguments import TensorType, match_arguments
from ...tc_lang.size_polynomial import Value
from ...tc_lang.sparse_rules import with_formats
from ..arguments import TORCH_TYPES, ParameterSpec, to_tensor
from ..call_steps import CallSignature, check_names
from . import pack
from .fast_call import FastCall
from .interop import from_scipy, from_torch, is_scipy
from .sparse_cache import load_or_compile_sparse
from .sparse_kernel import evaluate, without_gradients
from .sparse_tensor import SparseTensor
from .structure import Structure, check_structure, convert_format, structure_of

LIMIT = 64
"""How many kernels of one def are kept."""
COUNTING_THREADS = 3
"""Threads from which on the elements of sums are counted first: that takes half as long as writing them."""
_INDEX_TYPES = {torch.int32: INT32, torch.int64: INT64}


@dataclass(frozen=True, slots=True)
class SparseCall:
    """The operands of a call: by name, as tensors whose parts are contiguous. structures: of the sparse ones."""

    sparse: Mapping[str, SparseTensor]
    dense: Mapping[str, Tensor]
    structures: Mapping[str, Structure]


@dataclass(frozen=True, slots=True)
class StoredCounts:
    """What the phases that only count the elements of results have found.

    totals: by kind of program and phase, what `totals` holds after it. rows: by result, the first element of each row.
    """

    totals: dict[tuple[bool, int], np.ndarray[Any, Any]]
    rows: dict[int, Tensor]


def is_sparse(value: object) -> bool:
    """Whether an argument is a sparse tensor of any kind."""
    if isinstance(value, Tensor):
        return value.layout is not torch.strided
    return isinstance(value, SparseTensor) or is_scipy(value)


class SparseKernels:
    """The kernels of one def for sparse operands. They depend neither on sizes nor on what is stored."""

    def __init__(self, interface: CallSignature, formats: Mapping[str, Format] | None = None) -> None:
        self.interface = interface
        self.function = with_formats(interface.function, formats or {})
        self._functions: SingleFlightCache[Hashable, Function] = SingleFlightCache(LIMIT)
        self._kernels: SingleFlightCache[Hashable, CompiledSparseKernel] = SingleFlightCache(LIMIT)

    def run(self, call: SparseCall, counts: StoredCounts | None = None) -> dict[str, Tensor | SparseTensor]:
        """What the def returns, by name.

        Args:
            counts: of a call with the same patterns; what it lacks is counted and added to it.

        Raises:
            ArgumentError: the sizes of the operands do not fit the def.
        """
        return _Run(*self._kernel_for(call), counts).results()

    def compile(self, values: Sequence[object], initial: Mapping[str, object]) -> CompiledSparseKernel:
        """The kernel for a call like this. Raises ArgumentError as `accept` does."""
        kernel, _, _ = self._kernel_for(self.accept(values, initial))
        return kernel

    def reference(self, values: Sequence[object], initial: Mapping[str, object]) -> Any:
        """What the reference evaluator gives for a call. Raises ArgumentError as `accept` does."""
        call = self.accept(without_gradients(values), initial)
        return hand_back(evaluate(self.function_for(call), call, self.sizes(call)), values)

    def lane(self, call: SparseCall, values: Sequence[object]) -> FastCall | None:
        """The short way for calls like this one, which has succeeded; None where there is none."""
        if self.interface.initial or self.function.scalars or not all(map(_may_take_lane, values)):
            return None
        if any(self.function.tensor(name).is_sparse for name in self.function.returns):
            return None
        kernel, _, sizes = self._kernel_for(call)
        program = kernel.program
        held = any(s.copies is not None for s in call.structures.values())
        if len(program.phases) > 1 or program.results or program.conversions or program.problem.shared or held:
            return None
        if not all(x.values.is_contiguous() for x in call.sparse.values()):
            return None
        return _Run(kernel, call, sizes, None).lane(values)

    # --- operands ------------------------------------------------------------------------------------------------

    def accept(self, values: Sequence[object], initial: Mapping[str, object]) -> SparseCall:
        """The operands of a call. Raises ArgumentError where one does not fit the def, or is malformed."""
        check_names(self.interface, values, initial)
        sparse: dict[str, SparseTensor] = {}
        dense: dict[str, Tensor] = {}
        structures: dict[str, Structure] = {}
        named = [*zip(self.interface.parameters, values, strict=True)]
        named += [(p, initial[p.name]) for p in self.interface.initial]
        for p, value in named:
            declared = self.function.tensor(p.name).format
            if is_sparse(value) and self.function.tensor(p.name).role is Role.INOUT:
                raise p.error("is in/out, and sparse", found="a sparse tensor", suggestion="pass a dense initial value")
            if is_sparse(value):
                sparse[p.name], structures[p.name] = self._sparse(p, value, declared)
            elif declared is not None and not declared.is_dense:
                raise p.error(
                    "is dense", found="a dense tensor", suggestion=f'pass tc.as_sparse({p.name}, "{declared}")'
                )
            else:
                dense[p.name] = _dense(p, value)
        return SparseCall(sparse, dense, structures)

    def _sparse(self, p: ParameterSpec, value: Any, declared: Format | None) -> tuple[SparseTensor, Structure]:
        name = p.name
        try:
            t = _as_stored(value)
            structure = check_structure(t) if is_scipy(value) else structure_of(t)
        except ArgumentError as error:
            raise ArgumentError(
                f"argument '{name}' of {self.function.name}: {error.message}",
                expected=error.expected, found=error.found, suggestion=error.suggestion,
            ) from None  # fmt: skip
        symbol = self.function.tensor(name)
        if t.ndim != symbol.rank:
            raise ArgumentError(
                f"argument '{name}' of {self.function.name} has {t.ndim} dimensions instead of {symbol.rank}",
                found=f"a shape of {t.shape}",
            )
        if t.dtype is not TORCH_TYPES[symbol.dtype]:
            raise ArgumentError(
                f"argument '{name}' of {self.function.name} has another element type",
                expected=str(symbol.dtype), found=str(t.dtype).removeprefix("torch."),
            )  # fmt: skip
        if declared is not None and t.format != declared:
            raise ArgumentError(
                f"argument '{name}' of {self.function.name} has another format",
                expected=str(declared), found=str(t.format), suggestion=f'pass {name}.to("{declared}")',
            )  # fmt: skip
        plain = to_tensor(replace(p, dims=("",) * t.values.ndim), t.values.detach())
        if any(x.device.type != "cpu" for level in t.levels if level is not None for x in level if x is not None):
            raise p.error("has levels on another device than its values", suggestion="pass parts on the CPU")
        levels = t.levels if structure.copies is None else structure.copies
        values = t.values if t.values.requires_grad and torch.is_grad_enabled() else plain
        return SparseTensor(t.format, t.shape, levels, values), structure

    def function_for(self, call: SparseCall) -> Function:
        """The def with the formats that the operands come with."""
        formats = {n: t.format for n, t in call.sparse.items()}
        return self._functions.get(tuple(formats.items()), lambda: with_formats(self.function, formats))

    def sizes(self, call: SparseCall) -> dict[str, int]:
        """The sizes that the shapes of the operands give, and the integer scalars. Raises ArgumentError."""
        types = [self._type(p.name, call) for p in self.interface.parameters]
        initial = {p.name: self._type(p.name, call) for p in self.interface.initial}
        scalars = {n: int(call.dense[n].item()) for n in self.function.scalars}
        binding = match_arguments(self.function, types, initial, scalars)
        return {**binding.sizes, **binding.scalars}

    def _type(self, name: str, call: SparseCall) -> TensorType:
        held = call.sparse.get(name)
        shape = tuple(call.dense[name].shape) if held is None else held.shape
        return TensorType(self.function.tensor(name).dtype, shape, contiguous_strides(shape))

    # --- kernels -------------------------------------------------------------------------------------------------

    def _kernel_for(self, call: SparseCall) -> tuple[CompiledSparseKernel, SparseCall, dict[str, int]]:
        """The kernel for a call, with the call and the sizes that its operands give."""
        sizes = self.sizes(call)
        return self._kernel(self.function_for(call), call, sizes), call, sizes

    def _kernel(self, function: Function, call: SparseCall, sizes: Mapping[str, int]) -> CompiledSparseKernel:
        types = tuple((n, _INDEX_TYPES[t.index_dtype]) for n, t in call.sparse.items())
        fixed = fixed_sizes(function, {n: v for n, v in sizes.items() if n not in function.scalars})
        formats = tuple((t.name, t.format) for t in function.tensors)

        def make(parallel: bool) -> CompiledSparseKernel:
            shared = shared_patterns(function)
            problem = SparseProblem(
                with_shared_formats(function, shared), types, fixed, tuple(shared.items()), parallel
            )
            try:
                if parallel and not gains_from_counting(problem):
                    return kernel(False)
                return load_or_compile_sparse(problem, host())
            except CannotLower as refusal:
                raise ArgumentError(f"{function.name} cannot be lowered for these formats: {refusal}") from refusal

        def kernel(parallel: bool) -> CompiledSparseKernel:
            return self._kernels.get((formats, types, fixed, parallel), lambda: make(parallel))

        return kernel(torch.get_num_threads() >= COUNTING_THREADS)


class _Run:
    """One run of a kernel."""

    def __init__(
        self, kernel: CompiledSparseKernel, call: SparseCall, sizes: Mapping[str, int], counts: StoredCounts | None
    ) -> None:
        self.counts = counts
        self.program, self.kernel, self.call = kernel.program, kernel, call
        problem = kernel.program.problem
        self.function, self.sizes = problem.function, sizes
        self.shared = dict(problem.shared)
        self.sparse = dict(call.sparse)
        self._convert(call.structures)
        numbers = [sizes[n] for n in problem.sizes] or [0]
        self.size_array = np.array(numbers, np.int64)
        self.totals = np.zeros(max(1, self.program.slots), np.int64)
        self.values = {o.name: self._values(o) for o in self.program.operands}
        self.arrays: dict[int, tuple[Tensor, ...]] = {}
        self.rows: dict[int, Tensor] = {}

    def _convert(self, structures: Mapping[str, Structure]) -> None:
        """Make the operands that are others in another format."""
        for c in self.program.conversions:
            if c.source in structures:
                self.sparse[c.name] = convert_format(self.sparse[c.source], c.format, structures[c.source])

    def _complete(self, phase: int) -> None:
        """Make operands of the sparse results that are complete before a phase."""
        for version in (v for p, v in self.program.versions if p == phase):
            t = self._sparse_result(version.source, version.statement)
            index = TORCH_INDEX[self.program.problem.index_type(version.name)]
            levels = tuple(None if x is None else (_cast(x[0], index), x[1].to(index)) for x in t.levels)
            self.sparse[version.name] = SparseTensor(t.format, t.shape, levels, t.values)
            self._convert({version.name: Structure(len(t.values))})
            made = {version.name, *(c.name for c in self.program.conversions if c.source == version.name)}
            self.values |= {o.name: self._values(o) for o in self.program.operands if o.name in made}

    def results(self) -> dict[str, Tensor | SparseTensor]:
        """Run all phases; what the def returns, by name."""
        for number, executable in enumerate(self.kernel.executables):
            self._complete(number)
            for n, r in enumerate(self.program.results):
                if isinstance(r.arrays, Assembled) and r.arrays.counts_rows and r.phase == number + 1:
                    self.rows[n] = self._row_starts(r.arrays)
                if r.phase == number:
                    self.arrays[n] = self._allocate(n, r)
            key = (self.program.problem.parallel, number)
            if self.counts is not None and key in self.counts.totals:
                self.totals[:] = self.counts.totals[key]
                self.rows |= self.counts.rows
                continue
            code, value = executable(self._addresses())
            if code:
                raise _failure(self.function.name, code, value)
            if self.counts is not None and self._only_counts(number):
                self.counts.totals[key] = self.totals.copy()
                self.counts.rows.update(self.rows)
        return {name: self._result(name) for name in self.function.returns}

    def lane(self, values: Sequence[object]) -> FastCall | None:
        """The short way for calls with operands like these."""
        places: dict[str, int] = {}
        count = 2
        for o in self.program.operands:
            count += len(o.buffers)
            places[o.name] = count - 1
        names = [p.name for p in self.function.parameters]
        if any(t.role is Role.TEMPORARY for t in self.function.tensors):
            return None
        operands = [
            (v, self.sparse[n] if n in self.sparse else self.call.dense[n], places[n])
            for n, v in zip(names, values, strict=True)
        ]
        results = [(self.values[r].shape, self.values[r].dtype, places[r]) for r in self.function.returns]
        lane = FastCall(self.kernel.executables[0], self._addresses(), operands, results)
        lane.held = (self.size_array, self.totals)
        return lane

    def _only_counts(self, phase: int) -> bool:
        return all(k.name.endswith(".count") for k in self.program.phases[phase].kernels)

    def _values(self, o: SparseOperand) -> Tensor:
        if o.name in self.sparse:
            return self.sparse[o.name].values.detach().resolve_neg().contiguous()
        dtype = TORCH_TYPES[self.function.tensor(o.name).dtype]
        if o.role is Role.INPUT and o.name in self.call.dense:
            return self.call.dense[o.name].detach()
        if o.role is Role.INPUT:  # what a result will hold
            return torch.empty(0, dtype=dtype)
        if o.name in self.shared:
            return torch.zeros_like(self.sparse[self.shared[o.name]].values, dtype=dtype)
        if self.function.tensor(o.name).is_sparse:
            return torch.empty(0, dtype=dtype)
        if o.role is Role.INOUT:
            return self.call.dense[o.name].detach().clone()
        return _empty(self._shape(o.name), dtype, o.name, self.function.name)

    def _shape(self, name: str) -> tuple[int, ...]:
        extents = self.program.problem.ranges.shape(name)
        return tuple(_number(x, self.sizes) for x in extents)

    def _allocate(self, number: int, r: Result) -> tuple[Tensor, ...]:
        """Memory for a sparse result, as large as it is counted to be, or as its operands together."""
        dtype = TORCH_TYPES[self.function.tensor(r.arrays.tensor).dtype]
        if isinstance(r.arrays, Collected):
            count = int(self.totals[r.first])
            coordinates = [torch.empty(count, dtype=torch.int64) for _ in r.arrays.coordinates]
            return (*coordinates, torch.empty(count, dtype=dtype))
        return self._level_arrays(number, r, r.arrays, dtype)

    def _row_starts(self, x: Assembled) -> Tensor:
        """Memory for where each row of a result begins, and where the last one ends."""
        rows = x.format.extents(self._shape(x.tensor))[0]
        return torch.empty(rows + 1, dtype=_index_dtype(x))

    def _level_arrays(self, number: int, r: Result, x: Assembled, dtype: torch.dtype) -> tuple[Tensor, ...]:
        most = sum(self.sparse[name].values.numel() for name in x.bound)
        extents, parents = x.format.extents(self._shape(x.tensor)), 1
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
            arrays.append(torch.empty(entries, dtype=index))
            parents = entries
        tail = x.format.tail(self._shape(x.tensor))
        make = torch.zeros if tail else torch.empty
        return (*arrays, make(parents * prod(tail), dtype=dtype))

    def _addresses(self) -> list[int]:
        found = [self.size_array.ctypes.data, self.totals.ctypes.data]
        for o in self.program.operands:
            if o.crd and o.name not in self.sparse:
                found += [0] * (len(o.buffers) - 1)
            elif o.crd:
                for level in self.sparse[o.name].levels:
                    if level is not None:
                        found += [x.data_ptr() for x in level if x is not None]
            found.append(self.values[o.name].data_ptr())
        for n, r in enumerate(self.program.results):
            arrays = self.arrays.get(n)
            if arrays is None and n in self.rows:  # the array of the rows comes first
                found += [self.rows[n].data_ptr(), *[0] * (len(r.arrays.buffers) - 1)]
            else:
                found += [0] * len(r.arrays.buffers) if arrays is None else [x.data_ptr() for x in arrays]
        return found

    def _result(self, name: str) -> Tensor | SparseTensor:
        symbol = self.function.tensor(name)
        if name in self.shared:
            source = self.sparse[self.shared[name]]
            return SparseTensor(source.format, source.shape, source.levels, self.values[name])
        if not symbol.is_sparse:
            return self.values[name]
        return self._sparse_result(name, len(self.function.statements))

    def _sparse_result(self, name: str, stop: int) -> SparseTensor:
        """What a sparse result holds before the statement `stop`."""
        symbol = self.function.tensor(name)
        assert symbol.format is not None
        every = [(n, r) for n, r in enumerate(self.program.results) if r.arrays.tensor == name]
        mine = [(n, r) for n, r in every if r.arrays.statement < stop]
        ((number, first), *others) = mine
        if isinstance(first.arrays, Assembled) and not others:
            return self._make_assembled(number, first, first.arrays)
        return self._sort_collected(symbol.format, self._shape(name), [n for n, _ in mine])

    def _make_assembled(self, number: int, r: Result, x: Assembled) -> SparseTensor:
        """A sparse tensor whose levels are written; what was allocated too much is cut off."""
        arrays, shape = list(self.arrays[number]), self._shape(x.tensor)
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
            levels.append((pos, _trim(arrays.pop(0), parents)))
        tail = x.format.tail(shape)
        return SparseTensor(x.format, shape, levels, _trim(arrays[0], parents * prod(tail)).reshape(parents, *tail))

    def _sort_collected(self, format: Format, shape: tuple[int, ...], mine: list[int]) -> SparseTensor:
        """A sparse tensor of collected elements. All definitions but the first add to what there is."""
        reductions = [self.function.statements[self.program.results[n].arrays.statement].reduction for n in mine]
        if len(mine) > 1 and reductions[0] not in (None, "+"):
            first = self._sort_collected(format, shape, mine[:1])
            places, values = first.coordinates(), first.values.reshape(-1)
            mine, reductions = mine[1:], ["+"]
        else:
            places, values = torch.empty((len(shape), 0), dtype=torch.int64), self.arrays[mine[0]][-1][:0]
        places = torch.cat([places, *(torch.stack(self.arrays[n][:-1]) for n in mine)], 1)
        values = torch.cat([values, *(self.arrays[n][-1] for n in mine)])
        types = {t.index_dtype for t in self.call.sparse.values()}
        index = torch.int64 if torch.int64 in types else torch.int32
        made = pack.from_coordinates(places, values, shape, format.with_unique_elements, index, reductions[0] or "+")
        return SparseTensor(format, shape, made.levels, made.values)


TORCH_INDEX = {dtype: torch_type for torch_type, dtype in _INDEX_TYPES.items()}


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)


def _index_dtype(x: Assembled) -> torch.dtype:
    return torch.int64 if x.index == INT64 else torch.int32


def _as_stored(value: Any) -> SparseTensor:
    """A sparse tensor of any kind by its parts."""
    if isinstance(value, SparseTensor):
        return value
    return from_torch(value) if isinstance(value, Tensor) else from_scipy(value)


def _may_take_lane(value: object) -> bool:
    """Whether a lane can compare an operand of this kind."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.layout in (torch.strided, torch.sparse_csr, torch.sparse_csc)
    return type(value) is SparseTensor


def _dense(expected: ParameterSpec, value: object) -> Tensor:
    """A dense operand with contiguous elements, and with the graph of autograd that it has."""
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        to_tensor(expected, value.detach())
        return value.resolve_neg().contiguous()
    return to_tensor(expected, value).contiguous()


SPARE = 2
"""An array may have so many times the elements of a result before it is copied to its own size."""


def _trim(x: Tensor, count: int) -> Tensor:
    return x[:count] if len(x) <= SPARE * count else x[:count].clone()


def _empty(shape: tuple[int, ...], dtype: torch.dtype, name: str, op: str) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        raise ArgumentError(
            f"there is no memory for '{name}' of {op}",
            found=f"a dense tensor of the shape {shape}", suggestion=f"return it in a sparse format: {name}: csr",
        ) from error  # fmt: skip


def _number(x: Value, sizes: Mapping[str, int]) -> int:
    return x if isinstance(x, int) else max(0, x.evaluate(sizes))


def _failure(op: str, code: int, value: int) -> Exception:
    if code == -1:
        return ArgumentError(f"there is no memory for {op}: {value} bytes")
    return InternalError(f"{op}: a launch failed with code {code}")


# --- results -----------------------------------------------------------------------------------------------------


def hand_back(results: Mapping[str, Tensor | SparseTensor], values: Sequence[object]) -> Any:
    """Each result in the caller's kind of tensor.

    That is torch's if all sparse operands are torch's, SciPy's if they are SciPy's and no other operand is a tensor.
    """
    kinds = [v for v in values if is_sparse(v)]
    found: list[Any] = list(results.values())
    if kinds and all(isinstance(v, Tensor) for v in kinds):
        found = [r.torch() if isinstance(r, SparseTensor) else r for r in found]
    elif kinds and all(map(is_scipy, kinds)) and not any(isinstance(v, Tensor) for v in values):
        found = [r.scipy() if isinstance(r, SparseTensor) else r.numpy() for r in found]
    return found[0] if len(found) == 1 else tuple(found)
