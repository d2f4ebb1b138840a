"""Lower a tile program to a module of loop IR, or print it in the notation of the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from ...core.errors import ArgumentError
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.atoms import WARPGROUP
from ...loop_ir.instructions import BROADCAST_WARP
from ...loop_ir.intervals import Interval
from ...loop_ir.intrinsics import BARRIER, COMMIT_ASYNC, WAIT_ASYNC
from ...loop_ir.passes.simplify import simplify
from ...loop_ir.rewrite import substitute_stmt
from ...loop_ir.show import format_program
from ...target import GpuTarget
from .. import specs
from ..builder.barriers import Barrier
from ..builder.tile_views import MemoryView, RegisterFragment
from ..check.defined_tiles import check_defined
from ..check.shared_accesses import swizzled_module
from .box_moves import RuleContext, decompose_box_copy, decompose_sums_store
from .memory_moves import decompose_copy
from .panels import BOX_ALIGNMENT, with_panels
from .pointwise import decompose_map, decompose_reduce, decompose_shuffle
from .role_statements import barrier_statement, elect_one, make_barriers, role_condition
from .roles import arrange_roles, every_node, is_group_product, is_warpgroup_node
from .tensor_core_products import decompose_matmul
from .warpgroup_products import WARPGROUP_INDEX, decompose_group_matmul


def decompose(program: specs.Program, target: GpuTarget) -> specs.Program:
    """The program with every spec decomposed into instructions. Raises ArgumentError if no rule applies."""
    program = arrange_roles(program, target.registers_per_sm)
    registers = target.registers_per_sm // program.threads // 8 * 8
    tensors = {b.name: b for b in program.arguments}
    context = RuleContext(
        target, registers, tensors, rounded=_rounded_buffers(program.body), shared=_shared_bytes(program.body)
    )
    body = [_decompose_node(n, context) for n in program.body]
    body = [*map(specs.Allocate, context.staged), *body]
    check_defined(program.body)
    names = program.names
    if context.maps or any(is_warpgroup_node(n) for n in every_node(program.body)):
        names = (*names, (WARPGROUP_INDEX, ir.Call(BROADCAST_WARP, (build.div(build.var(ir.THREAD[0]), WARPGROUP),))))
    return replace(
        program, body=tuple(body), names=names, maps=tuple(context.maps), boxed=frozenset(context.boxed),
    )  # fmt: skip


def _rounded_buffers(nodes: Sequence[specs.Node]) -> frozenset[str]:
    """The names of buffers of factors that are rounded to tf32."""
    products = (n for n in every_node(nodes) if isinstance(n, specs.MatMul) and n.products)
    return frozenset(x.buffer.name for n in products for x in n.inputs)


def _shared_bytes(nodes: Sequence[specs.Node]) -> int:
    """An upper bound on the bytes of shared memory that a program allocates."""
    found = 0
    for n in every_node(nodes):
        match n:
            case specs.Allocate(MemoryView(buffer=b)) if b.space is ir.Space.SHARED:
                found += -(-b.bytes // BOX_ALIGNMENT) * BOX_ALIGNMENT
            case specs.MakeBarriers(array):
                found += 16 + 8 * array.count
    return found


def _decompose_node(node: specs.Node, context: RuleContext) -> specs.Node:
    match node:
        case specs.Loop() | specs.When() | specs.Let() | specs.Role() | specs.One():
            body = [_decompose_node(n, context) for n in node.body]
            if isinstance(node, specs.Role) and node.registers:
                body.insert(0, specs.SetRegisterCount(node.registers, node.registers > context.registers))
            return replace(node, body=tuple(body))
        case specs.SyncPart(threads):
            return specs.SyncPart(threads, context.part_number(threads))
        case specs.Leaf():
            return node
        case specs.Spec(body=body) if body:  # decomposed by the user
            return replace(node, body=tuple(_decompose_node(n, context) for n in body))
        case specs.Spec():
            return replace(node, body=_decompose_spec(node, context))
    return node


def _decompose_spec(spec: specs.Spec, context: RuleContext) -> tuple[specs.Node, ...]:
    """The decomposition of a spec, by the rule for its kind and operands."""
    target = context.target
    match spec:
        case specs.MatMul() if is_group_product(spec):
            context.boxed.update(x.buffer.name for x in spec.inputs if isinstance(x, MemoryView))
            return decompose_group_matmul(spec, target)
        case specs.MatMul(first=True):
            init = specs.Init(spec.outputs, (), spec.threads)
            return (replace(init, body=_decompose_spec(init, context)), *decompose_matmul(spec, target))
        case specs.MatMul():
            return decompose_matmul(spec, target)
        case specs.Reduce():
            return decompose_reduce(spec)
        case specs.Shuffle():
            return decompose_shuffle(spec)
        case specs.Named():
            return ()
        case specs.Map():
            return decompose_map(spec, spec.function, "Map")
        case specs.Init():
            return decompose_map(spec, lambda: spec.value, "Init")
        case specs.Move(done=done) if done is not None:
            return decompose_box_copy(spec, context)
        case specs.Move((MemoryView(),), (MemoryView() as source,)) if source.buffer.space is ir.Space.GLOBAL:
            return decompose_copy(spec)
        case specs.Move():
            boxes = decompose_sums_store(spec, context)
            return boxes if boxes is not None else decompose_map(spec, lambda x: x, "Move")
    raise ArgumentError(f"no rule decomposes {type(spec).__name__}")


def lower_program(program: specs.Program) -> ir.Module:
    """The module of a decomposed program, with swizzles for shared memory chosen from its accesses."""
    written = tuple(b.name for b in program.arguments[: program.outputs])
    clustered = program.cluster > 1  # no block may exit while others access its shared memory
    nodes = (*program.body, specs.SyncCluster()) if clustered else program.body
    body = with_panels(_lower_nodes(nodes), program.boxed)
    for name, value in reversed(program.names):
        body = ir.Let(name, value, body)
    launch = ir.Launch((program.blocks, 1, 1), (program.threads, 1, 1), program.cluster)
    kernel = ir.Kernel(program.name, body, launch, maps=program.maps)
    module = ir.Module(program.name, program.arguments, (), (kernel,), (), written)
    return swizzled_module(_simplify_module(module))


def _simplify_module(module: ir.Module) -> ir.Module:
    (kernel,) = module.kernels
    assert kernel.launch is not None
    extents = dict(kernel.launch.ranges())
    body = substitute_stmt(kernel.body, {name: build.const(0) for name, n in extents.items() if n == 1})
    body = simplify(body, {name: Interval(0, n - 1) for name, n in extents.items()})
    return replace(module, kernels=(replace(kernel, body=body),))


def _lower_nodes(nodes: Sequence[specs.Node]) -> ir.Stmt:
    """The nodes as statements in order; the scope of an allocation is all later nodes."""
    statements: list[ir.Stmt] = []
    for n, node in enumerate(nodes):
        if isinstance(node, specs.Allocate):
            rest = _lower_nodes(nodes[n + 1 :])
            return build.block(*statements, build.allocate([node.tile.buffer], rest))
        if isinstance(node, specs.MakeBarriers):
            arrays = [m.barriers for m in nodes[n:] if isinstance(m, specs.MakeBarriers)]  # consecutive nodes
            rest = build.block(make_barriers(arrays), _lower_nodes(nodes[n + len(arrays) :]))
            return build.block(*statements, build.allocate([a.buffer for a in arrays], rest))
        statements.append(_lower_node(node))
    return build.block(*statements)


def _lower_node(node: specs.Node) -> ir.Stmt:
    match node:
        case specs.Leaf():
            return node.statement
        case specs.Spec():
            return _lower_nodes(node.body)
        case specs.Sync():
            return ir.Invoke(BARRIER, ())
        case specs.Commit():
            return ir.Invoke(COMMIT_ASYNC, ())
        case specs.WaitCopies(groups):
            return ir.Invoke(WAIT_ASYNC, (), (groups,))
        case specs.Loop(var, stop, body):
            last = build.const(stop) if isinstance(stop, int) else stop
            return ir.Loop(var, build.const(0), last, _lower_nodes(body))
        case specs.When(condition, body):
            return build.when(condition, _lower_nodes(body))
        case specs.Let(names, body):
            inner = _lower_nodes(body)
            for name, value in reversed(names):
                inner = ir.Let(name, value, inner)
            return inner
        case specs.Role(threads, _, body):
            return build.when(role_condition(threads), _lower_nodes(body))
        case specs.One(threads, body):
            return elect_one(threads, _lower_nodes(body))
    return barrier_statement(node)


# --- notation ----------------------------------------------------------------------------------------------------


def format_tiles(program: specs.Program) -> str:
    """Print the program in the notation of the paper: `%` data, `#` threads, bodies in braces."""
    clusters = f", clusters of {program.cluster}" if program.cluster > 1 else ""
    lines = [f"{program.name}<<<#[{program.blocks}].block, #[{program.threads}].thread{clusters}>>> {{"]
    lines += [f"    {name} = {_expr_text(value)}" for name, value in program.names]
    lines += [f"    {line}" for node in program.body for line in _print_node(node)]
    return "\n".join([*lines, "}", ""])


def _expr_text(e: ir.Expr) -> str:
    return format_program(e).strip()


def _print_node(node: specs.Node) -> Iterator[str]:
    match node:
        case specs.Allocate(tile):
            yield f"{tile} <- Allocate"
        case specs.Loop(var, stop, body):
            yield f"for {var} in {stop if isinstance(stop, int) else _expr_text(stop)} {{"
            yield from _body_lines(body)
        case specs.When(condition, body):
            yield f"if {_expr_text(condition)} {{"
            yield from _body_lines(body)
        case specs.Let(names, body):
            yield from (f"{name} = {_expr_text(value)}" for name, value in names)
            yield from (line for n in body for line in _print_node(n))
        case specs.Role(threads, registers, body):
            yield f"role #{threads}{f', {registers} registers' if registers else ''} {{"
            yield from _body_lines(body)
        case specs.One(threads, body):
            yield f"one of #{threads} {{"
            yield from _body_lines(body)
        case specs.MakeBarriers(array):
            everywhere = f" from each of {array.blocks} blocks" if array.everywhere else ""
            yield f"{array} <- Barriers({array.arrivals} arrivals{everywhere})"
        case specs.Expect(barrier, count):
            yield f"Expect({barrier_text(barrier)}, {count} bytes)"
        case specs.Wait(barrier, phase):
            yield f"Wait({barrier_text(barrier)}, {_expr_text(phase)})"
        case specs.Arrive(barrier):
            everywhere = ", in all blocks of the cluster" if barrier.array.everywhere else ""
            yield f"Arrive({barrier_text(barrier)}{everywhere})"
        case specs.SetRegisterCount(count):
            yield f"Registers({count})"
        case specs.WaitProducts(groups):
            yield f"WaitProducts({groups})"
        case specs.SyncPart(threads):
            yield f"Sync(threads {threads[0]} to {sum(threads) - 1})"
        case specs.Spec():
            yield from _spec_lines(node)
        case specs.WaitCopies(groups):
            yield f"WaitCopies({groups})"
        case _:
            yield type(node).__name__


def barrier_text(x: Barrier) -> str:
    """A barrier as it is printed in programs."""
    return f"{x.array.name}[{_expr_text(x.index)}]"


def _spec_lines(spec: specs.Spec) -> Iterator[str]:
    kind = type(spec).__name__
    if isinstance(spec, specs.Leaf | specs.Named):
        kind = spec.kind if isinstance(spec, specs.Leaf) else spec.name
    out, into = (", ".join(_operand_text(x) for x in side) for side in (spec.outputs, spec.inputs))
    head = f"{out} <- {kind}<<<#{spec.threads}>>>({into})"
    if isinstance(spec, specs.Move) and spec.done is not None:
        shared = f", a part by each of {spec.blocks} blocks" if spec.blocks > 1 else ""
        head = f"{head}, done {barrier_text(spec.done)}{shared}"
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
    """The lines of a body and its closing brace; equal consecutive lines are printed once with a count."""
    lines = [line for node in body for line in _print_node(node)]
    for line, same in groupby(lines):
        count = len(list(same))
        yield f"    {line}" if count == 1 or line == "}" else f"    {line}  x{count}"
    yield "}"
