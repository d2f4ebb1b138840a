"""A tile program to a module of the loop program, and to the notation of the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from ..core.errors import ArgumentError
from ..loop_ir import build
from ..loop_ir import nodes as ir
from ..loop_ir.intervals import Interval
from ..loop_ir.intrinsics import BARRIER, COMMIT_ASYNC, WAIT_ASYNC
from ..loop_ir.passes.simplify import simplify
from ..loop_ir.rewrite import substitute_stmt
from ..loop_ir.show import format_program
from ..target import GpuTarget
from . import specs
from .memory_moves import decompose_copy
from .pointwise import decompose_map, decompose_reduce
from .shared_accesses import swizzled_module
from .tensor_core_products import decompose_matmul
from .tile_views import MemoryView, RegisterFragment


def decompose(program: specs.Program, target: GpuTarget) -> specs.Program:
    """The program with a body, down to instructions, for every spec. Raises ArgumentError where no rule has one."""
    return replace(program, body=tuple(_decomposed(n, target) for n in program.body))


def _decomposed(node: specs.Node, target: GpuTarget) -> specs.Node:
    match node:
        case specs.Loop() | specs.When():
            return replace(node, body=tuple(_decomposed(n, target) for n in node.body))
        case specs.Leaf():
            return node
        case specs.Spec():
            return replace(node, body=_rule(node, target))
    return node


def _rule(spec: specs.Spec, target: GpuTarget) -> tuple[specs.Node, ...]:
    """The library's decomposition of a spec by its kind."""
    match spec:
        case specs.MatMul(first=True):
            init = specs.Init(spec.outputs, (), spec.threads)
            return (replace(init, body=_rule(init, target)), *decompose_matmul(spec, target))
        case specs.MatMul():
            return decompose_matmul(spec, target)
        case specs.Reduce():
            return decompose_reduce(spec)
        case specs.Map():
            return decompose_map(spec, spec.function, "Map")
        case specs.Init():
            return decompose_map(spec, lambda: spec.value, "Init")
        case specs.Move((MemoryView(),), (MemoryView() as source,)) if source.buffer.space is ir.Space.GLOBAL:
            return decompose_copy(spec)
        case specs.Move():
            return decompose_map(spec, lambda x: x, "Move")
    raise ArgumentError(f"no rule decomposes {type(spec).__name__}")


def lower_program(program: specs.Program) -> ir.Module:
    """The module of a decomposed program, shared memory swizzled as its accesses want it, indices simplified."""
    written = tuple(b.name for b in program.arguments[: program.outputs])
    body = _block(program.body)
    for name, value in reversed(program.names):
        body = ir.Let(name, value, body)
    launch = ir.Launch((program.blocks, 1, 1), (program.threads, 1, 1))
    kernel = ir.Kernel(program.name, body, launch)
    module = ir.Module(program.name, program.arguments, (), (kernel,), (), written)
    return swizzled_module(_simplified(module))


def _simplified(module: ir.Module) -> ir.Module:
    (kernel,) = module.kernels
    assert kernel.launch is not None
    extents = dict(kernel.launch.ranges())
    body = substitute_stmt(kernel.body, {name: build.const(0) for name, n in extents.items() if n == 1})
    body = simplify(body, {name: Interval(0, n - 1) for name, n in extents.items()})
    return replace(module, kernels=(replace(kernel, body=body),))


def _block(nodes: Sequence[specs.Node]) -> ir.Stmt:
    """Statements in order; what is allocated is there for all that comes after."""
    statements: list[ir.Stmt] = []
    for n, node in enumerate(nodes):
        if isinstance(node, specs.Allocate):
            rest = _block(nodes[n + 1 :])
            return build.block(*statements, build.allocate([node.tile.buffer], rest))
        statements.append(_statement(node))
    return build.block(*statements)


def _statement(node: specs.Node) -> ir.Stmt:
    match node:
        case specs.Leaf():
            return node.statement
        case specs.Spec():
            return _block(node.body)
        case specs.Sync():
            return ir.Invoke(BARRIER, ())
        case specs.Commit():
            return ir.Invoke(COMMIT_ASYNC, ())
        case specs.WaitCopies(groups):
            return ir.Invoke(WAIT_ASYNC, (), (groups,))
        case specs.Loop(var, stop, body):
            return ir.Loop(var, build.const(0), build.const(stop), _block(body))
        case specs.When(condition, body):
            return build.when(condition, _block(body))
    raise ArgumentError(f"{type(node).__name__} has no statement")


# --- notation ----------------------------------------------------------------------------------------------------


def format_tiles(program: specs.Program) -> str:
    """The program in the notation of the paper: `%` data, `#` threads, a body in braces."""
    lines = [f"{program.name}<<<#[{program.blocks}].block, #[{program.threads}].thread>>> {{"]
    lines += [f"    {name} = {_expr_text(value)}" for name, value in program.names]
    lines += [f"    {line}" for node in program.body for line in _lines(node)]
    return "\n".join([*lines, "}", ""])


def _expr_text(e: ir.Expr) -> str:
    return format_program(e).strip()


def _lines(node: specs.Node) -> Iterator[str]:
    match node:
        case specs.Allocate(tile):
            yield f"{tile} <- Allocate"
        case specs.Loop(var, stop, body):
            yield f"for {var} in {stop} {{"
            yield from _body_lines(body)
        case specs.When(condition, body):
            yield f"if {_expr_text(condition)} {{"
            yield from _body_lines(body)
        case specs.Spec():
            yield from _spec_lines(node)
        case specs.WaitCopies(groups):
            yield f"WaitCopies({groups})"
        case _:
            yield type(node).__name__


def _spec_lines(spec: specs.Spec) -> Iterator[str]:
    kind = spec.kind if isinstance(spec, specs.Leaf) else type(spec).__name__
    out, into = (", ".join(_operand_text(x) for x in side) for side in (spec.outputs, spec.inputs))
    head = f"{out} <- {kind}<<<#{spec.threads}>>>({into})"
    if isinstance(spec, specs.Leaf):
        yield f"{head}  // {spec.atom}" if spec.atom else head
    elif not spec.body:
        yield head
    else:
        yield f"{head} {{"
        yield from _body_lines(spec.body)


def _operand_text(x: MemoryView | RegisterFragment) -> str:
    return str(x)


def _body_lines(body: Sequence[specs.Node]) -> Iterator[str]:
    """The lines of a body, and its end; leaves that read the same, in all but their places, are counted."""
    lines = [line for node in body for line in _lines(node)]
    for line, same in groupby(lines):
        count = len(list(same))
        yield f"    {line}" if count == 1 or line == "}" else f"    {line}  x{count}"
    yield "}"
