"""Statements of a launch in which single threads wait for phases of mbarriers while others continue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import InternalError
from ..intrinsics import BARRIER_WAIT
from ..nodes import Block, If, Invoke, Let, Loop, Stmt
from ..rewrite import walk_stmts
from .asynchronous import PhaseWait

if TYPE_CHECKING:
    from .launch import LaunchInterpreter, Thread

RunThread = Callable[["Thread"], Iterator[PhaseWait]]


def is_phase_wait(s: Stmt) -> bool:
    """Whether `s` itself is a wait for a phase of an mbarrier."""
    return isinstance(s, Invoke) and s.name == BARRIER_WAIT


def run_thread(state: LaunchInterpreter, s: Stmt) -> RunThread:
    """A coroutine that executes `s` in one thread and yields at waits for phases of mbarriers."""
    machine = state.machine
    if not any(is_phase_wait(c) for c in walk_stmts(s)):
        work = machine.stmt(s)

        def at_once(t: Thread) -> Iterator[PhaseWait]:
            state.select(t)
            work()
            return iter(())

        return at_once

    match s:
        case Block(body):
            runs = [run_thread(state, c) for c in body]

            def sequence(t: Thread) -> Iterator[PhaseWait]:
                for run in runs:
                    yield from run(t)

            return sequence
        case Loop():
            start, stop, inner = machine.expr(s.start), machine.expr(s.stop), run_thread(state, s.body)

            def loop(t: Thread) -> Iterator[PhaseWait]:
                state.select(t)
                for i in range(int(start()), int(stop()), s.step):
                    t.values[s.var] = np.int64(i)
                    yield from inner(t)

            return loop
        case If(condition, then, otherwise):
            test, yes = machine.expr(condition), run_thread(state, then)
            no = run_thread(state, otherwise if otherwise is not None else Block(()))

            def branch(t: Thread) -> Iterator[PhaseWait]:
                state.select(t)
                yield from yes(t) if test() else no(t)

            return branch
        case Let(name, value, body):
            evaluate, rest = machine.expr(value), run_thread(state, body)

            def let(t: Thread) -> Iterator[PhaseWait]:
                state.select(t)
                t.values[name] = evaluate()
                yield from rest(t)

            return let
        case Invoke(_, ((buffer, where),), _, (parity,)):
            place, evaluate = [machine.expr(i) for i in where], machine.expr(parity)

            def wait(t: Thread) -> Iterator[PhaseWait]:
                state.select(t)
                view = (machine.memory[buffer.name], tuple([i() for i in place]))
                yield state.asynchronous.wait_for(view, int(evaluate()), t)

            return wait
    raise InternalError(f"not a statement in which one thread waits: {s!r}")
