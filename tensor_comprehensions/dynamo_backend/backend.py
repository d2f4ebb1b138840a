"""`torch.compile(backend="tensor_comprehensions")`: compiles regions of forward and backward graphs to kernels.

torch captures the graph, derives the backward pass and passes both as operations on tensors of known sizes. Regions of
them become defs; each is timed against torch once, on the tensors of its first call, and the faster of both is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from functools import partial
from logging import DEBUG
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd

from ..api import Op, define
from ..core.decisions import Decision, is_recording, note_decision, record_decision
from ..core.diagnostics import get_logger
from ..core.single_flight import SingleFlightCache
from .convolution import split_conv_backward
from .def_builder import NAME
from .dynamic_shapes import PerShapeCache, has_symbolic_shapes
from .emit_def import UnsupportedArguments, emit_def, memory_order
from .fallback import falls_back
from .graph_nodes import is_compute, is_expressible, num_products, op_flops
from .insert_kernels import eager_module, insert_kernels, mark_as_boxed, region_key, to_boxed_call
from .joint_graph import split_joint_graph
from .kernel_or_eager import KernelOrEager, OutputView, Symbols
from .partition import ANY, WORTH, FusedRegion, RegionLimits, find_regions, is_profitable
from .simplify_graph import simplify_graph
from .symbolic_regions import SymbolicRegion, find_symbolic_regions, find_varying
from .undecomposed_operations import captured_whole

LIMIT = 4096
_operators: SingleFlightCache[str, Op] = SingleFlightCache(LIMIT)
"""Operators by the source of their def."""
_kernels: SingleFlightCache[str, KernelOrEager] = SingleFlightCache(LIMIT)
"""Kernels with their eager alternatives: equal regions, such as the layers of a network, compile and race once."""

observers: list[Callable[[fx.GraphModule, int], object]] = []
"""Functions called with each compiled graph of known sizes, after kernels are inserted, and with all of its flops."""


def backend(module: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """The backend that `torch.compile` calls: `torch.compile(model, backend="tensor_comprehensions")`."""
    captured = aot_autograd(
        fw_compiler=_compile,
        partition_fn=split_joint_graph,
        keep_inference_input_mutations=True,  # so that inputs are written in place
    )
    with captured_whole(examples):
        compiled: Callable[..., Any] = captured(module, examples)
    return compiled


def _compile(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    with falls_back("a graph cannot be simplified"):
        simplify_graph(module.graph)
    if has_symbolic_shapes(module.graph):
        general, complete = fuse_symbolic_regions(module)
        return to_boxed_call(general) if complete else mark_as_boxed(PerShapeCache(module, fuse_regions, general))
    fused = fuse_regions(module)
    for observer in observers:
        observer(fused, sum(map(op_flops, module.graph.nodes)))
    return to_boxed_call(fused)


def fuse_regions(module: fx.GraphModule, bounds: RegionLimits = ANY) -> fx.GraphModule:
    """`module` with calls of kernels in place of the regions that they compute."""
    with falls_back("a graph cannot be taken apart"):
        split_conv_backward(module.graph)
        taken = _translate_regions(module.graph, bounds)
        _log_fusion_decisions(module.graph, taken)
        return _rewritten(module, taken)
    return module


def fuse_symbolic_regions(module: fx.GraphModule) -> tuple[fx.GraphModule, bool]:
    """`module`, whose sizes are symbols, with kernels for all sizes; and whether these cover every region and size."""
    with falls_back("a graph cannot be taken apart for all sizes"):

        def translate(graph: fx.Graph, refused: frozenset[fx.Node]) -> list[FusedRegion]:
            return _translate_regions(graph, ANY, refused)

        found = find_symbolic_regions(module.graph, translate, memory_order)
        kept = [r for r in found.regions if _varying_sizes(r)]
        kernels = [(r.region, _symbolic_kernel(r)) for r in kept]
        fused = insert_kernels(module, kernels, found.computing.__contains__)
        get_logger("graph").debug("%d of %d regions are kernels for all sizes", len(kept), len(found.regions))
        general = sum(len(_varying_sizes(r)) == len(r.sizes) for r in kept)
        return fused, found.complete and general == len(found.regions)
    return fx.GraphModule(module, deepcopy(module.graph)), False


def _varying_sizes(r: SymbolicRegion) -> tuple[str, ...]:
    """The sizes of a region that may vary without another kernel."""
    return find_varying(_operators.get(r.region.text, lambda: define(r.region.text)[NAME]).function, r.numbers)


def _symbolic_kernel(r: SymbolicRegion) -> KernelOrEager:
    """The kernel of a region for all sizes, with its eager alternative."""

    def make() -> KernelOrEager:
        views = tuple(OutputView.of(shape, order) for shape, order in zip(r.shapes, r.orders, strict=True))
        work, eager = sum(map(op_flops, r.probe.nodes)), eager_module(r.region)
        varying = _varying_sizes(r)
        op = define(r.region.text, dynamic=varying)[NAME]
        symbols = Symbols(r.takes, tuple(place for name, place in r.sizes.items() if name not in varying))
        return KernelOrEager(op, eager, views, r.region.finite, r.region.shows_nan, None, work, symbols)

    return _kernels.get(region_key(r.region), make)


def _translate_regions(
    graph: fx.Graph,
    bounds: RegionLimits,
    without: Collection[fx.Node] = (),
) -> list[FusedRegion]:
    """The regions of `graph` with their defs, without the operations whose formulas do not fit their arguments."""
    refused: set[fx.Node] = set(without)
    while True:
        before = len(refused)
        taken: list[FusedRegion] = []
        for region in filter(is_profitable, find_regions(graph, refused, bounds)):
            try:
                with falls_back("a def cannot be written"):
                    taken += filter(lambda r: r.outputs, [_define_operator(emit_def(region))])
            except UnsupportedArguments as refusal:
                get_logger("graph").debug("%s stays with torch: %s", refusal.node.target, refusal.why)
                record_decision(partial(_left_to_torch, refusal.node, refusal.why))
                refused.add(refusal.node)
        if len(refused) == before:
            return taken


def _define_operator(region: FusedRegion) -> FusedRegion:
    """Define the operator of `region`; return `region`."""
    _operators.get(region.text, lambda: define(region.text)[NAME])
    return region


def _smaller_kernel_alternatives(graph: fx.GraphModule) -> Callable[[], fx.GraphModule] | None:
    """The alternatives if the kernel of `graph` is slower than torch: kernels with fewer products, or with none."""
    work = list(filter(is_compute, graph.graph.nodes))
    products = sum(map(num_products, work))
    if not products or len(work) == 1:
        return None
    return lambda: fuse_regions(graph, RegionLimits(1) if products > 1 else RegionLimits(1, alone=True))


def flops_share(graph: fx.Graph, taken: Sequence[FusedRegion]) -> float:
    """The part of the floating-point work of `graph` that is in `taken`; of other operations one for each element."""
    total = sum(map(op_flops, graph.nodes))
    return sum(op_flops(n) for region in taken for n in region.nodes) / total if total else 0.0


def _log_fusion_decisions(graph: fx.Graph, taken: Sequence[FusedRegion]) -> None:
    log = get_logger("graph")
    if not (log.isEnabledFor(DEBUG) or is_recording()):
        return
    inside = {node for region in taken for node in region.nodes}
    for node in graph.nodes:
        if is_compute(node) and node not in inside:
            log.debug("%s stays with torch: %s", node.target, "alone" if is_expressible(node) else "not in the table")
            alone = f"alone it has less than {WORTH} operations, which pay for no kernel"
            note_decision(_left_to_torch(node, alone if is_expressible(node) else "it has no formula in the table"))
    for region in taken:
        log.debug("%d operations in one def:\n%s", len(region.nodes), region.text)
        numbers = ("operations", len(region.nodes)), ("flops", sum(map(op_flops, region.nodes)))
        names = ", ".join(str(n.target) for n in region.nodes)
        note_decision(Decision("graph", (), f"{len(region.nodes)} operations are one def", names, numbers))
    log.debug(
        "%d kernels take %d operations, %.0f %% of the work", len(taken), len(inside), 100 * flops_share(graph, taken)
    )


def _left_to_torch(node: fx.Node, why: str) -> Decision:
    return Decision("graph", (), f"{node.target} ({node.name}) stays with torch", why)


def _rewritten(module: fx.GraphModule, taken: Sequence[FusedRegion]) -> fx.GraphModule:
    return insert_kernels(module, [(region, _make_kernel_or_eager(region)) for region in taken])


def _make_kernel_or_eager(region: FusedRegion) -> KernelOrEager:
    """The kernel of `region`, with its eager alternative."""

    def make() -> KernelOrEager:
        op = _operators.get(region.text, lambda: define(region.text)[NAME])
        orders = [memory_order(n) for n in region.outputs]
        shapes = [[n.meta["val"].shape[d] for d in order] for n, order in zip(region.outputs, orders, strict=True)]
        results = tuple(map(OutputView.of, shapes, orders))
        work = sum(map(op_flops, region.nodes))
        eager = eager_module(region)
        return KernelOrEager(
            op, eager, results, region.finite, region.shows_nan, _smaller_kernel_alternatives(eager), work
        )

    return _kernels.get(region_key(region), make)
