"""The compiler, top to bottom: `PASSES` lists everything that happens between a bound def and its kernel.

`compile_function` runs the list and observes it: it times, dumps (`TC_DUMP`), explains (`TC_LOGS`) and verifies
(`TC_VERIFY`) after each pass, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from logging import DEBUG
from time import perf_counter
from typing import Any

from . import knobs
from .codegen import c, llvm
from .compiled import Compilation, Compiled, Job
from .errors import ArgumentError, CannotLower, InternalError
from .inspection import Dump, logger
from .interrupts import deferred_interrupts
from .loop_ir.binding import check_bindings
from .loop_ir.hoist import hoist_accumulators
from .loop_ir.nodes import CheckSite, Module, Stmt
from .loop_ir.rename import rename
from .loop_ir.show import show
from .loop_ir.simplify import simplify
from .loop_ir.unroll import unroll
from .loop_ir.vectorize import vectorize
from .loop_ir.verify import verify
from .options import CpuOptions
from .runtime import cpu, process
from .runtime.cpu import ObjectCode
from .structured.op import StructuredOp
from .structured.settle import settled, told
from .structured.strategy import meant_for
from .structured.translate import translate_pipeline
from .target import Target
from .tc_lang.canonical_bound import Spelling, canonicalize, errors_of
from .tc_lang.function import BoundFunction
from .tc_lang.legalise import legalise


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to turn a bound function into a loop program; nothing else asks which one it is.

    lower: pure; raises CannotLower with a reason.
    """

    name: str
    lower: Callable[[BoundFunction, CpuOptions, Target], Module]


def _polyhedral() -> Any:
    """The strategy's module, imported when something is lowered: a kernel that is found in the cache needs no isl."""
    with deferred_interrupts():
        from .polyhedral import strategy
    return strategy


def _lower_polyhedral(bound: BoundFunction, options: CpuOptions, target: Target) -> Module:
    module: Module = _polyhedral().lower(bound, options, target)
    return module


STRATEGIES = (Strategy("polyhedral", _lower_polyhedral),)
"""In order of preference: the first that does not refuse lowers the def."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One step: what it does to the value that travels, how its result reads, and the log topic it belongs to.

    show: None where the result is not for reading. again: the earlier pass that this one repeats: nothing is left to do
    where all passes since have changed nothing.
    """

    name: str
    run: Callable[[Any, Any], Any]
    show: Callable[[Any], str] | None = show
    suffix: str = "txt"
    topic: str = ""
    again: str = ""

    def of(self, value: Any, job: Any, results: Mapping[str, Any]) -> Any:
        """What it makes of `value`, the last of `results` of the passes before it."""
        return value if self.again and value is results[self.again] else self.run(value, job)


def _lower(bound: BoundFunction, job: Job) -> Module:
    reasons, name = [], job.name or bound.name
    for strategy in STRATEGIES:
        try:
            module = strategy.lower(bound, job.options, job.target)
        except CannotLower as refusal:
            reasons.append(f"{strategy.name}: {refusal}")
            logger("schedule").debug("%s: refused by %s", name, reasons[-1])
        else:
            logger("schedule").debug("%s: lowered by %s", name, strategy.name)
            check_bindings(module)
            return module
    raise InternalError(f"no strategy lowers {name}: {'; '.join(reasons)}")


def _bodies(transform: Callable[[Stmt], Stmt]) -> Callable[[Module, Job], Module]:
    """`transform` on the body of every kernel of a module, which comes back where that changes none."""

    def run(module: Module, _: Job) -> Module:
        bodies = [transform(k.body) for k in module.kernels]
        if all(new is k.body for new, k in zip(bodies, module.kernels, strict=True)):
            return module
        kernels = (replace(k, body=new) for new, k in zip(bodies, module.kernels, strict=True))
        return replace(module, kernels=tuple(kernels))

    return run


def _emit(module: Module, job: Job) -> str:
    check_bindings(module)
    return llvm.emit(module, job.target, process.mathematics())


PASSES = (
    Pass("canonicalize", lambda bound, job: canonicalize(bound), repr),
    Pass("legalise", lambda bound, job: legalise(bound), repr),
    Pass("lower", _lower),
    Pass("simplify", _bodies(simplify), topic="loops"),
    Pass("vectorize", _bodies(vectorize)),
    Pass("unroll", _bodies(unroll)),
    Pass("hoist", _bodies(hoist_accumulators)),
    Pass("simplify_again", _bodies(simplify), again="simplify"),
    Pass("emit", _emit, str, "ll", "code"),
    Pass("assemble", lambda text, job: cpu.assemble(text, job.target), None),
    Pass("load", lambda code, job: cpu.load_object(code), None),
)
LOWERING = PASSES[:3]
"""Those that look at options."""


def sites_of(module: Module, bound: BoundFunction) -> tuple[CheckSite, ...]:
    """What a failed check of `bound` means, with the names of its program."""
    spelling = Spelling.of(bound) if module.sites else None
    return tuple(replace(s, tensor=spelling.name(s.tensor)) for s in module.sites) if spelling else ()


def readable(module: Module, bound: BoundFunction) -> Module:
    """What `bound` was lowered to, with the names of its program."""
    return rename(module, Spelling.of(bound).name, bound.name)


KINDS: dict[str, Callable[[Compiled], str]] = {
    "tc": lambda k: k.text,
    "schedule": lambda k: _polyhedral().explain(legalise(k.bound), k.options, k.target),
    "loops": lambda k: show(readable(k.stage("simplify"), k.bound)),
    "c": lambda k: c.emit(readable(k.stage("simplify"), k.bound), header=k.text),
    "llvm": lambda k: k.stage("emit"),
    "asm": lambda k: cpu.assembly(k.stage("emit"), k.target),
}
"""What `source` of a kernel for a CPU can show."""


def compile_function(bound: BoundFunction, text: str, options: CpuOptions, target: Target) -> Compiled:
    """Run `PASSES` on `bound`, whose def reads `text`."""
    job = job_of(bound, options, target)
    results, seconds, dump = run_passes(PASSES, bound, text, job)
    module: Module = results["simplify_again"]
    compiled = Compiled(
        bound, text, options, target, seconds, results["assemble"], results["load"],
        temporary_bytes(module), sites_of(module, bound), len(module.kernels),
    )  # fmt: skip
    if dump is not None:
        dump.write(2 + len(PASSES), "assembly", compiled.source("asm"), "s")
    explain_compilation(compiled, dump)
    return compiled


def lowered(bound: BoundFunction, text: str, job: Job) -> dict[str, Module]:
    """What the passes make that options decide on: the last one's loops say all about the code."""
    return run_passes(LOWERING, bound, text, job)[0]


def machine_code(
    bound: BoundFunction, text: str, job: Job, made: Mapping[str, Any]
) -> tuple[ObjectCode, tuple[int, ...]]:
    """What `compile_function` makes, for another process to load, and the bytes of its temporaries.

    made: what is `lowered` already.
    """
    results, _, _ = run_passes(PASSES[len(LOWERING) : -1], bound, text, job, made)
    return results["assemble"], temporary_bytes(results["simplify_again"])


def run_passes(
    passes: Sequence[Pass], bound: BoundFunction, text: str, job: Any, made: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], tuple[tuple[str, float], ...], Dump | None]:
    """What each pass makes of `bound`, by name, and the time that it takes; observed, as this module says.

    job: has `options` and `target`. made: what the passes before these made, in order.
    """
    dump = Dump.of(f"{bound.name}_{digest(bound, job.options, job.target)}")
    if dump is not None and not made:
        dump.write(0, "def", text, "tc")
        dump.write(1, "bound", repr(bound))
    results: dict[str, Any] = dict(made or {})
    value: Any = next(reversed(results.values()), bound)
    seconds: list[tuple[str, float]] = []
    for number, step in enumerate(passes, 2 + len(results)):
        start, before = perf_counter(), value
        with errors_of(bound):
            value = results[step.name] = step.of(value, job, results)
        seconds.append((step.name, perf_counter() - start))
        _observe(bound, step, value, number, dump)
        if isinstance(value, Module) and value is not before and knobs.current().verify:
            _verify(bound.name, step, value)
    return results, tuple(seconds), dump


def explain_compilation(made: Compilation, dump: Dump | None) -> None:
    """Tell what is not the result of a pass: the schedule, and where the time went."""
    name = made.bound.name
    if dump is not None:
        dump.write(4, "schedule", made.source("schedule"))
    if logger("schedule").isEnabledFor(DEBUG):
        logger("schedule").debug("%s: schedule:\n%s", name, made.source("schedule"))
    times = ", ".join(f"{step} {seconds * 1e3:.1f}" for step, seconds in made.seconds)
    logger("passes").debug("%s: %.1f ms: %s", name, made.compile_seconds * 1e3, times)


def contractions(
    bound: BoundFunction, options: CpuOptions, target: Target
) -> tuple[tuple[str, str, StructuredOp], ...]:
    """The ops that strategies are for: the name in the schedule, the tensor that it defines, and the op.

    They are the contractions, or what the only statement does where that is none.
    """
    found: tuple[tuple[str, str, StructuredOp], ...] = _polyhedral().contractions(legalise(bound), options, target)
    return found


def only_contractions(bound: BoundFunction, options: CpuOptions, target: Target) -> bool:
    """Is a def lowered by pipelines alone? How other loops are tiled and vectorised changes nothing then."""
    found: bool = _polyhedral().only_contractions(legalise(bound), options, target)
    return found


def sums_in_parts(bound: BoundFunction, options: CpuOptions, target: Target) -> bool:
    """Does an untuned call sum products in parts? No pipeline says that."""
    found: bool = _polyhedral().sums_in_parts(legalise(bound), options, target)
    return found


def staged(bound: BoundFunction, options: CpuOptions, target: Target) -> BoundFunction:
    """The def with as many stages for its reductions as it is lowered with."""
    found: BoundFunction = _polyhedral().staged(legalise(bound), options, target)
    return found


def settle(bound: BoundFunction, options: CpuOptions, target: Target) -> CpuOptions:
    """`options` whose strategy is a pipeline without choices for every contraction that it is meant for.

    Raises ArgumentError where it names what there is not, or does not apply.
    """
    if options.strategy is None:
        return options
    found = contractions(bound, options, target)
    tensors = [name for _, name, _ in found]
    if not found:
        raise ArgumentError(
            f"{bound.name} has no contraction", expected="a contraction, or a single reduction or permutation"
        )
    if isinstance(options.strategy, tuple):
        known = {n for name, tensor, _ in found for n in (name, tensor)}
        if unknown := [name for name, _ in options.strategy if name not in known]:
            raise ArgumentError(
                f"{bound.name} has no contraction that defines '{unknown[0]}'", expected=", ".join(tensors)
            )
    pairs = []
    for name, tensor, op in found:
        strategy = meant_for(options.strategy, name, tensor)
        if strategy is None:
            continue
        try:
            pairs.append((name, settled(strategy, op, target)))
        except CannotLower as refusal:
            raise ArgumentError(f"the strategy for '{tensor}' does not apply: {refusal}") from refusal
        if logger("schedule").isEnabledFor(DEBUG):
            logger("schedule").debug("%s: %s:\n%s", bound.name, tensor, told(pairs[-1][1], op, target))
    return replace(options, strategy=tuple(pairs))


def job_of(bound: BoundFunction, options: CpuOptions, target: Target) -> Job:
    """What the passes get to compile `bound`: strategies name the loops of its canonical form. Raises as `settle`."""
    options = settle(bound, options, target)
    if not options.strategy:
        return Job(options, target, bound.name)
    assert isinstance(options.strategy, tuple)
    own, canonical = (
        {name: op for name, _, op in contractions(b, options, target)} for b in (bound, canonicalize(bound))
    )
    pairs = ((name, translate_pipeline(p, own[name], canonical[name])) for name, p in options.strategy)  # type: ignore[arg-type]
    return Job(replace(options, strategy=tuple(pairs)), target, bound.name)


def digest(bound: BoundFunction, options: object, target: object) -> str:
    """A short name for what a kernel depends on, the same in every process."""
    return sha256(repr((bound, options, target)).encode()).hexdigest()[:8]


def temporary_bytes(module: Module) -> tuple[int, ...]:
    """Bytes of each temporary that the caller of `module` provides."""
    return tuple(b.bytes for b in module.temporaries)


def _observe(bound: BoundFunction, step: Pass, value: Any, number: int, dump: Dump | None) -> None:
    log = logger(step.topic) if step.topic and logger(step.topic).isEnabledFor(DEBUG) else None
    if step.show is None or (dump is None and log is None):
        return
    text = step.show(readable(value, bound) if isinstance(value, Module) else value)
    if dump is not None:
        dump.write(number, step.name, text, step.suffix)
    if log is not None:
        log.debug("%s: after %s:\n%s", bound.name, step.name, text)


def _verify(name: str, step: Pass, module: Module) -> None:
    try:
        verify(module)
    except InternalError as error:
        raise InternalError(f"{name}: after {step.name}: {error}") from error
