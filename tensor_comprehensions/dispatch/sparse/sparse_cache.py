"""Kernels for sparse operands out of the cache: the problem is lowered again, its machine code is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from ...cache.key import Key, Uncacheable, make_sparse_key
from ...cache.store import current_store
from ...cache.stored_kernels import StoredKernel
from ...compiler.sparse_passes import CompiledSparseKernel, compile_sparse, load_sparse_kernel
from ...core.diagnostics import get_logger
from ...runtime.cpu import object_code
from ...runtime.cpu.object_code import ObjectCode
from ...sparse.explain import text_with_formats
from ...sparse.lower import lower
from ...sparse.sparse_problem import SparseProblem
from ...target import CpuTarget
from ..persistent_kernel_cache import CacheAdapter, load_or_make


def load_or_compile_sparse(problem: SparseProblem, target: CpuTarget) -> CompiledSparseKernel:
    """The kernel of a problem, from the cache or compiled now. Raises CannotLower as `compile_sparse` does."""
    store = current_store()
    key = None if store.mode == "off" else _key(problem, target)
    adapter = CacheAdapter(
        problem.function.name,
        lambda: compile_sparse(problem, target),
        _content,
        lambda stored: load_sparse_kernel(lower(problem, target), _parse_code(stored), target),
    )
    return load_or_make(store, key, adapter)


def _key(problem: SparseProblem, target: CpuTarget) -> Key | None:
    indices = tuple((name, dtype.name) for name, dtype in problem.index_types)
    kernel = (indices, problem.fixed, problem.shared, problem.parallel, problem.refills, problem.options)
    try:
        return make_sparse_key(text_with_formats(problem.function), kernel, target, flags=object_code.codegen_flags())
    except Uncacheable as reason:
        get_logger("cache").debug("%s: has no key: %s", problem.function.name, reason)
        return None


def _content(made: CompiledSparseKernel) -> tuple[Mapping[str, Any], bytes]:
    """The machine code of all phases, one after the other."""
    facts = {"sizes": [len(c.data) for c in made.code], "symbols": [c.symbols for c in made.code]}
    return facts, b"".join(c.data for c in made.code)


def _parse_code(stored: StoredKernel) -> tuple[ObjectCode, ...]:
    """Parse the bytes that `_content` wrote. Raises ValueError for other bytes."""
    sizes, symbols = map(int, stored.metadata["sizes"]), stored.metadata["symbols"]
    ends = [0, *accumulate(sizes)]
    if ends[-1] != len(stored.data):
        raise ValueError("the machine code is shorter or longer than its phases")
    parts = zip(ends, ends[1:], symbols, strict=False)
    return tuple(ObjectCode(stored.data[a:b], tuple(map(str, names))) for a, b, names in parts)
