"""Convert isl's AST to a loop program; no other module reads isl's AST expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import islpy as isl

from ....core.errors import InternalError
from ....core.internal_names import internal_name
from ....loop_ir import build
from ....loop_ir import nodes as ir
from ....loop_ir.intervals import Interval, index_interval
from ...scop.isl_affine import variable_of
from ..plan.mapping import WRITTEN_OUT

Instance = Callable[[str, tuple[ir.Expr, ...]], ir.Stmt]
"""(name of a statement, values of its indices and of further functions of them) -> the statement's loop program."""

_BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "fdiv_q": "div", "pdiv_q": "div", "pdiv_r": "mod",
    "zdiv_r": "mod", "max": "max", "min": "min", "and": "and", "and_then": "and", "or": "or", "or_else": "or",
    "eq": "eq", "le": "le", "lt": "lt", "ge": "ge", "gt": "gt",
}  # fmt: skip
"""The operators for isl's AST operations; where these have preconditions, isl has proved them."""


def generate_loops(
    schedule: isl.Schedule,
    context: isl.Set,
    identifiers: Mapping[str, ir.Expr],
    instance: Instance,
    further: Mapping[str, Sequence[isl.PwAff]],
    ranges: Mapping[str, Interval],
) -> ir.Stmt:
    """The loops of `schedule`, with the result of `instance` for every statement.

    context: constraints on the parameters, whose values in the loop program are `identifiers`. further: by the name
    of a statement, functions of its indices; `instance` gets their values after those of the indices. ranges: intervals
    of the variables in `identifiers`. Loops below a mark `WRITTEN_OUT` are unrolled.
    """
    walk = _Walk(identifiers, instance, further, {}, dict(ranges), [])
    built, _alive = isl.AstBuild.from_context(context).set_at_each_domain(walk.visit)
    return walk.statement(built.node_from_schedule(schedule))


def _make_guarded_unrolled_loop(
    name: str, start: tuple[ir.Expr, int], stop: tuple[ir.Expr, int], body: ir.Stmt
) -> ir.Stmt:
    """An UNROLLED loop with constant bounds and guards. start, stop: each (bound, its extreme value)."""
    runs: ir.Expr = build.TRUE
    if build.integer(start[0]) is None:
        runs = build.logical_and(runs, build.ge(build.var(name), start[0]))
    if build.integer(stop[0]) is None:
        runs = build.logical_and(runs, build.lt(build.var(name), stop[0]))
    bounds = build.const(start[1]), build.const(stop[1])
    return ir.Loop(name, *bounds, build.when(runs, body), ir.LoopKind.UNROLLED)


@dataclass(frozen=True, slots=True)
class _Walk:
    identifiers: Mapping[str, ir.Expr]
    instance: Instance
    further: Mapping[str, Sequence[isl.PwAff]]
    found: dict[str, tuple[str, tuple[ir.Expr, ...]]]
    ranges: dict[str, Interval]
    marks: list[str]

    def visit(self, node: isl.AstNode, built: isl.AstBuild) -> isl.AstNode:
        """Called by isl for every statement of the AST, while the enclosing loops are known; computes its values."""
        times = isl.Map.from_union_map(built.get_schedule())
        where = isl.PwMultiAff.from_map(times.reverse())
        name = times.get_tuple_name(isl.dim_type.in_)
        wanted = [where.get_pw_aff(k) for k in range(where.dim(isl.dim_type.out))]
        wanted += [f.pullback_pw_multi_aff(where) for f in self.further.get(name, ())]
        key = f"instance{len(self.found)}"
        self.found[key] = name, tuple(self.expression(built.expr_from_pw_aff(f)) for f in wanted)
        return node.set_annotation(isl.Id.read_from_str(node.get_ctx(), key))

    def statement(self, node: isl.AstNode) -> ir.Stmt:
        match _get_isl_enum_name(node.get_type()):
            case "user":
                return self.instance(*self.found[node.get_annotation().get_name()])
            case "block":
                children = node.block_get_children()
                return build.block(*(self.statement(children.get_at(k)) for k in range(children.n_ast_node())))
            case "for":
                return self.loop(node)
            case "if":
                then = self.statement(node.if_get_then_node())
                otherwise = self.statement(node.if_get_else_node()) if node.if_has_else_node() else None
                return build.when(self.expression(node.if_get_cond()), then, otherwise)
            case "mark":
                self.marks.append(node.mark_get_id().get_name())
                body = self.statement(node.mark_get_node())
                self.marks.pop()
                return body
        raise InternalError(f"an unknown kind of node: {node.to_C_str()}")

    def loop(self, node: isl.AstNode) -> ir.Stmt:
        name = internal_name(node.for_get_iterator().get_id().get_name())
        start = self.expression(node.for_get_init())
        if node.for_is_degenerate():
            return ir.Loop(name, start, build.add(start, 1), self.statement(node.for_get_body()))
        step = build.integer(self.expression(node.for_get_inc()))
        assert step is not None
        stop = self.stop(node.for_get_cond(), name)
        low, high = index_interval(start, self.ranges).low, index_interval(build.sub(stop, 1), self.ranges).high
        self.ranges[name] = Interval(low, high)
        body = self.statement(node.for_get_body())
        if WRITTEN_OUT in self.marks and step == 1 and low is not None and high is not None:
            return _make_guarded_unrolled_loop(name, (start, low), (stop, high + 1), body)
        return ir.Loop(name, start, stop, body, step=step)

    def stop(self, condition: isl.AstExpr, name: str) -> ir.Expr:
        """The exclusive upper bound of a loop, from its condition."""
        kind = _get_isl_enum_name(condition.get_op_type())
        if kind in ("and", "and_then"):
            left, right = (self.stop(condition.get_op_arg(k), name) for k in (0, 1))
            return build.minimum(left, right)
        bound = self.expression(condition.get_op_arg(1))
        return build.add(bound, 1) if kind == "le" else bound

    def expression(self, e: isl.AstExpr) -> ir.Expr:
        match _get_isl_enum_name(e.get_type()):
            case "int":
                return build.const(int(e.get_val().to_python()))
            case "id":
                name = e.get_id().get_name()
                variable = variable_of(name) or internal_name(name)
                return self.identifiers.get(name) or build.var(variable)
        arguments = [self.expression(e.get_op_arg(k)) for k in range(e.get_op_n_arg())]
        kind = _get_isl_enum_name(e.get_op_type())
        if kind in ("cond", "select"):
            return build.select(*arguments)
        if kind == "minus":
            return build.sub(0, arguments[0])
        if kind not in _BINARY:
            raise InternalError(f"an unknown operation: {e.to_C_str()}")
        result = arguments[0]
        for a in arguments[1:]:
            result = build.binary(_BINARY[kind], result, a)
        return result


def _get_isl_enum_name(kind: object) -> str:
    """The name of a member of an isl enumeration, without the underscore that avoids Python keywords."""
    return str(kind).rpartition(".")[2].rstrip("_")
