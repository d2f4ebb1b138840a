"""GPU kernels in the cache: their text and launches. Loading one does not import the mapper.

Machine code has entries of its own; see `runtime.cuda.cubins`. The name of the def is in the text, so it is a part of
the key.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from ...cache.key import Key, Uncacheable, make_key
from ...cache.store import current_store
from ...cache.stored_kernels import StoredKernel
from ...codegen.gpu.gpu_printer import GpuCode, GpuKernelSource
from ...compiler.gpu_passes import CompiledGpuKernel, compile_gpu
from ...core.diagnostics import get_logger
from ...core.dtypes import DTYPES
from ...core.lazy_import import lazy_module
from ...loop_ir.nodes import BlockCount, Buffer, Launch, Parameter, Space, TensorMap, Type
from ...options import GpuOptions
from ...runtime.cuda.launch import ALIGNMENT
from ...target import GpuTarget
from ...tc_lang.ir import BoundFunction, Function
from ..persistent_kernel_cache import CacheAdapter, deserialize_sites, load_or_make, serialize_sites

if TYPE_CHECKING:
    from ...compiler import gpu_range_passes
    from ...compiler.gpu_range_passes import CompiledGpuRangeKernel
    from ..range_kernels import RangeKey
else:
    gpu_range_passes = lazy_module("compiler.gpu_range_passes")


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """Stands in keys for options that the cost model chooses."""


def load_or_compile_gpu(
    function: Function, bound: BoundFunction, options: GpuOptions | None, target: GpuTarget, *, aligned: bool
) -> CompiledGpuKernel:
    """The kernel of a bound def, from the cache or compiled now.

    aligned: whether the addresses of arguments are multiples of `ALIGNMENT` bytes. Raises ArgumentError as
    `compile_gpu`.
    """
    store = current_store()
    key = None if store.mode == "off" else gpu_kernel_key(function, bound, options, target, aligned=aligned)
    recipe = CacheAdapter(
        bound.name,
        lambda: compile_gpu(bound, function.source, options, target, aligned=aligned),
        lambda made: (_serialize_kernel(made), made.code.source.encode()),
        lambda code: _deserialize_kernel(code, function, bound, options, target, aligned),
    )
    return load_or_make(store, key, recipe)


def load_or_compile_gpu_range(
    function: Function, wanted: RangeKey, options: GpuOptions | None, target: GpuTarget, *, aligned: bool
) -> CompiledGpuRangeKernel:
    """The kernel for any number of rows, from the cache or made now.

    aligned: as for `load_or_compile_gpu`.

    Raises:
        CannotGeneralize: only kernels for exact sizes can serve the def.
        ArgumentError: `target` has too little of something.
    """
    row = wanted.make(function, (1,) * len(wanted.axes))
    problem = gpu_range_passes.GpuRangeProblem(
        wanted.axes, row, partial(wanted.make_block, function), wanted.classes(function), wanted.typical
    )
    store = current_store()
    key = None
    if store.mode != "off":
        rows = wanted.facts(function, row)
        key = gpu_kernel_key(function, row, options, target, aligned=aligned, rows=rows)
    recipe = CacheAdapter(
        row.name,
        lambda: gpu_range_passes.compile_gpu_range(problem, function.source, options, target, aligned=aligned),
        lambda made: (
            {**_serialize_kernel(made), "parameters": [[p.name, p.most] for p in made.parameters]},
            made.code.source.encode(),
        ),
        lambda code: _deserialize_range(code, function, problem, options, target, aligned),
    )
    return load_or_make(store, key, recipe)


def _deserialize_range(
    code: StoredKernel,
    function: Function,
    problem: gpu_range_passes.GpuRangeProblem,
    options: GpuOptions | None,
    target: GpuTarget,
    aligned: bool,
) -> CompiledGpuRangeKernel:
    exact = _deserialize_kernel(code, function, problem.row, options, target, aligned)
    parameters = tuple(
        Parameter(str(name), None if most is None else int(most)) for name, most in code.metadata["parameters"]
    )
    parts = {f.name: getattr(exact, f.name) for f in fields(exact)}
    return gpu_range_passes.CompiledGpuRangeKernel(**parts, problem=problem, parameters=parameters)


def gpu_kernel_key(
    function: Function,
    bound: BoundFunction,
    options: GpuOptions | None,
    target: GpuTarget,
    *,
    aligned: bool,
    rows: str = "",
) -> Key | None:
    """The key of a kernel's text; None if it is uncacheable, for example because this package's source has changed.

    rows: as for `make_key`.
    """
    try:
        return make_key(
            function, bound, target, options=options or AutoOptions(), alignment=ALIGNMENT if aligned else 0,
            flags={"name": bound.name}, rows=rows,
        )  # fmt: skip
    except Uncacheable as reason:
        get_logger("cache").debug("%s: has no key: %s", bound.name, reason)
        return None


# --- as JSON -----------------------------------------------------------------------------------------------------


def _serialize_kernel(made: CompiledGpuKernel) -> dict[str, Any]:
    return {
        "kernels": list(map(_kernel, made.code.kernels)),
        "aligned": made.code.aligned,
        "arguments": list(map(_serialize_buffer, made.arguments)),
        "temporaries": list(map(_serialize_buffer, made.temporaries)),
        "sites": serialize_sites(made.sites, made.bound),
    }


def _deserialize_kernel(
    code: StoredKernel,
    function: Function,
    bound: BoundFunction,
    options: GpuOptions | None,
    target: GpuTarget,
    aligned: bool,
) -> CompiledGpuKernel:
    facts = code.metadata
    kernels = tuple(map(_read_kernel, facts["kernels"]))
    return CompiledGpuKernel(
        bound, function.source, options, target, (), aligned,
        GpuCode(code.data.decode(), kernels, bool(facts["aligned"])),
        tuple(map(_read_buffer, facts["arguments"])), tuple(map(_read_buffer, facts["temporaries"])),
        deserialize_sites(facts["sites"], bound),
    )  # fmt: skip


def _kernel(k: GpuKernelSource) -> list[Any]:
    return [
        k.name, k.launch.grid, k.launch.block, k.launch.cluster, k.buffers, k.status, k.shared, k.dynamic,
        list(map(_serialize_buffer, k.arrays)), k.sizes, k.identifiers, k.local,
        [[m.name, _serialize_buffer(m.buffer), m.box, m.swizzle, m.dimensions, m.rounds] for m in k.maps], k.mapped,
        [None if c is None else [c.parameter, c.tile, c.most] for c in k.launch.counts], k.parameters,
    ]  # fmt: skip


def _read_kernel(facts: list[Any]) -> GpuKernelSource:
    name, grid, block, cluster, buffers, status, shared, dynamic, *rest = facts
    arrays, sizes, identifiers, local, maps, mapped, counts, parameters = rest
    launch = Launch(_read_triple(grid), _read_triple(block), int(cluster), tuple(map(_read_count, counts)))
    return GpuKernelSource(
        str(name), launch, tuple(map(int, buffers)), bool(status), int(shared), int(dynamic),
        tuple(map(_read_buffer, arrays)), tuple(map(int, sizes)), tuple(map(str, identifiers)), int(local),
        tuple(map(_read_map, maps)), tuple(map(int, mapped)), tuple(map(str, parameters)),
    )  # fmt: skip


def _read_count(facts: list[Any] | None) -> BlockCount | None:
    return None if facts is None else BlockCount(str(facts[0]), int(facts[1]), int(facts[2]))


def _read_map(facts: list[Any]) -> TensorMap:
    name, buffer, box, swizzle, dimensions, rounds = facts
    sides = tuple((int(n), int(stride)) for n, stride in dimensions)
    return TensorMap(str(name), _read_buffer(buffer), tuple(map(int, box)), int(swizzle), sides, bool(rounds))


def _read_triple(numbers: list[Any]) -> tuple[int, int, int]:
    x, y, z = map(int, numbers)
    return x, y, z


def _serialize_buffer(b: Buffer) -> list[Any]:
    return [
        b.name, b.type.dtype.name, b.shape, b.strides, b.space.name, b.swizzle,
        b.dynamic, b.stride_variables, b.extent_variables,
    ]  # fmt: skip


def _read_buffer(facts: list[Any]) -> Buffer:
    name, dtype, shape, strides, space, swizzle, dynamic, *variables = facts
    numbers = (tuple(map(int, shape)), tuple(map(int, strides)))
    swizzled = None if swizzle is None else _read_triple(swizzle)
    held = (tuple(None if v is None else str(v) for v in names) for names in variables)
    return Buffer(str(name), Type(DTYPES[dtype]), *numbers, Space[space], tuple(map(int, dynamic)), swizzled, *held)
