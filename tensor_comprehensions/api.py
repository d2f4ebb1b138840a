"""`define`, and the operators it gives: Python callables on torch tensors and NumPy arrays.

Always holds: whatever is passed, only a `TCError` (the caller's mistake) or an `InternalError` (our bug) leaves a call,
and then nothing of the caller's has changed.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from .cache import checked_defs
from .cache.store import current_store
from .core.diagnostics import ScheduleView
from .core.error_boundary import only_tc_errors, shorten_traceback
from .core.errors import ArgumentError
from .core.interrupts import deferred_interrupts
from .dispatch.arguments import with_article
from .dispatch.call_steps import (
    Arguments,
    Shape,
    check_machine,
    check_runs_here,
    convert_outputs,
    evaluate_reference,
    normalize_detached,
    shapes_from_values,
    shapes_of,
)
from .dispatch.inline_cache import InlineCache
from .dispatch.kernel_table import CompileConfig, KernelTable
from .dispatch.signatures import format_docstring, format_signature, python_signature
from .kernel import Kernel, KernelDispatcher, Value
from .options import CpuOptions, MappingOptions, SparseOptions, TileOptions, check_sparse_options
from .runtime.cpu.host import host
from .structured.language.schedule_types import freeze_schedule
from .target import CpuTarget, GpuTarget
from .tc_lang.formats import Format
from .tc_lang.ir import BoundFunction, Function
from .tc_lang.lints import lint
from .torch_ext.autograd import Gradients, PythonGradient
from .torch_ext.registration import Overload, no_operator_error, operator_for_def

SEARCH_SECONDS = 10.0
"""What a search of contractions may take, unless told otherwise."""
if TYPE_CHECKING:
    from .autotuner.search_loop import TuningResult
    from .dispatch.cache_entry import CacheEntry
    from .dispatch.cuda.gpu_kernels import GpuKernel
    from .dispatch.sparse.sparse_run import SparseCall
    from .torch_ext.sparse_op import SparseOp


@only_tc_errors
def define(
    source: str,
    backward: Mapping[str, str | PythonGradient] | None = None,
    *,
    options: CpuOptions | SparseOptions | Literal["tuned"] | None = None,
    formats: Mapping[str, str] | None = None,
) -> Library:
    """Check a TC program and give its defs as operators.

    Nothing is compiled before the first call. Raises ParseError, CheckError or RangeError, which show the place.

    Args:
        backward: gradients of defs by their names, instead of those that are derived. A text is a def that takes inputs
            `A` and outputs `C` of the def under their names and gradients as `d_C`, and returns `d_A`; the initial
            value of an in/out output `C` is `C_0`. A Python function takes a tuple of the inputs and initial values,
            one of the outputs and one of their gradients, and gives a gradient or None for each of the first.
        options: how to lower, instead of the choice made from the sizes; `SparseOptions` are for calls with sparse
            operands. "tuned": as a search found for these sizes or else for the nearest ones; the cache tells. Nothing
            is searched then, unless TC_TUNE=auto.
        formats: how tensors of the defs are stored, by name, such as {"A": "csr"}, where the text does not say it.
    """
    functions = checked_defs.load_checked_defs(source)
    for note in lint(functions):
        warnings.warn(str(note), stacklevel=3)  # guarded stands in between
    if not isinstance(backward, Mapping | None):
        raise ArgumentError(
            f"backward is {with_article(type(backward).__name__)}",
            expected='gradients by the names of defs, such as {"f": "def f_backward(...) -> (...) {...}"}',
        )
    return Library(functions, {} if backward is None else backward, options, _formats_by_def(functions, formats))


class UnknownDefError(ArgumentError, AttributeError):
    """A library has no def of this name."""


class Library:
    """The operators of a TC program, in order: `library.name`, or `library["name"]`."""

    def __init__(
        self,
        functions: Sequence[Function],
        backward: Mapping[str, str | PythonGradient],
        options: CpuOptions | SparseOptions | Literal["tuned"] | None = None,
        formats: Mapping[str, Mapping[str, Format]] | None = None,
    ) -> None:
        stored = formats or {}
        self.__ops = {f.name: Op(f, backward.get(f.name), options, stored.get(f.name)) for f in functions}
        for name in backward:
            self[name]
        self.__dict__.update(self.__ops)

    @only_tc_errors
    def __getitem__(self, name: str) -> Op:
        if name in self.__ops:
            return self.__ops[name]
        near = difflib.get_close_matches(str(name), self.__ops, 1)
        raise UnknownDefError(
            f"the program has no def {name!r}",
            expected="one of " + ", ".join(self.__ops) if self.__ops else "",
            suggestion=f"did you mean '{near[0]}'?" if near else "",
        )

    @only_tc_errors
    def __call__(self, *_: Value, **__: Value) -> NoReturn:
        """A program is no operator. Raises ArgumentError that says so."""
        raise ArgumentError("a program is called by the name of a def", expected=repr(self).replace("\n ", ""))

    def __getattr__(self, name: str) -> Op:
        if name.startswith("_"):  # how Python itself asks what an object can do
            raise AttributeError(name)
        try:
            return self[name]
        except UnknownDefError as error:
            shorten_traceback(error)
            raise

    def __iter__(self) -> Iterator[Op]:
        return iter(self.__ops.values())

    def __len__(self) -> int:
        return len(self.__ops)

    def __contains__(self, name: object) -> bool:
        return name in self.__ops

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.__ops]

    def __repr__(self) -> str:
        return "\n".join(["Library of", *(f"  {format_signature(op.function)}" for op in self)])


class Op(KernelDispatcher):
    """A def as a function of tensors; `help(op)` tells what this one takes and gives.

    Tensors go in by position, in the order of the def; numbers where the def has numbers. In/out outputs take their
    initial value by keyword and are not changed. One output comes back as a tensor, several as a tuple; arrays of NumPy
    and of libraries that speak DLPack come back as they went in. `out` is a tensor, or a tuple of them, to write to
    instead of fresh memory.

    Raises:
        ArgumentError: an argument has another type, rank, size or device than the def says.
        RangeError: a subscript leaves its tensor.
    """

    def __init__(
        self,
        function: Function,
        backward: str | PythonGradient | None = None,
        options: CpuOptions | SparseOptions | Literal["tuned"] | None = None,
        formats: Mapping[str, Format] | None = None,
    ) -> None:
        if isinstance(options, str) and options != "tuned":
            raise ArgumentError(f"options is {options!r}", expected='CpuOptions(...), SparseOptions(...) or "tuned"')
        sparse = options if isinstance(options, SparseOptions) else None
        if sparse is not None:
            check_sparse_options(sparse)
        choose, choose_sparse = (_choose_tuned, _choose_tuned_sparse) if options == "tuned" else (None, None)
        kernels = KernelTable(function, choose, formats, sparse, choose_sparse)
        dense = CpuOptions() if sparse is not None or options is None or options == "tuned" else options
        machine = CompileConfig(cast("CpuOptions", dense), host())
        check_machine(machine.options, machine.target)
        keep = options is None or sparse is not None
        super().__init__(kernels, machine, Gradients(function, backward, Op, keep=keep))
        self._operator = operator_for_def(kernels, self._gradients, machine)
        self._asked = options
        self.__name__ = self.__qualname__ = function.name
        self.__doc__ = format_docstring(function)
        self.__signature__ = python_signature(function)

    def __repr__(self) -> str:
        return format_signature(self.function)

    def __reduce__(self) -> tuple[Callable[..., Op], tuple[Any, ...]]:
        """An operator is copied and pickled as its text; its kernels are made again where it arrives."""
        stored = {name: str(format) for name, format in self._kernels.formats.items()}
        return _define_named, (self.function.source, self.function.name, self._gradients.given, self._asked, stored)

    @property
    @only_tc_errors
    def overload(self) -> Overload:
        """The operator of torch that this def is, one of `torch.ops.tc`: all positional, initial values last.

        Its name tells what it computes, so that it stays what a traced graph means, and the same in every process.
        """
        if self._operator is None:
            raise no_operator_error(self.function)
        return self._operator.overload

    @only_tc_errors
    def backward_source(self) -> str:
        """The def that gives the gradients by all floating inputs, as text. Raises CheckError where none is known."""
        return self._gradients.source()

    @only_tc_errors
    def assemble(self, /, *tensors: Value, **initial: Value) -> Callable[..., Any]:
        """A function of operands with the same stored places as these, which computes the values of results only.

        The places of sparse results are found out once, here. Operands with other places: ArgumentError.
        """
        if not self._kernels.has_sparse(tensors):
            raise ArgumentError(
                f"{self.function.name} has no sparse operands and no sparse results", suggestion="call it"
            )
        return self.sparse_op.assemble(*tensors, **initial)

    @only_tc_errors
    def infer(self, /, *shapes: Any, **initial: Any) -> Shape | tuple[Shape, ...]:
        """The shapes of the outputs for the shapes of the arguments (tuples, tensors or arrays), without running.

        A number that is part of the kernel is given by its value. One output: its shape; several: a tuple of shapes.
        """
        bound = self._kernels.bind(shapes_from_values(self._kernels.interface, shapes, initial))
        found = tuple(bound.tensor(name).shape for name in bound.returns)
        return found[0] if len(found) == 1 else found

    @only_tc_errors
    def compile(
        self,
        /,
        *tensors: Value,
        options: CpuOptions | MappingOptions | TileOptions | SparseOptions | None = None,
        target: CpuTarget | GpuTarget | str | None = None,
        schedule: object = None,
        search: int = 0,
        search_seconds: float = SEARCH_SECONDS,
        **initial: Value,
    ) -> Any:
        """The kernel for these tensors, compiled now if there is none yet.

        Args:
            tensors, initial: as in a call; only their types, sizes and strides count, and what a search runs on.
            options: how to lower, instead of the choice made from the sizes: `CpuOptions`, `SparseOptions` for sparse
                operands, or for a graphics processor `MappingOptions` or `TileOptions`.
            target: a machine to compile for, instead of the one that the tensors are on: "cuda:sm_90" needs no GPU,
                and tensors on the CPU are examples for it.
            schedule: how the contractions of the def are lowered: a pipeline, an expert that returns one, or a
                mapping from the tensor that a contraction defines to one of these.
            search: run up to so many ways to lower each contraction, compare them with the reference evaluator and
                take the fastest, for later calls like this one too. With a schedule, its alternatives are what is run.
            search_seconds: about how long a search may take.
        """
        if self._kernels.has_sparse((*tensors, *initial.values())):
            if isinstance(target, CpuTarget) or schedule is not None or search:
                raise ArgumentError(
                    "sparse kernels take no CPU as target, no schedule and no search",
                    suggestion="pass options=SparseOptions(...)",
                )
            return self._compile_sparse(tensors, initial, options, target)
        if (
            isinstance(options, MappingOptions | TileOptions)
            or isinstance(target, GpuTarget | str)
            or self._kernels.any_cuda(tensors)
        ):
            return self._for_gpu(tensors, initial, options, target, schedule is not None or search)
        chosen = self._machine.options if options is None else cast("CpuOptions", options)  # which is checked now
        machine = CompileConfig(chosen, host() if target is None else target)
        check_machine(machine.options, machine.target)
        asked = chosen.schedule if schedule is None else schedule
        if asked is not None:
            machine = replace(machine, options=replace(chosen, schedule=freeze_schedule(asked)))
        arguments = normalize_detached(self._kernels.interface, tensors, initial)
        sizes = shapes_of(self.function, arguments)
        if search:
            self._search(arguments, machine, search, search_seconds)
        route = self._kernels.route(sizes, arguments, (), machine)
        return Kernel(self._kernels, machine, self._gradients, route.compiled)

    def _compile_sparse(
        self, tensors: Sequence[Value], initial: Mapping[str, Value], options: Any, target: GpuTarget | str | None
    ) -> Any:
        """The kernel for sparse operands, called as `options` say."""
        from .torch_ext.sparse_op import SparseOp

        if options is None:
            return self._sparse_kernel(self.sparse_op, tensors, initial, target)
        if not isinstance(options, SparseOptions):
            raise ArgumentError(
                f"options is {with_article(type(options).__name__)}, and an operand is sparse",
                expected="SparseOptions(...)",
            )
        check_sparse_options(options)
        kernels = self._kernels.sparse.with_options(options)
        op = SparseOp(kernels, self._gradients.make, self._gradients.given)
        return self._sparse_kernel(op, tensors, initial, target)

    @staticmethod
    def _sparse_kernel(
        op: SparseOp, tensors: Sequence[Value], initial: Mapping[str, Value], target: GpuTarget | str | None
    ) -> Any:
        from .dispatch.sparse.sparse_kernel import SparseKernel
        from .dispatch.sparse.sparse_kernels import find_device

        if target is not None or find_device((*tensors, *initial.values())) is not None:
            return op.kernels.compile_for_gpu(op, tensors, initial, target)
        compiled = op.kernels.compile(tensors, initial)
        return SparseKernel(op, compiled, op.kernels.dense_contractions(compiled.program.problem.function))

    def _for_gpu(
        self, tensors: Sequence[Value], initial: Mapping[str, Value], options: Any, target: Any, asked: object
    ) -> GpuKernel:
        """The kernel for a graphics processor."""
        if asked:
            raise ArgumentError("schedules and searches are for CPUs", suggestion="pass options=MappingOptions(...)")
        return self._kernels.gpu.compile(tensors, initial, options, target)

    @only_tc_errors
    def search(
        self,
        /,
        *tensors: Value,
        count: int = 16,
        seconds: float = SEARCH_SECONDS,
        schedule: object = None,
        **initial: Value,
    ) -> TuningResult:
        """Run up to `count` ways to lower each contraction in this process; the fastest is for calls like this.

        A quick form of `autotune` for what the cost model or a schedule offers. Gives every way with its time.
        Arguments as for `compile`.
        """
        machine = CompileConfig(CpuOptions(schedule=freeze_schedule(schedule)), host())
        return self._search(normalize_detached(self._kernels.interface, tensors, initial), machine, count, seconds)

    def _search(self, arguments: Arguments, machine: CompileConfig, count: int, seconds: float) -> TuningResult:
        """Search, and forget the kernels that calls like this one have used so far."""
        for name, value, least in (("number of candidates", count, 1), ("time to search", seconds, 0)):
            if not isinstance(value, (int, float)) or value < least:
                raise ArgumentError(f"the {name} is {value!r}", expected=f"a number, at least {least}")
        check_runs_here(self.function.name, machine.target)
        with deferred_interrupts():
            from .autotuner import op_api
        found = op_api.search_schedules(self._kernels, arguments, machine.options, int(count), float(seconds))
        self._kernels.set_tuned_options(shapes_of(self.function, arguments), arguments, machine, found.options)
        self._look_anew()
        return found

    @only_tc_errors
    def autotune(
        self,
        /,
        *tensors: Value,
        budget: float | str = "2min",
        generations: int = 500,
        population: int = 24,
        search: Literal["genetic", "random", "sweep"] = "genetic",
        seed: int = 0,
        devices: Sequence[str] = ("cpu",),
        executor: Executor | None = None,
        store: str | Path | None = None,
        options: CpuOptions | MappingOptions | TileOptions | SparseOptions | None = None,
        report: str | Path | None = None,
        **initial: Value,
    ) -> Any:
        """Search for options that make calls like this one fast, use them from now on, and keep them in the cache.

        Candidates run in other processes; the winner was compared with the reference evaluator. Only types, sizes and
        strides of the tensors count, and the values of integers. The first Ctrl-C ends a search with its best so far.

        Args:
            tensors, initial: as in a call.
            budget: of time: seconds, or a text such as "90s" or "1h 30min".
            generations, population: at most so many times so many candidates.
            search, seed: how candidates are chosen, the same ones each time as far as their times agree.
            devices: "cpu" or sets of processors such as "cpu:0-3", which measure side by side. Or one graphics
                processor, "cuda:0", whose mapping is searched; "emulated:sm_90" is one that is only modeled.
            executor: a `concurrent.futures.Executor` whose workers evaluate the candidates instead of `devices`.
            store: a folder for the results, instead of the cache's.
            options: what the search starts from and must beat.
            report: where to write an HTML page about the search, with the same as JSON beside it.

        With sparse operands candidates run in this process on the operands themselves, one option after the other, and
        results must be those of the start. They are for operands of these formats.

        Raises:
            ArgumentError: an argument means nothing, or no candidate works.
        """
        with deferred_interrupts():
            from .autotuner import op_api
            from .autotuner.device import is_gpu
        trying = op_api.parse_budget(budget, generations, population, seed, search)
        devices = (devices,) if isinstance(devices, str) else devices
        if isinstance(devices, Sequence) and any(map(is_gpu, devices)):
            with deferred_interrupts():
                from .autotuner import op_api_gpu
            tuned = op_api_gpu.autotune_gpu(
                self._kernels, tensors, initial, options, trying,
                devices=devices, executor=executor, store=store, report=report,
            )  # fmt: skip
            self._look_anew()
            return tuned.options
        if self._kernels.has_sparse((*tensors, *initial.values())):
            if tuple(devices) != ("cpu",) or executor is not None or report is not None:
                raise ArgumentError("a search with sparse operands takes no devices, executor or report")
            with deferred_interrupts():
                from .autotuner.sparse_search import autotune_sparse
            best = autotune_sparse(self._kernels.sparse, tensors, initial, options, trying, op_api.store_of(store))
            self._look_anew()
            return best.options
        arguments = normalize_detached(self._kernels.interface, tensors, initial)
        found = op_api.autotune(
            self._kernels, arguments, self._machine.options if options is None else options, trying,
            devices=devices, executor=executor, store=store, report=report,
        )  # fmt: skip
        self._kernels.set_tuned_options(shapes_of(self.function, arguments), arguments, self._machine, found.options)
        self._look_anew()
        return found.options

    @only_tc_errors
    def cache_entry(self, /, *tensors: Value, options: CpuOptions | None = None, **initial: Value) -> CacheEntry:
        """What the cache has for calls like this one, compiled and measured; a kernel of one's own can be put there.

        Arguments as for `compile`.
        """
        machine = self._machine if options is None else CompileConfig(options, host())
        check_machine(machine.options, machine.target)
        with deferred_interrupts():
            from .dispatch.cache_entry import cache_entry_of
        arguments = normalize_detached(self._kernels.interface, tensors, initial)
        bound, chosen = self._kernels.entry(arguments, machine)
        return cache_entry_of(self.function, bound, arguments, chosen, machine.target, current_store(), self._forget)

    def _forget(self) -> None:
        """Look for kernels anew from now on."""
        self._kernels.forget()
        self._look_anew()

    def _look_anew(self) -> None:
        """Ask the kernels which one to use, whatever earlier calls have used."""
        self._lanes, self._direct = InlineCache(self._kernels.interface), None
        if self._operator is not None:
            self._operator.forget()

    @only_tc_errors
    def reference(self, /, *tensors: Value, **initial: Value) -> Any:
        """What a call gives, computed by the reference evaluator: by the definition of the language, and slowly."""
        if self._kernels.has_sparse((*tensors, *initial.values())):
            return self._kernels.sparse.reference(tensors, initial)
        arguments = normalize_detached(self._kernels.interface, tensors, initial)
        bound = self._kernels.bind(shapes_of(self.function, arguments))
        return convert_outputs(evaluate_reference(bound, arguments), arguments.convert)

    @only_tc_errors
    def show(self, /, *tensors: Value, **initial: Value) -> ScheduleView:
        """The schedule tree of the kernel for `tensors`, or without tensors of the kernel used last.

        It prints as indented text, and a notebook shows it as a picture.
        """
        last = None if tensors or initial else self._kernels.routes.latest_value()
        compiled = last.compiled if last is not None else self.compile(*tensors, **initial).compiled
        return ScheduleView(compiled.source("schedule"))


def _define_named(
    source: str,
    name: str,
    backward: str | PythonGradient | None = None,
    options: CpuOptions | SparseOptions | Literal["tuned"] | None = None,
    formats: Mapping[str, str] | None = None,
) -> Op:
    return define(source, None if backward is None else {name: backward}, options=options, formats=formats)[name]


def _formats_by_def(functions: Sequence[Function], formats: Mapping[str, str] | None) -> dict[str, dict[str, Format]]:
    """The formats given to the tensors of each def. Raises ArgumentError for a name that no def has."""
    if not formats:
        return {}
    from .dispatch.sparse.sparse_tensor import to_format
    from .tc_lang.sparse_rules import check_formats

    check_formats(functions, formats)
    return {
        f.name: {t.name: to_format(formats[t.name], t.rank) for t in (*f.parameters, *f.results) if t.name in formats}
        for f in functions
    }


def _choose_tuned_sparse(function: Function, call: SparseCall, sizes: Mapping[str, int]) -> SparseOptions | None:
    with deferred_interrupts():
        from .autotuner.sparse_search import choose_tuned_sparse_options
    return choose_tuned_sparse_options(function, call, sizes)


def _choose_tuned(function: Function, bound: BoundFunction, arguments: Arguments) -> CpuOptions | None:
    with deferred_interrupts():
        from .autotuner.op_api import choose_tuned_options
    return choose_tuned_options(function, bound, arguments)
