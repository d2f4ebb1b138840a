"""`define` and the operators that it returns: Python callables on torch tensors and NumPy arrays.

Invariant: a call raises only a `TCError` (the caller's mistake) or an `InternalError` (our bug), and a failed call
changes none of the caller's tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from .cache import checked_defs
from .cache.store import current_store
from .core.checked_fields import describe_value, suggest_word
from .core.diagnostics import ScheduleView
from .core.error_boundary import only_tc_errors, shorten_traceback
from .core.errors import ArgumentError
from .core.interrupts import deferred_interrupts
from .dispatch.arguments import with_article
from .dispatch.call_steps import (
    Arguments,
    Shape,
    check_keywords,
    check_machine,
    convert_outputs,
    evaluate_reference,
    normalize_detached,
    shapes_from_values,
    shapes_of,
)
from .dispatch.compile_statistics import KernelSummary, summarize_kernel
from .dispatch.dynamic_sizes import Dynamic, check_dynamic
from .dispatch.inline_cache import InlineCache
from .dispatch.kernel_table import CompileConfig, KernelTable
from .dispatch.signatures import format_docstring, format_signature, python_signature
from .kernel import Kernel, KernelDispatcher, Value
from .options import CpuOptions, MappingOptions, SparseOptions, TileOptions
from .runtime.cpu.host import host
from .structured.language.schedule_types import freeze_schedule
from .target import CpuTarget, GpuTarget
from .tc_lang.formats import Format
from .tc_lang.ir import BoundFunction, Function
from .tc_lang.semantics.lints import lint
from .torch_ext.autograd import Gradients, PythonGradient
from .torch_ext.registration import Overload, no_operator_error, operator_for_def

if TYPE_CHECKING:
    from .autotuner.search_loop import TuningResult
    from .dispatch.cache_entry import CacheEntry
    from .dispatch.cuda.gpu_kernels import GpuKernel
    from .dispatch.sparse.sparse_gpu_kernels import SparseGpuKernel
    from .dispatch.sparse.sparse_kernel import SparseKernel
    from .dispatch.sparse.sparse_run import SparseCall
    from .explain.kernel_report import Report
    from .torch_ext.sparse_op import SparseOp


@only_tc_errors
def define(
    source: str,
    backward: Mapping[str, str | PythonGradient] | None = None,
    *,
    options: CpuOptions | SparseOptions | Literal["tuned"] | None = None,
    formats: Mapping[str, str] | None = None,
    dynamic: Dynamic = None,
) -> Library:
    """Check a TC program and return its defs as operators. Nothing is compiled before the first call.

    Args:
        source: the program.
        backward: gradients by the names of defs, instead of derived ones. A text is a def that takes inputs `A` and
            outputs `C` of the def under their names and gradients as `d_C`, and returns `d_A`; the initial value of an
            in/out output `C` is `C_0`. A Python function takes three tuples: the inputs and initial values, the
            outputs, and the gradients of the outputs. It returns a gradient or None for each element of the first.
        options: how to lower, instead of options chosen from the sizes; `SparseOptions` are for calls with sparse
            operands. "tuned" takes from the cache the options that a search found for these or the nearest sizes.
            It does not search, unless TC_TUNE=auto.
        formats: storage formats by the names of tensors, such as {"A": "csr"}, for tensors without one in the text.
        dynamic: sizes that change from call to call, such as {"N"}, or {"N": 64} with a typical value. If they are
            only numbers of rows, one kernel serves all their values from the first call on. True: all sizes. False:
            no size, so each combination gets its own kernel. None: a size becomes dynamic at its third value.

    Returns:
        The defs of the program as a `Library`.

    Raises:
        ParseError, CheckError, RangeError: the program is wrong; the error shows where.
    """
    functions = checked_defs.load_checked_defs(source)
    for note in lint(functions):
        warnings.warn(str(note), stacklevel=3)  # skips the frame of `only_tc_errors`
    if not isinstance(backward, Mapping | None):
        raise ArgumentError(
            f"backward is {with_article(type(backward).__name__)}",
            expected='gradients by the names of defs, such as {"f": "def f_backward(...) -> (...) {...}"}',
        )
    check_dynamic(dynamic, functions)
    stored = _formats_by_def(functions, formats)
    return Library(functions, {} if backward is None else backward, options, stored, dynamic)


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
        dynamic: Dynamic = None,
    ) -> None:
        stored = formats or {}
        self.__ops = {f.name: Op(f, backward.get(f.name), options, stored.get(f.name), dynamic) for f in functions}
        for name in backward:
            self[name]
        self.__dict__.update(self.__ops)

    @only_tc_errors
    def __getitem__(self, name: str) -> Op:
        if isinstance(name, str) and name in self.__ops:
            return self.__ops[name]
        raise UnknownDefError(
            f"the program has no def {describe_value(name)}",
            expected="one of " + ", ".join(self.__ops) if self.__ops else "",
            suggestion=suggest_word(name, self.__ops),
        )

    @only_tc_errors
    def __call__(self, *_: Value, **__: Value) -> NoReturn:
        """Raise ArgumentError: a program is not an operator."""
        raise ArgumentError("a program is called by the name of a def", expected=repr(self).replace("\n ", ""))

    def __getattr__(self, name: str) -> Op:
        if name.startswith("_"):  # protocol lookups of Python itself
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
    """A def as a function of tensors; `help(op)` prints its parameters and results.

    Pass tensors and numbers by position, in the order of the def, and initial values of in/out outputs by keyword;
    these tensors do not change. One output comes back as a tensor, several as a tuple. Arrays of NumPy and of libraries
    that support DLPack give arrays of the same library. `out` is a tensor, or a tuple of tensors, to write to.

    Raises:
        ArgumentError: an argument has the wrong type, rank, size or device.
        RangeError: a subscript leaves its tensor.
    """

    def __init__(
        self,
        function: Function,
        backward: str | PythonGradient | None = None,
        options: CpuOptions | SparseOptions | Literal["tuned"] | None = None,
        formats: Mapping[str, Format] | None = None,
        dynamic: Dynamic = None,
    ) -> None:
        if isinstance(options, str) and options != "tuned":
            raise ArgumentError(f"options is {options!r}", expected='CpuOptions(...), SparseOptions(...) or "tuned"')
        sparse = options if isinstance(options, SparseOptions) else None
        choose, choose_sparse = (_choose_tuned, _choose_tuned_sparse) if options == "tuned" else (None, None)
        kernels = KernelTable(function, choose, formats, sparse, choose_sparse, dynamic)
        dense = CpuOptions() if sparse is not None or options is None or options == "tuned" else options
        machine = CompileConfig(cast("CpuOptions", dense), host())
        check_machine(machine.options, machine.target)
        keep = options is None or sparse is not None
        derived = partial(Op, dynamic=dynamic)  # derived operators have the dynamic sizes of the def
        super().__init__(kernels, machine, Gradients(function, backward, derived, keep=keep))
        self._operator = operator_for_def(kernels, self._gradients, machine)
        self._asked = options
        self.__name__ = self.__qualname__ = function.name
        self.__doc__ = format_docstring(function)
        self.__signature__ = python_signature(function)

    def __repr__(self) -> str:
        return format_signature(self.function)

    def __reduce__(self) -> tuple[Callable[..., Op], tuple[Any, ...]]:
        """Pickle the text of the operator. The copy compiles its own kernels."""
        stored = {name: str(format) for name, format in self._kernels.formats.items()}
        asked = self._kernels.dynamic.asked
        given = self._gradients.given
        return _define_named, (self.function.source, self.function.name, given, self._asked, stored, asked)

    @property
    @only_tc_errors
    def kernels(self) -> tuple[KernelSummary, ...]:
        """The loaded CPU kernels of this operator, those for any number of rows first."""
        return tuple(map(summarize_kernel, self._kernels.loaded_kernels()))

    @property
    @only_tc_errors
    def overload(self) -> Overload:
        """The `torch.ops.tc` operator of this def: all arguments by position, initial values last.

        Its name ends in a hash of the def, so a saved graph keeps its meaning in every process.
        """
        if self._operator is None:
            raise no_operator_error(self.function)
        return self._operator.overload

    @only_tc_errors
    def backward_source(self) -> str:
        """The text of the def that computes the gradients of all floating-point inputs.

        Raises CheckError if the def has no known gradient.
        """
        return self._gradients.source()

    @only_tc_errors
    def assemble(self, /, *tensors: Value, **initial: Value) -> Callable[..., Any]:
        """Compute the sparsity patterns of sparse results once, and return a function that computes their values.

        The function takes operands with the same stored positions as `tensors`. Others raise ArgumentError.
        """
        if not self._kernels.has_sparse(tensors):
            raise ArgumentError(
                f"{self.function.name} has no sparse operands and no sparse results", suggestion="call it"
            )
        return self.sparse_op.assemble(*tensors, **initial)

    @only_tc_errors
    def infer(self, /, *shapes: Any, **initial: Any) -> Shape | tuple[Shape, ...]:
        """Infer the shapes of the outputs from the shapes of the arguments (tuples, tensors or arrays).

        For a number that is part of the kernel, pass its value. Returns one shape, or a tuple for several outputs.
        """
        bound = self._kernels.bind(shapes_from_values(self._kernels.call_signature, shapes, initial))
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
        dynamic: Dynamic = None,
        **initial: Value,
    ) -> Kernel | GpuKernel | SparseKernel | SparseGpuKernel:
        """Return the kernel for these tensors; compile it now if necessary.

        Args:
            tensors, initial: as in a call; only their types, sizes and strides count.
            options: how to lower, instead of options chosen from the sizes: `CpuOptions`, `SparseOptions` for sparse
                operands, `MappingOptions` or `TileOptions` for a GPU.
            target: a machine to compile for, by default the device of the tensors. "cuda:sm_90" needs no GPU; tensors
                on the CPU then only supply shapes.
            schedule: how to lower the contractions of the def: a schedule, a heuristic that returns one, or a mapping
                from the tensor that a contraction defines to one of these.
            dynamic: as for `define`; None: the sizes that the operator was defined with, if any.

        Raises:
            ArgumentError: the tensors do not fit the def, or the options, the target or the schedule do not apply.
        """
        check_keywords(self._kernels.call_signature, initial, type(self).compile)
        check_dynamic(dynamic, (self.function,))
        if self._kernels.has_sparse((*tensors, *initial.values())):
            if isinstance(target, CpuTarget) or schedule is not None:
                raise ArgumentError(
                    "sparse kernels take no CPU as target and no schedule",
                    suggestion="pass options=SparseOptions(...)",
                )
            return self._compile_sparse(tensors, initial, options, target)
        if (
            isinstance(options, MappingOptions | TileOptions)
            or isinstance(target, GpuTarget | str)
            or self._kernels.any_cuda(tensors)
        ):
            return self._compile_for_gpu(tensors, initial, options, target, schedule, dynamic)
        chosen = self._machine.options if options is None else cast("CpuOptions", options)  # `check_machine` checks it
        machine = CompileConfig(chosen, host() if target is None else target)
        check_machine(machine.options, machine.target)
        asked = chosen.schedule if schedule is None else schedule
        if asked is not None:
            machine = replace(machine, options=replace(chosen, schedule=freeze_schedule(asked)))
        arguments = normalize_detached(self._kernels.call_signature, tensors, initial)
        sizes = shapes_of(self.function, arguments)
        kernels = self._kernels if dynamic is None else self._kernels.with_dynamic(dynamic)
        route = kernels.find_or_make_kernel(sizes, arguments, (), machine, is_call=False)
        return Kernel(kernels, machine, self._gradients, route.compiled)

    def _compile_sparse(
        self, tensors: Sequence[Value], initial: Mapping[str, Value], options: Any, target: GpuTarget | str | None
    ) -> SparseKernel | SparseGpuKernel:
        """The kernel for sparse operands with these options."""
        from .torch_ext.sparse_op import SparseOp

        if options is None:
            return self._sparse_kernel(self.sparse_op, tensors, initial, target)
        if not isinstance(options, SparseOptions):
            raise ArgumentError(
                f"options is {with_article(type(options).__name__)}, and an operand is sparse",
                expected="SparseOptions(...)",
            )
        kernels = self._kernels.sparse.with_options(options)
        op = SparseOp(kernels, self._gradients.make, self._gradients.given)
        return self._sparse_kernel(op, tensors, initial, target)

    @staticmethod
    def _sparse_kernel(
        op: SparseOp, tensors: Sequence[Value], initial: Mapping[str, Value], target: GpuTarget | str | None
    ) -> SparseKernel | SparseGpuKernel:
        from .dispatch.sparse.sparse_kernel import SparseKernel
        from .dispatch.sparse.sparse_kernels import find_device

        if target is not None or find_device((*tensors, *initial.values())) is not None:
            return op.kernels.compile_for_gpu(op, tensors, initial, target)
        compiled = op.kernels.compile(tensors, initial)
        return SparseKernel(op, compiled, op.kernels.dense_contractions(compiled.plan.problem.function))

    def _compile_for_gpu(
        self,
        tensors: Sequence[Value],
        initial: Mapping[str, Value],
        options: Any,
        target: Any,
        schedule: object,
        dynamic: Dynamic,
    ) -> GpuKernel:
        """The kernel for a GPU."""
        if schedule is not None:
            raise ArgumentError("schedules are for CPUs", suggestion="pass options=MappingOptions(...)")
        kernels = self._kernels if dynamic is None else self._kernels.with_dynamic(dynamic)
        return kernels.gpu.compile(tensors, initial, options, target)

    @only_tc_errors
    def autotune(
        self,
        /,
        *tensors: Value,
        budget: float | str = "2min",
        generations: int = 500,
        population: int = 24,
        search: Literal["genetic", "random", "sweep", "schedules"] = "genetic",
        seed: int = 0,
        devices: Sequence[str] = ("cpu",),
        executor: Executor | None = None,
        store: str | Path | None = None,
        options: CpuOptions | MappingOptions | TileOptions | SparseOptions | None = None,
        report: str | Path | None = None,
        **initial: Value,
    ) -> TuningResult[CpuOptions | MappingOptions | TileOptions | SparseOptions]:
        """Search for options that make calls like this one fast. Later calls use them, and the cache keeps them.

        Candidates run in other processes, and are compared with the reference evaluator. Only types, sizes and strides
        of the tensors count, and the values of integers. The first Ctrl-C ends the search with the best result so far.

        `search="schedules"` is the quick form: it runs up to `population` schedules of each contraction in this
        process, those that the cost model ranks first or the alternatives of `options.schedule`.

        With sparse operands, candidates run in this process on the operands themselves, one option after the other, and
        must give the results of the first. The winner serves operands of the same formats.

        Args:
            tensors, initial: as in a call.
            budget: time limit: seconds, or a text such as "90s" or "1h 30min".
            generations, population: most generations, and most candidates in each.
            search: the search method.
            seed: seed of the random choices. The same seed and the same measured times give the same candidates.
            devices: "cpu"; or sets of processors such as "cpu:0-3", which measure in parallel; or one GPU, "cuda:0",
                whose mapping is searched; or "emulated:sm_90", a GPU in the emulator with modeled times.
            executor: a `concurrent.futures.Executor` whose workers evaluate the candidates instead of `devices`.
            store: a folder for the results, instead of the cache.
            options: the options to start from and to beat.
            report: where to write an HTML page about the search; a JSON file is written beside it.

        Returns:
            The winner (`.options`), its time and speedup, and the outcomes of all candidates.

        Raises:
            ArgumentError: an argument is invalid, or no candidate works.
        """
        check_keywords(self._kernels.call_signature, initial, type(self).autotune)
        with deferred_interrupts():
            from .autotuner.autotune_call import autotune_call
            from .autotuner.op_api import parse_budget
        trying = parse_budget(budget, generations, population, seed, search)
        found = autotune_call(
            self._kernels, self._machine, tensors, initial, options, trying,
            devices=devices, executor=executor, store=store, report=report,
        )  # fmt: skip
        self._clear_inline_caches()
        return found

    @only_tc_errors
    def cache_entry(self, /, *tensors: Value, options: CpuOptions | None = None, **initial: Value) -> CacheEntry:
        """The cache entry of calls like this one: kernel, measurements, and a way to inject your own kernel.

        Arguments as for `compile`.
        """
        machine = self._machine if options is None else CompileConfig(options, host())
        check_machine(machine.options, machine.target)
        with deferred_interrupts():
            from .dispatch.cache_entry import cache_entry_of
        arguments = normalize_detached(self._kernels.call_signature, tensors, initial)
        bound, chosen = self._kernels.entry(arguments, machine)
        return cache_entry_of(self.function, bound, arguments, chosen, machine.target, current_store(), self._forget)

    def _forget(self) -> None:
        """Drop all loaded kernels: the next call loads or compiles."""
        self._kernels.forget()
        self._clear_inline_caches()

    def _clear_inline_caches(self) -> None:
        """Clear the inline caches: the next call asks the kernel table."""
        self._inline_cache, self._direct = InlineCache(self._kernels.call_signature), None
        if self._operator is not None:
            self._operator.forget()

    @only_tc_errors
    def reference(self, /, *tensors: Value, **initial: Value) -> Any:
        """The result of a call, computed by the reference evaluator. It is slow, and correct by definition."""
        if self._kernels.has_sparse((*tensors, *initial.values())):
            return self._kernels.sparse.reference(tensors, initial)
        arguments = normalize_detached(self._kernels.call_signature, tensors, initial)
        bound = self._kernels.bind(shapes_of(self.function, arguments))
        return convert_outputs(evaluate_reference(bound, arguments), arguments.convert)

    @only_tc_errors
    def show(self, /, *tensors: Value, **initial: Value) -> ScheduleView:
        """The schedule tree of the kernel for `tensors`; without tensors, of the kernel used last.

        It prints as indented text; a notebook shows it as a picture.
        """
        last = None if tensors or initial else self._kernels.latest
        compiled = last.compiled if last is not None else self.compile(*tensors, **initial).compiled
        return ScheduleView(compiled.source("schedule"))

    @only_tc_errors
    def explain(
        self,
        /,
        *tensors: Value,
        options: CpuOptions | MappingOptions | TileOptions | SparseOptions | None = None,
        target: CpuTarget | GpuTarget | str | None = None,
        schedule: object = None,
        measure: bool = False,
        journal: str | Path | None = None,
        **initial: Value,
    ) -> Report:
        """Explain the kernel of a call like this: the fusion, the plans and rejected alternatives, and the code.

        `print` the report for the short form; `save("x.html")` writes a self-contained page that links def, schedule,
        loops and machine code. Arguments as for `compile`.

        Args:
            measure: also run the call on one thread, and measure the limits of this machine; takes about a second.
            journal: the journal of a search for this def, sizes and machine, to show in the report. By default, the
                report shows the last search of this process.
        """
        check_keywords(self._kernels.call_signature, initial, type(self).explain)
        if not isinstance(journal, str | PathLike | None):
            raise ArgumentError(f"the journal is {describe_value(journal)}", expected="the path of a file")
        kernel = self.compile(*tensors, options=options, target=target, schedule=schedule, **initial)
        if not isinstance(kernel, Kernel):
            if measure or journal is not None:
                raise ArgumentError(
                    "only kernels for CPUs and dense operands are measured, and have journals",
                    suggestion="leave out measure and journal",
                )
            return kernel.explain()
        from .dispatch.call_facts import collect_call_facts

        report = kernel._make_report(asked=self._asked == "tuned", journal=None if journal is None else Path(journal))
        values = (*tensors, *initial.values())
        report = replace(report, calls=collect_call_facts(self._kernels, self._inline_cache, kernel.compiled, values))
        if not measure:
            return report
        from .explain.measure import measured_report

        arguments = normalize_detached(self._kernels.call_signature, tensors, initial)
        bound = self._kernels.bind(shapes_of(self.function, arguments))
        return measured_report(report, bound, kernel.compiled.target, lambda: kernel(*tensors, **initial))


def _define_named(
    source: str,
    name: str,
    backward: str | PythonGradient | None = None,
    options: CpuOptions | SparseOptions | Literal["tuned"] | None = None,
    formats: Mapping[str, str] | None = None,
    dynamic: Dynamic = None,
) -> Op:
    given = None if backward is None else {name: backward}
    return define(source, given, options=options, formats=formats, dynamic=dynamic)[name]


def _formats_by_def(functions: Sequence[Function], formats: Mapping[str, str] | None) -> dict[str, dict[str, Format]]:
    """The formats given to the tensors of each def.

    Raises:
        ArgumentError: no def has a tensor of that name, or a def declares another format.
        CheckError: a def uses the tensor in a way that only dense tensors allow.
    """
    if formats is None:
        return {}
    from .dispatch.sparse.sparse_tensor import to_format
    from .tc_lang.semantics.sparse_rules import check_formats, with_formats

    check_formats(functions, formats)
    found = {
        f.name: {t.name: to_format(formats[t.name], t.rank) for t in (*f.parameters, *f.results) if t.name in formats}
        for f in functions
    }
    for f in functions:
        with_formats(f, found[f.name])
    return found


def _choose_tuned_sparse(function: Function, call: SparseCall, sizes: Mapping[str, int]) -> SparseOptions | None:
    with deferred_interrupts():
        from .autotuner.sparse_search import choose_tuned_sparse_options
    return choose_tuned_sparse_options(function, call, sizes)


def _choose_tuned(function: Function, bound: BoundFunction, arguments: Arguments) -> CpuOptions | None:
    with deferred_interrupts():
        from .autotuner.op_api import choose_tuned_options
    return choose_tuned_options(function, bound, arguments)
