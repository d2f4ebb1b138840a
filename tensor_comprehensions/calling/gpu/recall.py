"""Kernels for graphics processors out of the cache: their text and launches, which need no mapper then.

Machine code has entries of its own, see `runtime.cubins`. The kernels of a text have the name of the def, so it is a
part of the key here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...cache.code import Code
from ...cache.key import Key, NotAKey, make_key
from ...cache.store import current
from ...codegen.gpu import GpuCode, GpuKernel
from ...compiler_gpu import GpuCompiled, compile_gpu
from ...dtypes import DTYPES
from ...inspection import logger
from ...loop_ir.nodes import Buffer, Launch, Space, Type
from ...options import MappingOptions
from ...runtime.cuda import ALIGNMENT
from ...target import GpuTarget
from ...tc_lang.function import BoundFunction, Function
from ..recall import Recipe, read_sites, recalled, written_sites


@dataclass(frozen=True, slots=True)
class Chosen:
    """Stands for the options where the cost model chooses them."""


def kernel(
    function: Function, bound: BoundFunction, options: MappingOptions | None, target: GpuTarget, *, aligned: bool
) -> GpuCompiled:
    """The kernel of a bound def, from the cache or made now.

    aligned: for arguments at multiples of `ALIGNMENT`. Raises ArgumentError where `target` has too little of something.
    """
    store = current()
    key = None if store.mode == "off" else key_of(function, bound, options, target, aligned=aligned)
    recipe = Recipe(
        bound.name,
        lambda: compile_gpu(bound, function.source, options, target, aligned=aligned),
        lambda made: (_facts(made), made.code.source.encode()),
        lambda code: _restored(code, function, bound, options, target, aligned),
    )
    return recalled(store, key, recipe)


def key_of(
    function: Function, bound: BoundFunction, options: MappingOptions | None, target: GpuTarget, *, aligned: bool
) -> Key | None:
    """The key of a kernel's text; None where it has none, as while the text of this package changes."""
    try:
        return make_key(
            function, bound, target, options=options or Chosen(), alignment=ALIGNMENT if aligned else 0,
            flags={"name": bound.name},
        )  # fmt: skip
    except NotAKey as reason:
        logger("cache").debug("%s: has no key: %s", bound.name, reason)
        return None


# --- as JSON -----------------------------------------------------------------------------------------------------


def _facts(made: GpuCompiled) -> dict[str, Any]:
    return {
        "kernels": list(map(_kernel, made.code.kernels)),
        "aligned": made.code.aligned,
        "arguments": list(map(_buffer, made.arguments)),
        "temporaries": list(map(_buffer, made.temporaries)),
        "sites": written_sites(made.sites, made.bound),
    }


def _restored(
    code: Code,
    function: Function,
    bound: BoundFunction,
    options: MappingOptions | None,
    target: GpuTarget,
    aligned: bool,
) -> GpuCompiled:
    facts = code.facts
    kernels = tuple(map(_read_kernel, facts["kernels"]))
    return GpuCompiled(
        bound, function.source, options, target, (), aligned,
        GpuCode(code.data.decode(), kernels, bool(facts["aligned"])),
        tuple(map(_read_buffer, facts["arguments"])), tuple(map(_read_buffer, facts["temporaries"])),
        read_sites(facts["sites"], bound),
    )  # fmt: skip


def _kernel(k: GpuKernel) -> list[Any]:
    return [
        k.name, k.launch.grid, k.launch.block, k.buffers, k.status, k.shared, k.dynamic,
        list(map(_buffer, k.arrays)), k.sizes, k.identifiers, k.local,
    ]  # fmt: skip


def _read_kernel(facts: list[Any]) -> GpuKernel:
    name, grid, block, buffers, status, shared, dynamic, arrays, sizes, identifiers, local = facts
    return GpuKernel(
        str(name), Launch(_triple(grid), _triple(block)), tuple(map(int, buffers)), bool(status), int(shared),
        int(dynamic), tuple(map(_read_buffer, arrays)), tuple(map(int, sizes)), tuple(map(str, identifiers)),
        int(local),
    )  # fmt: skip


def _triple(numbers: list[Any]) -> tuple[int, int, int]:
    x, y, z = map(int, numbers)
    return x, y, z


def _buffer(b: Buffer) -> list[Any]:
    return [b.name, b.type.dtype.name, b.shape, b.strides, b.space.name]


def _read_buffer(facts: list[Any]) -> Buffer:
    name, dtype, shape, strides, space = facts
    numbers = (tuple(map(int, shape)), tuple(map(int, strides)))
    return Buffer(str(name), Type(DTYPES[dtype]), *numbers, Space[space])
