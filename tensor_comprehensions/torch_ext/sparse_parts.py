"""Signatures of defs with sparse tensors as torch operators, which take and return each sparse tensor as its parts.

The parts are the arrays pos and crd of the levels, and the values: plain tensors, which torch traces, saves and
differentiates. The formats are part of the operator's name. Dynamo traces some functions here, so they are plain Python
on tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from ..core.dtypes import DType
from ..dispatch.sparse.sparse_tensor import Level, SparseTensor, storage_of
from ..sparse.shared_sparsity import shared_patterns
from ..tc_lang.binding.ranges import symbolic_ranges
from ..tc_lang.formats import Format
from ..tc_lang.ir import Const, Function, Size
from ..tc_lang.size_polynomial import SizeName, SizeOperation, Value
from .schema import free_argument_name

SizeProgram = tuple[tuple[str, int, int], ...]
"""A size in reverse Polish notation: ("number", n, 0), ("extent", operand, dimension), ("scalar", operand, 0), or an
operation ("+", 0, 0) on the two topmost values."""


@dataclass(frozen=True)
class SparseArgument:
    """An operand.

    Attributes:
        format: the format; None for a dense tensor.
        arrays: the number of arrays of each level; None for a dense tensor.
        is_number: whether it is a specialized number, whose value the kernel contains.
    """

    name: str
    dtype: DType
    rank: int
    format: Format | None
    arrays: tuple[int, ...] | None
    is_number: bool


@dataclass(frozen=True)
class SparseReturn:
    """A result.

    Attributes:
        format, arrays: as in `SparseArgument`.
        source: the position of the operand whose pattern it shares; -1: none.
        extents: its shape.
        count: how many tensors the operator returns for it.
    """

    name: str
    dtype: DType
    rank: int
    format: Format | None
    arrays: tuple[int, ...] | None
    source: int
    extents: tuple[SizeProgram, ...]
    count: int


@dataclass(frozen=True)
class PartSignature:
    """A def as an operator on parts.

    Attributes:
        name: the name within torch's namespace `tc`.
        declared: the declarations of the arguments in torch's schema.
        arguments, returns: the operands and results that the parts belong to.
    """

    name: str
    declared: tuple[str, ...]
    arguments: tuple[SparseArgument, ...]
    returns: tuple[SparseReturn, ...]

    @property
    def schema(self) -> str:
        """The declaration of the operator."""
        results = ["Tensor" for r in self.returns for _ in range(r.count)]
        return f"{self.name}({', '.join(self.declared)}) -> ({', '.join(results)})"

    @property
    def parts(self) -> int:
        """The number of arguments and results together."""
        return len(self.declared) + sum(r.count for r in self.returns)


def part_signature(function: Function, gradient: str) -> PartSignature:
    """The signature of a def with the formats of its operands. gradient: a text that identifies its gradient."""
    taken = (*function.parameters, *function.inouts)
    arguments = tuple(
        SparseArgument(t.name, t.dtype, t.rank, *storage_of(t), t.is_compile_time) for t in taken
    )  # fmt: skip
    places = {t.name: n for n, t in enumerate(taken)}
    shared = shared_patterns(function)
    ranges = symbolic_ranges(function)
    returns = []
    for name in function.returns:
        t = function.tensor(name)
        format, arrays = storage_of(t)
        source = places[shared[name]] if name in shared and arrays is not None else -1
        extents = tuple(_compile_extent(x, function) for x in ranges.shape(name))
        count = 1 + (sum(arrays) if arrays is not None and source < 0 else 0)
        returns.append(SparseReturn(name, t.dtype, t.rank, format, arrays, source, extents, count))
    formats = (f"{t.name}:{t.format}" for t in function.tensors if t.is_sparse)
    content = ("parts", function.canonical, *(t.name for t in taken), "->", *function.returns, gradient, *formats)
    name = f"{function.name}_{sha256(chr(0).join(content).encode()).hexdigest()[:12]}"
    names: set[str] = set()
    declared = tuple(d for a in arguments for d in _declare_argument(a, names))
    return PartSignature(name, declared, arguments, tuple(returns))


def fixed_signature(whole: PartSignature) -> PartSignature:
    """The signature for results with given patterns: after the operands, it takes their level arrays and a number."""
    names = {d.split()[-1] for d in whole.declared}
    words = [f"{r.name}_level{n}" for r in whole.returns for n in range(r.count - 1)]
    levels = (f"Tensor {free_argument_name(word, names)}" for word in words)
    declared = (*whole.declared, *levels, f"SymInt {free_argument_name('number', names)}")
    returns = tuple(replace(r, count=1) for r in whole.returns)
    return PartSignature(f"{whole.name}_fixed", declared, whole.arguments, returns)


def _declare_argument(a: SparseArgument, names: set[str]) -> list[str]:
    if a.is_number:
        return [f"SymInt {free_argument_name(a.name, names)}"]
    if a.arrays is None:
        return [f"Tensor {free_argument_name(a.name, names)}"]
    words = [f"{a.name}_{('crd', 'pos')[count - 1 - k]}{n}" for n, count in enumerate(a.arrays) for k in range(count)]
    tensors = [f"Tensor {free_argument_name(word, names)}" for word in (*words, f"{a.name}_values")]
    return [*tensors, f"SymInt[] {free_argument_name(f'{a.name}_shape', names)}"]


# --- sizes -------------------------------------------------------------------------------------------------------


def _compile_extent(x: Value, function: Function) -> SizeProgram:
    """The program of an extent, whose value is at least 0."""
    program = _compile_size(x, function)
    return program if len(program) == 1 else (*program, ("number", 0, 0), ("max", 0, 0))


def _compile_size(x: Value, function: Function) -> SizeProgram:
    if isinstance(x, int):
        return (("number", x, 0),)
    known = _places_of_sizes(function)
    total: tuple[tuple[str, int, int], ...] = ()
    for monomial, coefficient in x.terms:
        product: tuple[tuple[str, int, int], ...] = ()
        factors = [_compile_atom(atom, function, known) for atom in monomial]
        if coefficient != 1 or not factors:
            factors.append((("number", coefficient, 0),))
        for n, factor in enumerate(factors):
            product = (*product, *factor, *((("*", 0, 0),) if n else ()))
        total = (*total, *product, *((("+", 0, 0),) if total else ()))
    return total or (("number", 0, 0),)


def _compile_atom(
    atom: SizeName | SizeOperation, function: Function, known: Mapping[str, tuple[str, int, int]]
) -> SizeProgram:
    match atom:
        case SizeName(name=name):
            return (known[name],)
        case SizeOperation(op=op, left=left, right=right):
            return (*_compile_size(left, function), *_compile_size(right, function), (op, 0, 0))


def _places_of_sizes(function: Function) -> dict[str, tuple[str, int, int]]:
    """The step of a `SizeProgram` that reads each size, and each specialized number, from the operands."""
    found: dict[str, tuple[str, int, int]] = {}
    for n, t in enumerate((*function.parameters, *function.inouts)):
        if t.is_compile_time:
            found[t.name] = ("scalar", n, 0)
        for d, extent in enumerate(t.extents or ()):
            match extent:
                case Size(name=name):
                    found.setdefault(name, ("extent", n, d))
                case Const():
                    pass
    return found


def evaluate_size(program: SizeProgram, values: Sequence[Any]) -> Any:
    """The value of a size program. values: the operands, numbers or objects with a shape. May return a SymInt."""
    stack: list[Any] = []
    for op, a, b in program:
        if op == "number":
            stack.append(a)
        elif op == "extent":
            stack.append(values[a].shape[b])
        elif op == "scalar":
            stack.append(values[a])
        else:
            right = stack.pop()
            left = stack.pop()
            stack.append(_OPERATIONS[op](left, right))
    return stack[0]


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b, "*": lambda a, b: a * b, "/": lambda a, b: a // b, "%": lambda a, b: a % b,
    "min": torch.sym_min, "max": torch.sym_max,
}  # fmt: skip


# --- tensors and parts ---------------------------------------------------------------------------------------------


def to_parts(arguments: Sequence[SparseArgument], values: Sequence[Any]) -> list[Any]:
    """Split the operands of a call into the arguments of the operator."""
    parts: list[Any] = []
    for argument, x in zip(arguments, values, strict=True):
        if argument.arrays is None:
            parts.append(x)
        else:
            parts.extend(arrays_of(x.levels))
            parts.append(x.values)
            parts.append(list(x.shape))
    return parts


def arrays_of(levels: Sequence[Level]) -> list[Tensor]:
    """All arrays of levels, in order."""
    found = []
    for level in levels:
        if level is not None:
            if level[0] is not None:
                found.append(level[0])
            found.append(level[1])
    return found


def from_parts(arguments: Sequence[SparseArgument], parts: Sequence[Any]) -> list[Any]:
    """Build the operands of a call from the arguments of the operator."""
    values, n = [], 0
    for argument in arguments:
        if argument.arrays is None:
            values.append(parts[n])
            n += 1
            continue
        count = sum(argument.arrays)
        levels = to_levels(argument.arrays, parts[n : n + count])
        assert argument.format is not None
        values.append(SparseTensor(argument.format, tuple(parts[n + count + 1]), levels, parts[n + count]))
        n += count + 2
    return values


def to_levels(counts: Sequence[int], arrays: Sequence[Tensor]) -> tuple[Level, ...]:
    """Group arrays into levels with the given numbers of arrays."""
    levels: list[Level] = []
    n = 0
    for count in counts:
        if count == 0:
            levels.append(None)
        elif count == 1:
            levels.append((None, arrays[n]))
        else:
            levels.append((arrays[n], arrays[n + 1]))
        n += count
    return tuple(levels)


def results_from_parts(returns: Sequence[SparseReturn], values: Sequence[Any], found: Any) -> list[Any]:
    """Build the results from the operands and the outputs of the operator."""
    parts = found if isinstance(found, (tuple, list)) else (found,)
    results, n = [], 0
    for r in returns:
        last = n + r.count - 1
        if r.arrays is None or r.format is None:
            results.append(parts[last])
        elif r.source >= 0:
            operand = values[r.source]
            results.append(SparseTensor(r.format, operand.shape, operand.levels, parts[last]))
        else:
            shape = tuple([evaluate_size(p, values) for p in r.extents])
            results.append(SparseTensor(r.format, shape, to_levels(r.arrays, parts[n:last]), parts[last]))
        n = last + 1
    return results


def results_to_parts(returns: Sequence[SparseReturn], results: Sequence[Any], index: torch.dtype) -> list[Tensor]:
    """Split the results into the outputs of the operator, with level arrays of the type `index`."""
    parts: list[Tensor] = []
    for r, x in zip(returns, results, strict=True):
        if r.arrays is not None and r.source < 0:
            parts += [array.to(index) for array in arrays_of(x.levels)]
        parts.append(x if r.arrays is None else x.values)
    return parts


def index_dtype_of(values: Sequence[Any]) -> torch.dtype:
    """The type of level arrays of results with a pattern of their own: int64 if an operand has it."""
    types = {x.index_dtype for x in values if isinstance(x, SparseTensor)}
    return torch.int64 if torch.int64 in types else torch.int32


def fake_parts(
    returns: Sequence[SparseReturn], values: Sequence[Any], new_count: Callable[[], Any], types: Mapping[DType, Any]
) -> list[Tensor]:
    """The outputs of the operator as fake tensors. new_count: returns a new symbol for a size that depends on data."""
    index = index_dtype_of(values)
    device = next((x.device for x in values if isinstance(x, (Tensor, SparseTensor))), torch.device("cpu"))
    parts: list[Tensor] = []
    for r in returns:
        if r.source >= 0:
            parts.append(torch.empty(values[r.source].values.shape, dtype=types[r.dtype], device=device))
            continue
        shape = [evaluate_size(p, values) for p in r.extents]
        if r.format is None or r.arrays is None:
            parts.append(torch.empty(shape, dtype=types[r.dtype], device=device))
            continue
        extents, positions = r.format.extents(shape), 1
        for count, extent in zip(r.arrays[: r.format.depth], extents, strict=False):
            if count == 2:
                parts.append(torch.empty(positions + 1, dtype=index, device=device))
                positions = new_count()
            elif count == 0:
                positions = positions * extent
            if count:
                parts.append(torch.empty(positions, dtype=index, device=device))
        tail = r.format.tail(shape)
        parts.append(torch.empty((positions, *tail), dtype=types[r.dtype], device=device))
    return parts
