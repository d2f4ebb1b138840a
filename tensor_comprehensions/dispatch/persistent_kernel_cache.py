"""Kernels from the cache: code that an earlier process compiled is loaded, not compiled again.

Invariant: a kernel from the cache equals the one that the compiler would make now, since its key has every input of
the compiler. An injected kernel does what its author wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from logging import DEBUG
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..cache import package_digest
from ..cache import stored_kernels as cache
from ..cache.key import Key, Uncacheable, make_key
from ..cache.store import Store, current_store
from ..cache.stored_kernels import StoredKernel
from ..compiler.compiled_kernel import BlockSize, CompiledBase, CompiledCpuKernel, CompiledRangeKernel
from ..core import knobs
from ..core.diagnostics import get_logger
from ..core.errors import CannotLower, TCError
from ..core.lazy_import import lazy_module
from ..options import CpuOptions
from ..runtime.cpu import object_code
from ..runtime.cpu.object_code import ObjectCode
from ..target import CpuTarget
from ..tc_lang.ir import BoundFunction, Function
from .compile_statistics import count_kernel

if TYPE_CHECKING:
    from ..compiler import cpu_passes, range_passes
    from ..compiler.compiled_sparse_kernel import CompiledSparseKernel
    from ..compiler.sparse_gpu_passes import CompiledSparseGpuKernel
    from ..loop_ir import nodes
    from ..loop_ir.nodes import CheckSite
    from ..structured.language import primitives
    from .range_kernels import RangeKey
else:
    cpu_passes, range_passes, nodes, primitives = (
        lazy_module("compiler.cpu_passes"),
        lazy_module("compiler.range_passes"),
        lazy_module("loop_ir.nodes"),
        lazy_module("structured.language.primitives"),
    )

C = TypeVar("C", bound="CompiledBase | CompiledSparseKernel")


@dataclass(frozen=True, slots=True)
class CacheAdapter(Generic[C]):
    """How to make a kernel, store it, and restore it.

    Attributes:
        name: the name of the def, for logs.
        make: compiles the kernel.
        content: returns its metadata, as JSON values, and its code.
        restore: loads it; raises CannotLower, KeyError, TypeError, ValueError or IndexError if that is impossible.
    """

    name: str
    make: Callable[[], C]
    content: Callable[[C], tuple[Mapping[str, Any], bytes]]
    restore: Callable[[StoredKernel], C]


def load_or_make(store: Store, key: Key | None, recipe: CacheAdapter[C]) -> C:
    """The kernel with this key, from the cache or made now; a kernel without a key is always made.

    If `TC_EXPLAIN` is set, this saves a page about the kernel.
    """
    made = _load_or_make(store, key, recipe)
    if knobs.current_knobs().explain:
        save_page(made)
    return made


def save_page(made: CompiledBase | CompiledSparseKernel | CompiledSparseGpuKernel) -> None:
    """Write the page of a kernel into the folder of `TC_EXPLAIN`. Log errors instead of raising them."""
    from ..explain.kernel_pages import save_page_in

    try:
        save_page_in(knobs.current_knobs().explain, made)
    except TCError as error:
        get_logger("why").warning("no page: %s", error)


def _load_or_make(store: Store, key: Key | None, recipe: CacheAdapter[C]) -> C:
    start = perf_counter()
    if key is not None and not _observes_compilation():
        found = _load_stored(store, key, recipe)
        if found is not None:
            count_kernel(found, loaded=True, seconds=perf_counter() - start)
            return found
    made = recipe.make()
    count_kernel(made, loaded=False, seconds=perf_counter() - start)
    if key is not None:
        _store_made_kernel(store, key, recipe, made)
    return made


def load_or_compile(
    function: Function, bound: BoundFunction, options: CpuOptions, target: CpuTarget
) -> CompiledCpuKernel:
    """The kernel of a bound def, from the cache or compiled now.

    Raises ArgumentError if the schedule of the options does not apply.
    """
    store = current_store()
    key = None if store.mode == "off" else kernel_key(function, bound, options, target)
    if key is None and store.mode != "off":  # a heuristic has no key, but the schedule that it returns has
        options = cpu_passes.resolve_schedules(bound, options, target)
        key = kernel_key(function, bound, options, target)
    recipe = CacheAdapter(
        bound.name,
        lambda: cpu_passes.compile_function(
            bound, function.source, cpu_passes.resolve_schedules(bound, options, target), target
        ),
        lambda made: (kernel_metadata(made), made.code.data),
        lambda code: deserialize_kernel(code, function, bound, options, target),
    )
    return load_or_make(store, key, recipe)


def load_or_compile_range(
    function: Function, wanted: RangeKey, options: CpuOptions, target: CpuTarget
) -> CompiledRangeKernel:
    """The range kernel for `wanted`, from the cache or compiled now. Raises CannotGeneralize."""
    store, row = current_store(), wanted.make(function, (1,) * len(wanted.axes))
    strides = wanted.classes(function)
    key = None
    if store.mode != "off":
        key = kernel_key(function, row, options, target, wanted.facts(function, row))
    make = partial(wanted.make_block, function)

    def compile_it() -> CompiledRangeKernel:
        problem = range_passes.RangeProblem(wanted.axes, row, make, strides, wanted.typical)
        return range_passes.compile_range(problem, function.source, options, target)

    recipe = CacheAdapter(
        row.name,
        compile_it,
        lambda made: (
            {
                **kernel_metadata(made),
                "blocks": [
                    [(b.rows, b.grain, b.overlap_from, int(b.is_optional), int(b.is_open)) for b in axis]
                    for axis in made.sizes
                ],
            },
            made.code.data,
        ),
        lambda code: _deserialize_range(code, function, wanted, row, options, target),
    )
    return load_or_make(store, key, recipe)


def _deserialize_range(
    code: StoredKernel, function: Function, wanted: RangeKey, row: BoundFunction, options: CpuOptions, target: CpuTarget
) -> CompiledRangeKernel:
    exact = deserialize_kernel(code, function, row, options, target)
    blocks = ((map(int, size) for size in axis) for axis in code.metadata["blocks"])
    sizes = tuple(
        tuple(BlockSize(n, grain, again, bool(a), bool(b)) for n, grain, again, a, b in axis) for axis in blocks
    )
    parts = {f.name: getattr(exact, f.name) for f in fields(exact)}
    return CompiledRangeKernel(
        **parts,
        axes=wanted.axes,
        sizes=sizes,
        make=partial(wanted.make_block, function),
        strides=wanted.classes(function),
    )


def kernel_key(
    function: Function, bound: BoundFunction, options: CpuOptions, target: CpuTarget, rows: str = ""
) -> Key | None:
    """The key of a kernel; None if it is uncacheable. rows: as for `make_key`."""
    try:
        return make_key(function, bound, target, options=options, flags=object_code.codegen_flags(), rows=rows)
    except Uncacheable as reason:
        get_logger("cache").debug("%s: has no key: %s", bound.name, reason)
        return None


def _observes_compilation() -> bool:
    """Whether dumps or logs observe the compilation."""
    topics = ("schedule", "loops", "code", "why")
    k = knobs.current_knobs()
    return k.verify or bool(k.dump) or any(get_logger(topic).isEnabledFor(DEBUG) for topic in topics)


def _load_stored(store: Store, key: Key, recipe: CacheAdapter[C]) -> C | None:
    start = perf_counter()
    code = cache.find_kernel(store, key)
    if code is None:
        if get_logger("cache").isEnabledFor(DEBUG):
            get_logger("cache").debug("%s: not on disk%s", recipe.name, _explain_miss(store, key))
        return None
    try:
        made = recipe.restore(code)
    except (CannotLower, KeyError, TypeError, ValueError, IndexError) as error:
        store.report_fault(f"the entry {code.key.digest} cannot be used: {error}")
        return None
    seconds = perf_counter() - start
    get_logger("cache").debug("%s: found on disk, loaded in %.1f ms", recipe.name, seconds * 1e3)
    return replace(made, seconds=((FOUND, seconds),))


FOUND = "found"
"""The name of the only pass of a kernel that comes from the cache."""


def was_cache_hit(compiled: CompiledBase) -> bool:
    """Whether a kernel comes from the cache."""
    return compiled.seconds[0][0] == FOUND


def describe_origin(function: Function, compiled: CompiledCpuKernel) -> str:
    """Whether a kernel comes from the cache, and its key there."""
    made = "found in the cache" if was_cache_hit(compiled) else "compiled by this process"
    if current_store().mode == "off":
        return f"{made}; the cache is off"
    key = kernel_key(function, compiled.bound, compiled.options, compiled.target)
    return f"{made}; it has no key there" if key is None else f"{made}; its key there is {key.digest[:12]}"


def _explain_miss(store: Store, key: Key) -> str:
    near = cache.nearest_kernel_key(store, key)
    return "" if near is None else f": the nearest differs in {', '.join(key.difference(near))}"


# --- kernels as entries ------------------------------------------------------------------------------------------


def _store_made_kernel(store: Store, key: Key, recipe: CacheAdapter[C], made: C) -> None:
    try:
        package_digest.check_unchanged()
    except package_digest.SourceChanged as reason:
        get_logger("cache").debug("%s: not kept: %s", recipe.name, reason)
        return
    if cache.store_kernel(store, StoredKernel(key, *recipe.content(made))):
        get_logger("cache").debug("%s: kept on disk as %s", recipe.name, key.digest[:12])


def kernel_metadata(compiled: CompiledCpuKernel) -> Mapping[str, Any]:
    """The metadata of a kernel's machine code; tensors are positions, since names are not part of a key."""
    return {
        "symbols": compiled.code.symbols,
        "temporaries": compiled.temporaries,
        "sites": serialize_sites(compiled.sites, compiled.bound),
        "kernels": compiled.kernels,
        "schedule": _schedule_to_pairs(compiled.options.schedule),
    }


def deserialize_kernel(
    code: StoredKernel, function: Function, bound: BoundFunction, options: CpuOptions, target: CpuTarget
) -> CompiledCpuKernel:
    """Load the kernel of an entry. Raises CannotLower if that fails, KeyError, TypeError etc. for wrong metadata."""
    facts = code.metadata
    machine_code = ObjectCode(code.data, tuple(map(str, facts["symbols"])))
    schedule = facts["schedule"]
    if schedule is not None:
        options = replace(
            options, schedule=tuple((str(name), primitives.parse_schedule(text)) for name, text in schedule)
        )
    return CompiledCpuKernel(
        bound, function.source, options, target, (), machine_code, object_code.load_object(machine_code),
        tuple(map(int, facts["temporaries"])), deserialize_sites(facts["sites"], bound), int(facts["kernels"]),
    )  # fmt: skip


def serialize_sites(sites: Sequence[CheckSite], bound: BoundFunction) -> list[tuple[int, int, int, int]]:
    """The check sites in a form that JSON can store."""
    places = {t.name: n for n, t in enumerate(bound.tensors)}
    return [(places[s.tensor], s.dimension, s.extent, s.origin) for s in sites]


def deserialize_sites(facts: Any, bound: BoundFunction) -> tuple[CheckSite, ...]:
    """The check sites that `serialize_sites` wrote."""
    return tuple(
        nodes.CheckSite(bound.tensors[place].name, int(dimension), int(extent), int(origin))
        for place, dimension, extent, origin in facts
    )


def _schedule_to_pairs(schedule: Any) -> list[tuple[str, str]] | None:
    """A resolved schedule as (name, text) pairs."""
    return None if schedule is None else [(name, repr(pipeline)) for name, pipeline in schedule]
