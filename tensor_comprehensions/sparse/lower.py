"""A problem as a loop program, one statement after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import CannotLower
from ..loop_ir.nodes import Buffer, Kernel, Let, Module, Stmt
from ..target import Target
from ..tc_lang.function import Function, Role, Symbol
from .convert import Conversion, insert_conversions
from .emit import Shared, StatementEmitter
from .graph import Nest, build_nest
from .order import choose_order
from .problem import Collected, Operand, Problem, Sizes, collected_of, operand_of, totals_buffer
from .results import CollectedEmitter, DenseEmitter, SharedEmitter


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered problem.

    Attributes:
        phases: modules to run in order, with the same arguments: `sizes`, `totals`, the arrays of the operands in
            order, those of the collected results. Before a phase, the caller allocates what `totals` counts so far.
        operands: parameters, results and temporaries; the caller allocates the last two, filled with zeros if shared.
        conversions: operands that the caller makes of others.
        collected: the elements of sparse results, by statement, in no order.
        orders: the loops of each statement, outermost first, for people to read.
    """

    problem: Problem
    phases: tuple[Module, ...]
    operands: tuple[Operand, ...]
    conversions: tuple[Conversion, ...]
    collected: tuple[Collected, ...]
    orders: tuple[tuple[str, ...], ...]


def lower(problem: Problem, target: Target) -> Program:
    """The loops of a problem.

    Raises:
        CannotLower: a statement is of a kind that is not lowered; the message says which.
    """
    problem, conversions = insert_conversions(problem)
    function, shared = problem.function, dict(problem.shared)
    operands = {t.name: _operand(t, problem, shared) for t in function.tensors if not t.specialised}
    collected = tuple(_collected(function, shared))
    common = Shared(problem, operands, Sizes.of(problem), target)
    totals = totals_buffer(len(collected))
    phases: list[list[Kernel]] = [[]]
    orders = []
    for number in range(len(function.statements)):
        nest = build_nest(problem, number)
        order = choose_order(nest)
        orders.append(order)
        here = next((n for n, c in enumerate(collected) if c.statement == number), None)
        if here is None:
            emitter = _emitter(common, nest, order, shared)
            phases[-1] += [Kernel(f"{number}.{what}", _sized(body, common)) for what, body in emitter.kernels()]
        else:
            gather = CollectedEmitter(common, nest, order, collected[here], totals, here)
            phases[-1].append(Kernel(f"{number}.count", _sized(gather.count(), common)))
            phases.append([Kernel(f"{number}.collect", _sized(gather.collect(), common))])
    arguments = _arguments(common, totals, tuple(operands.values()), collected)
    written = _written(tuple(operands.values()), collected, totals)
    modules = tuple(
        Module(f"{function.name}.{n}", arguments, (), tuple(kernels), (), written) for n, kernels in enumerate(phases)
    )
    return Program(problem, modules, tuple(operands.values()), conversions, collected, tuple(orders))


def _operand(t: Symbol, problem: Problem, shared: Mapping[str, str]) -> Operand:
    """The arrays of a tensor. One that shares the places of another, or is collected, has no levels of its own."""
    own = t.is_sparse and t.role is Role.INPUT and t.name not in shared
    return operand_of(t.name, t.dtype, t.role, t.format, problem.index_type(t.name) if own else None)


def _collected(function: Function, shared: Mapping[str, str]) -> list[Collected]:
    found: list[Collected] = []
    for number, s in enumerate(function.statements):
        target = function.tensor(s.target)
        if not target.is_sparse or target.name in shared:
            continue
        again = any(c.tensor == target.name for c in found)
        if again and (s.reduction != "+" or s.initialise):
            raise CannotLower(f"a second definition of the sparse '{target.name}' with another operator than +=")
        found.append(collected_of(number, target))
    return found


def _emitter(common: Shared, nest: Nest, order: tuple[str, ...], shared: Mapping[str, str]) -> StatementEmitter:
    if nest.statement.target in shared:
        return SharedEmitter(common, nest, order)
    return DenseEmitter(common, nest, order)


def _sized(body: Stmt, common: Shared) -> Stmt:
    """`body` with the sizes bound around it."""
    for name, value in reversed(list(common.sizes.bound())):
        body = Let(name, value, body)
    return body


def _arguments(
    common: Shared, totals: Buffer, operands: tuple[Operand, ...], collected: tuple[Collected, ...]
) -> tuple[Buffer, ...]:
    arrays = (b for o in operands for b in o.buffers)
    return (common.sizes.buffer, totals, *arrays, *(b for c in collected for b in c.buffers))


def _written(operands: tuple[Operand, ...], collected: tuple[Collected, ...], totals: Buffer) -> tuple[str, ...]:
    results = (o.values.name for o in operands if o.role is not Role.INPUT)
    return (totals.name, *results, *(b.name for c in collected for b in c.buffers))
