"""The compiler of GPU kernels for any number of rows: kernels with parameters, whose grids a launch computes.

The def is bound to two typical numbers of rows along each axis. The first decides the mapping. In the polyhedral
mapper, extents of rows are parameters of isl's sets, so loops and their guards are right for all values. The order
of accesses is proved for them. Both bindings must give the same code, so no typical number is left in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import isqrt, prod
from time import perf_counter
from typing import Any

from ..codegen.gpu import cuda_printer, opencl_printer
from ..core import knobs
from ..core.errors import CannotLower, InternalError
from ..loop_ir import build
from ..loop_ir.binding_checks import check_bindings
from ..loop_ir.nodes import Buffer, Expr, Module, Parameter
from ..loop_ir.redirection import Redirect
from ..loop_ir.row_blocks import rows_variable
from ..loop_ir.show import format_program
from ..loop_ir.verify import verify
from ..options import GpuOptions, TileOptions
from ..runtime.cuda.disassembler import disassemble
from ..target import GpuTarget
from ..tc_lang.dynamic_sizes.open_extents import make_open_axes, open_extents, stride_variable, windows_variable
from ..tc_lang.dynamic_sizes.row_stages import base_tensor
from ..tc_lang.dynamic_sizes.rows import CannotGeneralize, Rows, list_dynamic_sizes, list_row_operands
from ..tc_lang.ir import BoundFunction, Role, Tensor
from ..tc_lang.syntax.printer import format_ranges
from ..tc_lang.transforms.canonical_bound import canonicalize
from ..tc_lang.transforms.legalize import legalize
from . import gpu_passes
from .compiled_kernel import keep_results
from .cpu_passes import Pass, check_sites_of, log_compilation, run_passes, with_original_names
from .gpu_passes import CompiledGpuKernel, GpuPassContext, check_limits
from .row_strides import GIVEN, PACKED, StrideClasses

TYPICAL_ROWS = 4096
"""About how many rows of first dimensions the mapping is chosen for: enough to fill a GPU."""
TYPICAL_LENGTH = 1025
"""The same for other dimensions. It is the least for both: with fewer than the threads of a block, a mapping would
have no loop over them."""


@dataclass(frozen=True)
class GpuRangeProblem:
    """A def to compile for any number of rows on a GPU.

    Attributes:
        axes: its rows, outermost first. row: the def for a single one along each.
        make: returns the def for numbers of rows, with the strides of the call where these are numbers.
        strides: of each tensor with rows, by name: numbers, `PACKED` and `GIVEN`.
        typical: about how many rows most calls have; 0 if that is not known.
    """

    axes: tuple[Rows, ...]
    row: BoundFunction
    make: Callable[[tuple[int, ...]], BoundFunction]
    strides: StrideClasses
    typical: int = 0

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Two typical numbers of rows along each axis. They are distinct primes, so that no tile divides them."""
        found: list[int] = []
        for factor in (1, 2):
            for rows in self.axes:
                usual = TYPICAL_LENGTH if any(place for _, place in rows.places) else TYPICAL_ROWS
                found.append(_next_prime(factor * max(TYPICAL_LENGTH, self.typical or usual), found))
        return tuple(found[: len(self.axes)]), tuple(found[len(self.axes) :])

    def bind_typical(self, number: int) -> BoundFunction:
        """The def for one of the two typical numbers of rows along each axis, 0 or 1."""
        return self.make(self.counts[number])


def _next_prime(least: int, taken: Collection[int]) -> int:
    """The first prime from `least` on that is not `taken`."""
    return next(n for n in count(least) if n not in taken and all(n % d for d in range(2, isqrt(n) + 1)))


@dataclass(frozen=True, eq=False)
class CompiledGpuRangeKernel(CompiledGpuKernel):
    """A GPU kernel for any number of rows.

    Attributes:
        bound: the def for a single row along each axis.
        problem: the def with its rows and strides, which `compile_gpu_range` compiled.
        parameters: the parameters of its module, which each call gets from `parameter_values`.
    """

    problem: GpuRangeProblem
    parameters: tuple[Parameter, ...]

    @property
    def axes(self) -> tuple[Rows, ...]:
        """The sizes that may have any value, outermost first."""
        return self.problem.axes

    @property
    def typical_bound(self) -> BoundFunction:
        return self.problem.bind_typical(0)

    @property
    def dynamic_sizes(self) -> tuple[str, ...]:
        """The sizes that may have any value."""
        return list_dynamic_sizes(self.axes)

    def parameter_values(self, sizes: Mapping[str, int], strides: Sequence[Sequence[int]]) -> dict[str, int]:
        """The values of the parameters in a call. sizes: of the def, by name. strides: of each of `arguments`."""
        values: dict[str, int] = {}
        for n, rows in enumerate(self.axes):
            count = prod(sizes[name] for name in rows.original_sizes)
            values[rows_variable(n)] = max(0, count - rows.reach + rows.step) // rows.step
            values[windows_variable(n)] = max(0, rows.step * (values[rows_variable(n)] - 1) + rows.reach)
        for buffer, given in zip(self.arguments, strides, strict=True):
            values |= {stride_variable(buffer.name, d): stride for d, stride in enumerate(given)}
        for buffer in self.temporaries:
            values |= _packed_strides(buffer, values)
        return values

    def argument_places(self) -> list[int]:
        return list(range(len(self.arguments)))

    def passes(self) -> tuple[Pass, ...]:
        """The pass "open", which makes the module with parameters, and those behind it."""
        opened = Pass("open", lambda bound, context: open_module(self.problem, context))
        return (opened, *gpu_passes.GPU_PASSES[-2:])

    @staticmethod
    def source_kinds() -> Mapping[str, Callable[[Any], str]]:
        return GPU_RANGE_KINDS

    @property
    def header(self) -> str:
        text = gpu_passes.def_text(self.text, self.bound.name)
        chosen = "chosen for typical sizes" if self.options is None else repr(self.options)
        about = (
            f"sizes: any {', '.join(self.dynamic_sizes)}",
            f"mapping: {chosen}",
            f"target: {self.target.name}",
        )
        return "\n".join(("", text.strip("\n"), "", *about))


def _packed_strides(b: Buffer, values: Mapping[str, int]) -> dict[str, int]:
    """The strides of a temporary that are variables, given the extents."""
    found: dict[str, int] = {}
    step = 1
    for d in reversed(range(len(b.shape))):
        name, extent = b.stride_variable(d), b.extent_variable(d)
        if name is None:
            step = b.strides[d]
        else:
            found[name] = step
        step *= b.shape[d] if extent is None else values[extent]
    return found


def compile_gpu_range(
    problem: GpuRangeProblem, text: str, options: GpuOptions | None, target: GpuTarget, *, aligned: bool = True
) -> CompiledGpuRangeKernel:
    """The kernel for any number of rows.

    Raises:
        CannotGeneralize: only kernels for exact sizes can serve the def.
        ArgumentError: `target` has too little of something.
    """
    start, context = perf_counter(), GpuPassContext(options, target, aligned)
    module = open_module(problem, context)
    block = problem.bind_typical(0)
    opened = perf_counter()
    results, seconds, dump = run_passes(gpu_passes.GPU_PASSES[-2:], block, text, context, {"open": module})
    simplified: Module = results["simplify"]
    compiled = CompiledGpuRangeKernel(
        problem.row, text, options, target, (("open", opened - start), *seconds), aligned, results["emit"],
        simplified.arguments, simplified.temporaries, check_sites_of(simplified, block), problem, simplified.parameters,
    )  # fmt: skip
    keep_results(compiled, results)
    log_compilation(compiled, dump)
    return compiled


def open_module(problem: GpuRangeProblem, context: GpuPassContext) -> Module:
    """The module with parameters. Raises as `compile_gpu_range`."""
    name = list_dynamic_sizes(problem.axes)[0]
    functions = open_functions(problem, context)
    try:
        module: Module = gpu_passes.import_polyhedral_mapper().lower_gpu_range(
            functions, context.options, context.target
        )
    except CannotLower as reason:
        raise CannotGeneralize(name, str(reason)) from reason
    module = _without_row_operands(problem, module)
    check_bindings(module)
    if knobs.current_knobs().verify:
        try:
            verify(module)
        except InternalError as error:
            raise InternalError(f"{problem.row.name}: for any number of rows: {error}") from error
    for kernel in module.kernels:
        check_limits(problem.row.name, kernel, context.target)
    return module


def open_functions(problem: GpuRangeProblem, context: GpuPassContext) -> tuple[BoundFunction, ...]:
    """The def (legalized) with variables for the extents of rows, for each of the typical numbers of rows.

    Raises CannotGeneralize if these are not all that depends on the numbers, or if some of it is for tensor cores.
    """
    name = list_dynamic_sizes(problem.axes)[0]
    plain = [canonicalize(b, b.name) for b in map(problem.bind_typical, range(len(problem.counts)))]
    legal = [legalize(b) for b in plain]
    if isinstance(context.options, TileOptions) or (
        context.options is None and gpu_passes.prefers_tensor_cores(legal[0], context.target)
    ):
        raise CannotGeneralize(name, "products on tensor cores are made for exact sizes")
    own = {mine.name: t.name for t, mine in zip(problem.bind_typical(0).tensors, plain[0].tensors, strict=True)}
    axes = make_open_axes(problem.axes, problem.counts, rows_variable)

    def open_strides(t: Tensor) -> list[int]:
        if t.role is not Role.TEMPORARY:
            classes = problem.strides.get(own[base_tensor(t.name, plain[0])], ())
            return [d for d, stride in enumerate(classes) if stride in (PACKED, GIVEN)]
        opened = [d for d, name in enumerate(t.extent_variables) if name is not None]
        return [d for d in range(len(t.shape)) if any(e > d for e in opened)]

    return open_extents(legal, axes, open_strides)


def _without_row_operands(problem: GpuRangeProblem, module: Module) -> Module:
    """`module` with variables in place of the operands that hold numbers of rows, and first rows of blocks."""
    block = problem.bind_typical(0)
    operands = list_row_operands(problem.axes)
    scalars: dict[str, Expr] = {
        mine.name: build.const(0) if operands[t.name][1] else build.var(rows_variable(operands[t.name][0]))
        for t, mine in zip(block.tensors, canonicalize(block).tensors, strict=True)
        if t.name in operands
    }
    if not scalars:
        return module
    redirect = Redirect({}, scalars)
    kernels = tuple(
        replace(k, body=redirect.stmt(k.body), readonly=tuple(n for n in k.readonly if n not in scalars))
        for k in module.kernels
    )
    return replace(module, arguments=tuple(b for b in module.arguments if b.name not in scalars), kernels=kernels)


def _with_names(k: CompiledGpuRangeKernel, module: Module) -> Module:
    return with_original_names(module, k.typical_bound)


def _format_schedule(k: CompiledGpuRangeKernel) -> str:
    functions = open_functions(k.problem, k.context)
    return str(gpu_passes.import_polyhedral_mapper().explain_gpu_range(functions[0], k.options, k.target))


GPU_RANGE_KINDS: Mapping[str, Callable[[CompiledGpuRangeKernel], str]] = {
    "tc": lambda k: k.text,
    "ranges": lambda k: f"for one row:\n{format_ranges(k.bound)}",
    "schedule": _format_schedule,
    "loops": lambda k: format_program(_with_names(k, k.rerun_until("simplify"))),
    "cuda": lambda k: (
        cuda_printer.emit_cuda(_with_names(k, k.rerun_until("simplify")), header=k.header, aligned=k.aligned).source
    ),
    "sass": lambda k: disassemble(k.cubin),
    "opencl": lambda k: opencl_printer.emit_opencl(_with_names(k, k.rerun_until("simplify")), header=k.text).source,
}
"""The printers of `source` for a GPU kernel for any number of rows."""
