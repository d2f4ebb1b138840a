"""An interpreter of loop programs in NumPy, which checks every access.

It reports errors that compiled code would not show: elements outside of their buffer, reads of uninitialized memory,
and iterations of a PARALLEL or VECTOR loop, or threads, that conflict.
"""

from __future__ import annotations

import operator as operators
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from typing_extensions import assert_never

from ...core.errors import InternalError
from ...core.math_functions import FUNCTIONS
from .. import build
from ..instructions import INSTRUCTIONS
from ..intrinsics import is_hint
from ..nodes import (
    Allocate,
    Binary,
    Block,
    Broadcast,
    Buffer,
    Call,
    Cast,
    Check,
    Const,
    Expr,
    If,
    Invoke,
    Let,
    Load,
    Loop,
    LoopKind,
    Module,
    Ramp,
    ReduceLanes,
    Select,
    Shuffle,
    Stmt,
    Store,
    Type,
    Unary,
    Var,
    While,
    Window,
)
from ..rewrite import mentions
from . import matrix_tiles
from .async_copies import copy_async
from .asynchronous import is_thread_call, thread_call
from .launch import run_launch
from .memory import CheckedMemory, Race, fix_dynamic_extents
from .ops import Value, binary_function, negate, reduce_lanes_of, round_to, rounding_function, storage_dtype

Failure = tuple[int, int]
Evaluate = Callable[[], Value]
Run = Callable[[], None]


def interpret(
    module: Module, arrays: Mapping[str, np.ndarray[Any, Any]], parameters: Mapping[str, int] | None = None
) -> list[Failure]:
    """Run `module` on `arrays`, one per argument by name, writing the results into them.

    Arrays have the buffers' shapes and dtypes; bfloat16 is held in float32 arrays of rounded values. Dynamic
    dimensions may have any extent, unless one of the `parameters`, given by name, holds it.

    Returns:
        The failed check as `[(site, value)]`, or `[]`; kernels after the one that failed have not run.

    Raises:
        InternalError: the module reads undefined memory, leaves a buffer, or has a race.
    """
    machine = Interpreter()
    machine.partial = module.partial
    given = dict(parameters or {})
    machine.values = {p.name: np.int64(given[p.name]) for p in module.parameters}
    for b in module.arguments:
        array, b = arrays[b.name], b.bind_parameters(given)
        if b.dynamic and array.ndim == len(b.shape):
            b = fix_dynamic_extents(b, [array.shape[d] for d in b.dynamic])
        if array.shape != b.shape or array.dtype != storage_dtype(b.type.dtype):
            raise InternalError(f"argument {b.name} is {array.dtype}{array.shape}, not {b.type}{b.shape}")
        machine.memory[b.name] = CheckedMemory.of_argument(b, array)
    for b in (t.bind_parameters(given) for t in module.temporaries):
        machine.memory[b.name] = machine.new_memory(b, depth=0)
    with np.errstate(all="ignore"):
        for kernel in module.kernels:
            if machine.failures:
                break
            if kernel.launch is not None:
                run_launch(machine, kernel, kernel.launch.bind_parameters(given))
            else:
                machine.stmt(kernel.body)()
    return machine.failures


class Interpreter:
    """Translates each node once into a function that executes it, and holds the state of the execution."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.memory: dict[str, CheckedMemory] = {}
        self.races: list[Race] = []  # of the race-checked loops around the current statement, outermost first
        self.nested: list[Race] = []  # one `Race` per nesting depth, reused by the loops at that depth
        self.failures: list[Failure] = []
        self.partial: frozenset[str] = frozenset()
        # While translating: the enclosing checked loops (None: the blocks or the threads of a launch), each with the
        # names that vary with its iterations.
        self.scopes: list[tuple[Loop | None, set[str]]] = []
        self.asynchronous: Any = None  # the asynchronous operations of the current block
        self.thread: Any = None  # the `Thread` of a launch that runs

    def new_memory(self, b: Buffer, depth: int) -> CheckedMemory:
        """The uninitialized memory of a temporary."""
        return (CheckedMemory.allocate_poisoned if b.name in self.partial else CheckedMemory.allocate_undefined)(
            b, depth
        )

    # --- statements ----------------------------------------------------------------------------------------------

    def stmt(self, s: Stmt) -> Run:
        match s:
            case Store():
                return self.store(s)
            case Loop():
                return self.loop(s)
            case If(condition, then, otherwise):
                test, yes = self.expr(condition), self.stmt(then)
                no = self.stmt(otherwise) if otherwise is not None else lambda: None
                return lambda: yes() if test() else no()
            case Let(name, value, body):
                return self.let(name, value, body)
            case Allocate():
                return self.allocate(s)
            case Window():
                return self.window(s)
            case While(condition, body):
                return self.repeat(condition, body)
            case Check(condition, site, value):
                return self.check(condition, site, value)
            case Block(body):
                runs = [self.stmt(c) for c in body]
                return lambda: _run_all(runs)
            case Invoke():
                return self.invoke(s)
            case _:
                assert_never(s)

    def loop(self, s: Loop) -> Run:
        start, stop = self.expr(s.start), self.expr(s.stop)
        if s.kind in (LoopKind.PARALLEL, LoopKind.VECTOR):
            return self.checked_loop(s, start, stop)
        body = self.stmt(s.body)

        def run() -> None:
            for i in range(int(start()), int(stop()), s.step):
                self.values[s.var] = np.int64(i)
                body()

        return run

    def checked_loop(self, s: Loop, start: Evaluate, stop: Evaluate) -> Run:
        """Translate a loop whose iterations must be independent, with race checks."""
        depth = len(self.scopes)
        while len(self.nested) <= depth:
            self.nested.append(Race())
        race = self.nested[depth]
        self.scopes.append((s, {s.var}))
        body = self.stmt(s.body)
        self.scopes.pop()

        def run() -> None:
            race.begin(s.var, reduces=s.kind is LoopKind.VECTOR)
            self.races.append(race)
            for i in range(int(start()), int(stop()), s.step):
                race.step(i)
                self.values[s.var] = np.int64(i)
                body()
            self.races.pop()

        return run

    def let(self, name: str, value: Expr, body: Stmt) -> Run:
        for _, varying in self.scopes:
            if mentions(value, varying):
                varying.add(name)
        evaluate, inner = self.expr(value), self.stmt(body)

        def run() -> None:
            self.values[name] = evaluate()
            inner()

        return run

    def repeat(self, condition: Expr, body: Stmt) -> Run:
        test, inner = self.expr(condition), self.stmt(body)

        def run() -> None:
            while test():
                inner()

        return run

    def allocate(self, s: Allocate) -> Run:
        inner, lengths = self.stmt(s.body), [self.expr(e) for e in s.lengths]

        def run() -> None:
            outer = self.memory
            extents = [int(length()) for length in lengths]
            buffers = [fix_dynamic_extents(b, extents) for b in s.buffers] if lengths else s.buffers
            self.memory = outer | {b.name: self.new_memory(b, depth=len(self.races)) for b in buffers}
            inner()
            self.memory = outer

        return run

    def window(self, s: Window) -> Run:
        inner, start, length = self.stmt(s.body), self.expr(s.start), self.expr(s.length)

        def run() -> None:
            outer = self.memory
            source = outer[s.source.name]
            rows = source.buffer.shape[s.dimension]
            if not 0 <= rows - int(length()) <= s.spare:
                raise InternalError(f"{s.source.name} has {rows} rows, not {int(length())}")
            self.memory = outer | {s.buffer.name: source.window(s.buffer, s.dimension, int(start()), s.rows)}
            inner()
            self.memory = outer

        return run

    def check(self, condition: Expr, site: int, value: Expr) -> Run:
        test, found = self.expr(condition), self.expr(value)

        def run() -> None:
            if not test() and not self.failures:
                self.failures.append((site, int(found())))

        return run

    def invoke(self, s: Invoke) -> Run:
        if s.name in matrix_tiles.MEANINGS:
            return self.fragments(s)
        if is_thread_call(s):
            return thread_call(self, s)
        if not is_hint(s):
            return copy_async(self, s)
        evaluated = [self.expr(i) for _, where in s.operands for i in where]

        def run() -> None:
            for evaluate in evaluated:
                evaluate()

        return run

    def fragments(self, s: Invoke) -> Run:
        meaning, views = matrix_tiles.MEANINGS[s.name], [(b.name, [self.expr(i) for i in w]) for b, w in s.operands]

        def run() -> None:
            found = [(self.memory[name], tuple([i() for i in where])) for name, where in views]
            meaning(found, s.attributes, self.races)

        return run

    def store(self, s: Store) -> Run:
        where, value = [self.expr(i) for i in s.indices], self.expr(s.value)
        mask = self.expr(s.mask) if s.mask is not None else None
        dtype, name, to_type = s.buffer.type.dtype, s.buffer.name, rounding_function(s.buffer.type.dtype)
        combine = binary_function(build.combiner(s.op, dtype), dtype) if s.op is not None else None
        reducing = [
            s.atomic if loop is None else not any(mentions(i, names) for i in s.indices) for loop, names in self.scopes
        ]

        def run() -> None:
            memory, indices = self.memory[name], tuple([i() for i in where])
            new, guard = value(), mask() if mask is not None else None
            if combine is None:
                memory.write(indices, to_type(new), guard, self.races)
            else:
                memory.update(indices, new, guard, lambda a, b: to_type(combine(a, b)), self.races, reducing)

        return run

    # --- expressions ---------------------------------------------------------------------------------------------

    def expr(self, e: Expr) -> Evaluate:
        match e:
            case Const(value, t):
                held = _make_constant_value(value, t)
                return lambda: held
            case Var(name):
                return lambda: self.values[name]
            case Load():
                return self.load(e)
            case Unary(op, operand):
                a, f = self.expr(operand), (negate if op == "neg" else operators.invert)
                return lambda: f(a())
            case Binary(op, left, right):
                return self.binary(op, left, right, e.type)
            case Select(condition, then, otherwise):
                c, a, b = self.expr(condition), self.expr(then), self.expr(otherwise)
                return lambda: _select_value(c(), a(), b())
            case Cast(operand, dtype):
                a, to_type = self.expr(operand), rounding_function(dtype)
                return lambda: to_type(a())
            case Call(function, arguments):
                args, to_type = [self.expr(x) for x in arguments], rounding_function(e.type.dtype)
                evaluate = (INSTRUCTIONS.get(function) or FUNCTIONS[function]).evaluate
                return lambda: to_type(evaluate(*[x() for x in args]))
            case Ramp(base, stride, lanes):
                a, offsets = self.expr(base), np.arange(lanes, dtype=storage_dtype(e.type.dtype)) * stride
                return lambda: a() + offsets
            case Broadcast(operand, count):
                a, kind = self.expr(operand), storage_dtype(e.type.dtype)
                return lambda: _splat(a(), count, kind)
            case Shuffle(left, right, lanes):
                a, b, order = self.expr(left), self.expr(right), list(lanes)
                return lambda: np.concatenate((a(), b()))[order]
            case ReduceLanes(op, operand):
                a, to_type = self.expr(operand), rounding_function(e.type.dtype)
                return lambda: to_type(reduce_lanes_of(op, a()))
            case _:
                assert_never(e)

    def binary(self, op: str, left: Expr, right: Expr, result: Type) -> Evaluate:
        a, b, f = self.expr(left), self.expr(right), binary_function(op, left.type.dtype)
        if left.type != right.type:
            raise InternalError(f"{op} of {left.type} and {right.type}")
        if storage_dtype(result.dtype).name == result.dtype.name:
            return lambda: f(a(), b())
        to_type = rounding_function(result.dtype)
        return lambda: to_type(f(a(), b()))

    def load(self, e: Load) -> Evaluate:
        where, name = [self.expr(i) for i in e.indices], e.buffer.name
        if e.mask is None:
            return lambda: self.memory[name].read(tuple([i() for i in where]), None, self.races)
        mask = self.expr(e.mask)
        return lambda: self.memory[name].read(tuple([i() for i in where]), mask(), self.races)


def _run_all(runs: list[Run]) -> None:
    for run in runs:
        run()


def _select_value(condition: Value, then: Value, otherwise: Value) -> Value:
    if isinstance(condition, np.ndarray):
        return np.where(condition, then, otherwise)
    return then if condition else otherwise


def _splat(value: Value, lanes: int, kind: np.dtype[Any]) -> Value:
    found = np.empty(lanes, kind)
    found.fill(value)
    return found


def _make_constant_value(value: int | float | bool, t: Type) -> Value:
    scalar = round_to(value, t.dtype)
    return scalar if t.lanes == 1 else np.full(t.lanes, scalar)
