"""The CPU compiler: `PASSES` lists every step from a bound def to its kernel.

`run_passes` times the passes, and after each pass dumps (`TC_DUMP`), logs (`TC_LOGS`) and verifies (`TC_VERIFY`) the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from logging import DEBUG
from time import perf_counter
from typing import Any

from ..codegen.c import c_printer
from ..codegen.llvm import llvm_printer
from ..core import knobs
from ..core.decisions import open_book
from ..core.diagnostics import Dump, get_logger
from ..core.errors import ArgumentError, CannotLower, InternalError
from ..core.interrupts import deferred_interrupts
from ..core.pass_steps import StepReport, watch_steps
from ..core.recursion_limit import raise_recursion_limit
from ..loop_ir.binding_checks import check_bindings
from ..loop_ir.nodes import CheckSite, Module, Stmt
from ..loop_ir.passes.partition_loops import partition_loops
from ..loop_ir.passes.scalar_promotion import hoist_accumulators
from ..loop_ir.passes.simplify import simplify
from ..loop_ir.passes.unroll import unroll_loops
from ..loop_ir.passes.vectorize import vectorize_loops
from ..loop_ir.rename import rename
from ..loop_ir.show import format_program
from ..loop_ir.verify import verify
from ..options import CpuOptions
from ..runtime.cpu import host_symbols, object_code
from ..runtime.cpu.object_code import ObjectCode
from ..structured.language.schedule_types import schedule_for
from ..structured.language.select_schedule import explain_resolved, resolve_schedule
from ..structured.language.translate_schedule import translate_schedule
from ..structured.op import StructuredOp
from ..target import CpuTarget
from ..tc_lang.ir import BoundFunction
from ..tc_lang.syntax.printer import format_ranges
from ..tc_lang.transforms.canonical_bound import OriginalNames, canonicalize, translate_errors
from ..tc_lang.transforms.legalize import legalize
from .compiled_kernel import CompiledBase, CompiledCpuKernel, PassContext, keep_results


def _import_polyhedral_lowering() -> Any:
    """The polyhedral lowering, imported on first use, because a kernel from the cache needs no isl."""
    with deferred_interrupts():
        from ..polyhedral.cpu import lower
    return lower


@dataclass(frozen=True, slots=True)
class Pass:
    """One step of a compiler.

    Attributes:
        name: its name in dumps, logs and results.
        run: transforms (value, context).
        show: prints the result; None if it is not printable.
        suffix: the suffix of its dump.
        topic: the log topic that prints its result.
        repeats: the earlier pass that it repeats; it is skipped if no pass in between has changed anything.
    """

    name: str
    run: Callable[[Any, Any], Any]
    show: Callable[[Any], str] | None = format_program
    suffix: str = "txt"
    topic: str = ""
    repeats: str = ""

    def apply(self, value: Any, context: Any, results: Mapping[str, Any]) -> Any:
        """Transform `value`. results: the results of earlier passes by name; `value` is the last one."""
        return value if self.repeats and value is results[self.repeats] else self.run(value, context)


def _lower(bound: BoundFunction, context: PassContext) -> Module:
    try:
        module: Module = _import_polyhedral_lowering().lower_cpu(bound, context.options, context.target)
    except CannotLower as refusal:
        raise InternalError(f"{context.name or bound.name} cannot be lowered: {refusal}") from refusal
    check_bindings(module)
    return module


def _transform_bodies(transform: Callable[[Stmt], Stmt]) -> Callable[[Module, PassContext], Module]:
    """A pass that applies `transform` to the body of every kernel; it returns the same module if no body changes."""

    def run(module: Module, _: PassContext) -> Module:
        bodies = [transform(k.body) for k in module.kernels]
        if all(new is k.body for new, k in zip(bodies, module.kernels, strict=True)):
            return module
        kernels = (replace(k, body=new) for new, k in zip(bodies, module.kernels, strict=True))
        return replace(module, kernels=tuple(kernels))

    return run


def _emit_llvm_ir(module: Module, context: PassContext) -> str:
    check_bindings(module)
    return llvm_printer.emit_llvm(module, context.target, host_symbols.vector_functions())


PASSES = (
    Pass("canonicalize", lambda bound, context: canonicalize(bound), repr),
    Pass("legalize", lambda bound, context: legalize(bound), repr),
    Pass("lower", _lower),
    Pass("simplify", _transform_bodies(simplify), topic="loops"),
    Pass("partition", _transform_bodies(partition_loops)),
    Pass("vectorize", _transform_bodies(vectorize_loops)),
    Pass("unroll", _transform_bodies(unroll_loops)),
    Pass("hoist", _transform_bodies(hoist_accumulators)),
    Pass("simplify_again", _transform_bodies(simplify), repeats="simplify"),
    Pass("emit", _emit_llvm_ir, str, "ll", "code"),
    Pass("assemble", lambda text, context: object_code.assemble(text, context.target), None),
    Pass("load", lambda code, context: object_code.load_object(code), None),
)
LOWERING = PASSES[:3]
"""The passes up to the lowering; later ones do not depend on options."""


def check_sites_of(module: Module, bound: BoundFunction) -> tuple[CheckSite, ...]:
    """The check sites of `module` with the tensor names of `bound`."""
    spelling = OriginalNames.of(bound) if module.sites else None
    return tuple(replace(s, tensor=spelling.name(s.tensor)) for s in module.sites) if spelling else ()


def with_original_names(module: Module, bound: BoundFunction) -> Module:
    """The lowered `module` of `bound`, with the names of `bound` instead of canonical ones."""
    return rename(module, OriginalNames.of(bound).name, bound.name)


KINDS: dict[str, Callable[[CompiledCpuKernel], str]] = {
    "tc": lambda k: k.text,
    "ranges": lambda k: format_ranges(k.bound),
    "schedule": lambda k: _import_polyhedral_lowering().explain_cpu(legalize(k.bound), k.options, k.target),
    "loops": lambda k: format_program(with_original_names(k.rerun_until("simplify"), k.bound)),
    "c": lambda k: c_printer.emit_c(with_original_names(k.rerun_until("simplify"), k.bound), header=k.text),
    "llvm": lambda k: k.rerun_until("emit"),
    "asm": lambda k: object_code.host_assembly(k.rerun_until("emit"), k.target),
}
"""The printers of `source` for a CPU kernel."""


def compile_function(bound: BoundFunction, text: str, options: CpuOptions, target: CpuTarget) -> CompiledCpuKernel:
    """Compile `bound`, whose def has the source `text`.

    Raises:
        ArgumentError: a schedule in `options` does not apply; see `resolve_schedules`.
    """
    context = pass_context_of(bound, options, target)
    with log_decisions(bound):
        results, seconds, dump = run_passes(PASSES, bound, text, context)
    module: Module = results["simplify_again"]
    compiled = CompiledCpuKernel(
        bound, text, options, target, seconds, results["assemble"], results["load"],
        temporary_bytes(module), check_sites_of(module, bound), len(module.kernels),
    )  # fmt: skip
    keep_results(compiled, {name: result for name, result in results.items() if name not in ("assemble", "load")})
    if dump is not None:
        dump.write(2 + len(PASSES), "assembly", compiled.source("asm"), "s")
    log_compilation(compiled, dump)
    return compiled


def lower_only(bound: BoundFunction, text: str, context: PassContext) -> dict[str, Module]:
    """The results of `LOWERING` by pass; the last one, a module, determines the code."""
    return run_passes(LOWERING, bound, text, context)[0]


def compile_object(
    bound: BoundFunction, text: str, context: PassContext, made: Mapping[str, Any]
) -> tuple[ObjectCode, tuple[int, ...]]:
    """The object code, for another process to load, and the bytes of each temporary.

    made: the result of `lower_only`.
    """
    results, _, _ = run_passes(PASSES[len(LOWERING) : -1], bound, text, context, made)
    return results["assemble"], temporary_bytes(results["simplify_again"])


@raise_recursion_limit()
def run_passes(
    passes: Sequence[Pass], bound: BoundFunction, text: str, context: Any, made: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], tuple[tuple[str, float], ...], Dump | None]:
    """Run passes on `bound`. Returns the results by pass, (pass, seconds) in order, and the dump if there is one.

    Args:
        text: the source of the def, for the dump.
        context: an object with `options` and `target`, which every pass gets.
        made: the results of earlier passes, in order; the first of `passes` gets the last of them.
    """
    dump = Dump.of(f"{bound.name}_{kernel_digest(bound, context.options, context.target)}")
    if dump is not None and not made:
        dump.write(0, "def", text, "tc")
        dump.write(1, "bound", repr(bound))
    results: dict[str, Any] = dict(made or {})
    value: Any = next(reversed(results.values()), bound)
    seconds: list[tuple[str, float]] = []
    for number, step in enumerate(passes, 2 + len(results)):
        start, before = perf_counter(), value
        steps: list[StepReport] = []
        with translate_errors(bound), watch_steps(steps.append if dump is not None or _logs_times() else None):
            value = results[step.name] = step.apply(value, context, results)
        seconds.append((step.name, perf_counter() - start))
        _observe_steps(bound, step, steps, number, dump)
        _log_and_dump_pass(bound, step, value, number, dump)
        if isinstance(value, Module) and value is not before and knobs.current_knobs().verify:
            _verify(bound.name, step, value)
    return results, tuple(seconds), dump


def log_compilation(made: CompiledBase, dump: Dump | None) -> None:
    """Log the schedule, and the time of each pass."""
    name = made.bound.name
    if dump is not None:
        dump.write(4, "schedule", made.source("schedule"))
    if get_logger("schedule").isEnabledFor(DEBUG):
        get_logger("schedule").debug("%s: schedule:\n%s", name, made.source("schedule"))
    get_logger("passes").debug("%s: %.1f ms: %s", name, made.compile_seconds * 1e3, _format_times(made.seconds))


@contextmanager
def log_decisions(bound: BoundFunction) -> Iterator[None]:
    """Log the decisions of the `with` block, if the log topic "why" is on."""
    log = get_logger("why")
    if not log.isEnabledFor(DEBUG):
        yield
        return
    with open_book() as book:
        yield
    text = OriginalNames.of(bound).text
    for d in book.decisions:
        numbers = ", ".join(f"{name} {n:g}" for name, n in d.numbers)
        about = f" of {', '.join(d.statements)}" if d.statements else ""
        log.debug("%s: %s%s: %s, because %s [%s]", bound.name, d.subject, about, text(d.chosen), text(d.why), numbers)


def list_schedulable_ops(
    bound: BoundFunction, options: CpuOptions, target: CpuTarget
) -> tuple[tuple[str, str, StructuredOp], ...]:
    """The ops that schedules apply to: (name in the schedule, tensor that it defines, op).

    These are the contractions, or the op of the only statement if that is not a contraction.
    """
    found: tuple[tuple[str, str, StructuredOp], ...] = _import_polyhedral_lowering().find_contractions(
        legalize(bound), options, target
    )
    return found


def is_only_contractions(bound: BoundFunction, options: CpuOptions, target: CpuTarget) -> bool:
    """Whether schedules alone determine the lowering of a def, so that options for other loops have no effect."""
    found: bool = _import_polyhedral_lowering().has_only_contractions(legalize(bound), options, target)
    return found


def has_register_tiles(bound: BoundFunction, options: CpuOptions, target: CpuTarget) -> bool:
    """Whether the lowering multiplies in register tiles. bound: legalized."""
    found: bool = _import_polyhedral_lowering().has_contractions(bound, options, target)
    return found


def splits_reductions(bound: BoundFunction, options: CpuOptions, target: CpuTarget) -> bool:
    """Whether an untuned call splits a reduction (split-K), which no schedule expresses."""
    found: bool = _import_polyhedral_lowering().splits_reductions_in(legalize(bound), options, target)
    return found


def with_split_reductions(bound: BoundFunction, options: CpuOptions, target: CpuTarget) -> BoundFunction:
    """The def with its long reductions split into two statements, as the lowering does."""
    found: BoundFunction = _import_polyhedral_lowering().with_split_stages(legalize(bound), options, target)
    return found


def resolve_schedules(bound: BoundFunction, options: CpuOptions, target: CpuTarget) -> CpuOptions:
    """`options` with a schedule without choices for every contraction that it applies to.

    Raises ArgumentError if the def has no contraction, or if a schedule names an unknown tensor or does not apply.
    """
    if options.schedule is None:
        return options
    found = list_schedulable_ops(bound, options, target)
    tensors = [name for _, name, _ in found]
    if not found:
        raise ArgumentError(
            f"{bound.name} has no contraction", expected="a contraction, or a single reduction or permutation"
        )
    if isinstance(options.schedule, tuple):
        known = {n for name, tensor, _ in found for n in (name, tensor)}
        if unknown := [name for name, _ in options.schedule if name not in known]:
            raise ArgumentError(
                f"{bound.name} has no contraction that defines '{unknown[0]}'", expected=", ".join(tensors)
            )
    pairs = []
    for name, tensor, op in found:
        schedule = schedule_for(options.schedule, name, tensor)
        if schedule is None:
            continue
        try:
            pairs.append((name, resolve_schedule(schedule, op, target)))
        except CannotLower as refusal:
            raise ArgumentError(f"the schedule for '{tensor}' does not apply: {refusal}") from refusal
        if get_logger("schedule").isEnabledFor(DEBUG):
            get_logger("schedule").debug("%s: %s:\n%s", bound.name, tensor, explain_resolved(pairs[-1][1], op, target))
    return replace(options, schedule=tuple(pairs))


def pass_context_of(bound: BoundFunction, options: CpuOptions, target: CpuTarget) -> PassContext:
    """The context of the passes for `bound`; its schedules have the loop names of the canonical form.

    Raises as `resolve_schedules`.
    """
    options = resolve_schedules(bound, options, target)
    if not options.schedule:
        return PassContext(options, target, bound.name)
    assert isinstance(options.schedule, tuple)
    own, canonical = (
        {name: op for name, _, op in list_schedulable_ops(b, options, target)} for b in (bound, canonicalize(bound))
    )
    pairs = ((name, translate_schedule(p, own[name], canonical[name])) for name, p in options.schedule)  # type: ignore[arg-type]
    return PassContext(replace(options, schedule=tuple(pairs)), target, bound.name)


def kernel_digest(bound: BoundFunction, options: object, target: object) -> str:
    """A digest (8 hexadecimal digits) of all facts that a kernel depends on, the same in every process."""
    return sha256(repr((bound, options, target)).encode()).hexdigest()[:8]


def temporary_bytes(module: Module) -> tuple[int, ...]:
    """Bytes of each temporary that the caller of `module` provides."""
    return tuple(b.bytes for b in module.temporaries)


def _logs_times() -> bool:
    return get_logger("passes").isEnabledFor(DEBUG)


def _format_times(seconds: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {each * 1e3:.1f}" for name, each in seconds)


def _observe_steps(
    bound: BoundFunction, step: Pass, inside: Sequence[StepReport], number: int, dump: Dump | None
) -> None:
    """Log the times of the steps inside pass `step`, and dump their results."""
    if inside:
        times = _format_times((s.name, s.seconds) for s in inside)
        get_logger("passes").debug("%s: inside %s: %s", bound.name, step.name, times)
    if dump is not None:
        for position, s in enumerate(inside, 1):
            if s.text is not None:
                dump.write(number, f"{step.name}.{position:02}_{s.name}", s.text())


def _log_and_dump_pass(bound: BoundFunction, step: Pass, value: Any, number: int, dump: Dump | None) -> None:
    log = get_logger(step.topic) if step.topic and get_logger(step.topic).isEnabledFor(DEBUG) else None
    if step.show is None or (dump is None and log is None):
        return
    text = step.show(with_original_names(value, bound) if isinstance(value, Module) else value)
    if dump is not None:
        dump.write(number, step.name, text, step.suffix)
    if log is not None:
        log.debug("%s: after %s:\n%s", bound.name, step.name, text)


def _verify(name: str, step: Pass, module: Module) -> None:
    try:
        verify(module)
    except InternalError as error:
        raise InternalError(f"{name}: after {step.name}: {error}") from error
