"""Assembled calls: operands have the patterns of an earlier call, so the patterns of the results are known."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...core.errors import ArgumentError
from ...tc_lang.semantics.sparse_rules import pattern_depends_on_values
from .sparse_kernels import SparseKernels
from .sparse_run import SparseCall, StoredCounts
from .sparse_tensor import Level, SparseTensor
from .structure import copy_levels, list_index_arrays


class FixedPatterns:
    """Runs calls whose operands have the patterns and sizes of the first call.

    Attributes:
        levels: the levels of the sparse results, by name.
    """

    def __init__(self, kernels: SparseKernels, call: SparseCall) -> None:
        self._kernels = kernels
        self._name = kernels.function.name
        self._sizes = kernels.sizes(call)
        self._operands = {n: (t.format, *_remember_levels(t, n in call.unversioned)) for n, t in call.sparse.items()}
        counts = StoredCounts()
        results = kernels.run(call, counts)
        copy = copy_levels if call.unversioned else tuple
        self.levels = {n: copy(r.levels) for n, r in results.items() if isinstance(r, SparseTensor)}
        counts.levels.update(self.levels)
        follows_values = pattern_depends_on_values(kernels.function_for_call(call))
        self._counts = None if follows_values else counts

    def run(self, call: SparseCall) -> dict[str, Tensor | SparseTensor]:
        """The results of the def, by name; sparse results share the arrays in `levels`, unless operands may change.

        Raises:
            ArgumentError: an operand has another pattern or size than in the first call.
        """
        self._check(call)
        results = self._kernels.run(call, self._counts)
        found = {n: self._with_levels(n, r) for n, r in results.items()}
        return {n: _with_own_arrays(r) for n, r in found.items()} if call.unversioned else found

    def _check(self, call: SparseCall) -> None:
        sizes = self._kernels.sizes(call)
        if sizes != self._sizes:
            name = next(n for n in self._sizes if sizes[n] != self._sizes[n])
            raise self._error(f"{name} is {sizes[name]}", f"{name} = {self._sizes[name]}")
        if call.sparse.keys() != self._operands.keys():
            raise self._error("another operand is sparse", ", ".join(self._operands))
        for name, t in call.sparse.items():
            format, levels, versions = self._operands[name]
            if t.format != format:
                raise self._error(f"'{name}' has the format {t.format}", str(format))
            changed = bool(versions) and _list_array_versions(levels) != versions
            if changed or not are_equal_levels(levels, t.levels):
                raise self._error(f"'{name}' has other stored places", "the places that it had there")

    def _error(self, problem: str, expected: str) -> ArgumentError:
        return ArgumentError(
            f"{self._name} was assembled for other operands: {problem}",
            expected=expected, suggestion="assemble again: op.assemble(*operands)",
        )  # fmt: skip

    def _with_levels(self, name: str, result: Tensor | SparseTensor) -> Tensor | SparseTensor:
        if not isinstance(result, SparseTensor):
            return result
        levels = self.levels[name]
        if self._counts is None and not are_equal_levels(levels, result.levels):
            raise self._error(f"'{name}' would get other stored places", "values that are 0 at the same places")
        return SparseTensor(result.format, result.shape, levels, result.values)


def _remember_levels(t: SparseTensor, unversioned: bool) -> tuple[Sequence[Level], list[int]]:
    """The levels of an operand, to compare with those of later calls, and the versions of their arrays."""
    return (copy_levels(t.levels), []) if unversioned else (t.levels, _list_array_versions(t.levels))


def _with_own_arrays(result: Tensor | SparseTensor) -> Tensor | SparseTensor:
    if not isinstance(result, SparseTensor):
        return result
    return SparseTensor(result.format, result.shape, copy_levels(result.levels), result.values)


def _list_array_versions(levels: Sequence[Level]) -> list[int]:
    return [x._version for x in list_index_arrays(levels)]


def are_equal_levels(a: Sequence[Level], b: Sequence[Level]) -> bool:
    """Whether two lists of levels, of the same format, have equal arrays."""
    return all(
        x is y or (x is not None and y is not None and all(map(_is_equal, x, y))) for x, y in zip(a, b, strict=True)
    )


def _is_equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (a.shape == b.shape and (_is_same_memory(a, b) or bool((a == b).all())))


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride()
