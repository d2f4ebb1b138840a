"""Kernels with sparse operands in the cache: machine code and the plan of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from hashlib import sha256
from itertools import accumulate
from typing import Any

from ... import options
from ...cache.checked_defs import language_classes
from ...cache.key import Key, Uncacheable, make_sparse_key
from ...cache.plain_records import from_plain, record_classes, to_plain
from ...cache.store import current_store
from ...cache.stored_kernels import StoredKernel
from ...compiler.compiled_sparse_kernel import CompiledSparseKernel
from ...core.diagnostics import get_logger
from ...runtime.cpu import object_code
from ...runtime.cpu.object_code import ObjectCode
from ...sparse import call_plan, sparse_problem
from ...sparse.call_plan import CallPlan
from ...sparse.sparse_problem import KernelRequest
from ...target import CpuTarget
from ...tc_lang.ir import Function
from ..persistent_kernel_cache import CacheAdapter, load_or_make


def load_or_compile_sparse(
    request: KernelRequest, target: CpuTarget, make: Callable[[], CompiledSparseKernel]
) -> CompiledSparseKernel:
    """The kernel for a request, from the cache or made now. Raises CannotLower as `make` does."""
    store = current_store()
    key = None if store.mode == "off" else _make_key(request, target)
    adapter = CacheAdapter(
        request.function.name,
        make,
        _serialize_kernel,
        lambda stored: _deserialize_kernel(stored, request, target),
    )
    return load_or_make(store, key, adapter)


def _make_key(request: KernelRequest, target: CpuTarget) -> Key | None:
    indices = tuple((name, dtype.name) for name, dtype in request.index_types)
    kernel = (indices, request.fixed, request.threads, request.refills, request.options, request.wide)
    try:
        return make_sparse_key(_describe_def(request.function), kernel, target, flags=object_code.codegen_flags())
    except Uncacheable as reason:
        get_logger("cache").debug("%s: has no key: %s", request.function.name, reason)
        return None


def _describe_def(function: Function) -> str:
    """A text for the key: the canonical form of a def, the formats of its tensors, and a digest that covers names."""
    formats = ", ".join(f"{t.name}: {t.format or 'dense'}" for t in function.tensors)
    return f"{function.canonical}\nwith {formats}\n{sha256(repr(function).encode()).hexdigest()[:32]}"


def _serialize_kernel(made: CompiledSparseKernel) -> tuple[Mapping[str, Any], bytes]:
    """The metadata with the plan of calls, and the concatenated machine code of all phases."""
    facts = {"sizes": [len(c.data) for c in made.code], "symbols": [c.symbols for c in made.code]}
    function = made.plan.problem.function
    plan = replace(made.plan, problem=replace(made.plan.problem, function=replace(function, source="", canonical="")))
    return {**facts, "plan": to_plain(plan)}, b"".join(c.data for c in made.code)


def _deserialize_kernel(stored: StoredKernel, request: KernelRequest, target: CpuTarget) -> CompiledSparseKernel:
    """The kernel that `_serialize_kernel` wrote.

    Raises CannotLower if it cannot be loaded, KeyError, TypeError etc. for corrupt content.
    """
    code = _parse_code(stored)
    plan = _parse_plan(stored.metadata["plan"], request.function)
    if plan.num_phases != len(code):
        raise ValueError("the plan has other phases than the machine code")
    return CompiledSparseKernel(request, plan, code, tuple(map(object_code.load_object, code)), target, ())


def _parse_plan(plain: Any, function: Function) -> CallPlan:
    """The plan of calls of a def. Raises ValueError if `plain` is not one."""
    plan = from_plain(plain, _plan_classes())
    if not isinstance(plan, CallPlan):
        raise ValueError("the entry has no plan")
    planned = replace(plan.problem.function, source=function.source, canonical=function.canonical)
    return replace(plan, problem=replace(plan.problem, function=planned))


@cache
def _plan_classes() -> dict[str, Any]:
    return {**language_classes(), **record_classes(call_plan, sparse_problem, options)}


def _parse_code(stored: StoredKernel) -> tuple[ObjectCode, ...]:
    """Parse the machine code that `_serialize_kernel` wrote. Raises ValueError if the content is corrupt."""
    sizes, symbols = map(int, stored.metadata["sizes"]), stored.metadata["symbols"]
    ends = [0, *accumulate(sizes)]
    if ends[-1] != len(stored.data):
        raise ValueError("the machine code is shorter or longer than its phases")
    parts = zip(ends, ends[1:], symbols, strict=False)
    return tuple(ObjectCode(stored.data[a:b], tuple(map(str, names))) for a, b, names in parts)
