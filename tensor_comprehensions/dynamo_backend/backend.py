"""`torch.compile(backend="tensor_comprehensions")`: forward and backward graphs with their regions as kernels.

torch captures the graph, derives the backward and hands both over as operations on tensors of known sizes. Regions of
them become defs; each is timed against torch once, on the first tensors that come, and the faster of both stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from logging import DEBUG
from typing import Any

from torch import Tensor, fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from ..api import Op, define
from ..core.diagnostics import get_logger
from ..core.single_flight import SingleFlightCache
from .convolution import split_conv_backward
from .def_builder import NAME
from .dynamic_shapes import PerShapeCache, has_symbolic_shapes
from .kernel_or_eager import KernelOrEager, OutputView
from .op_table import FLOPS, aten
from .partition import (
    ANY,
    FusedRegion,
    RegionLimits,
    UnsupportedArguments,
    emit_def,
    find_regions,
    is_compute,
    is_expressible,
    is_profitable,
    memory_order,
    op_flops,
)

LIMIT = 4096
_operators: SingleFlightCache[str, Op] = SingleFlightCache(LIMIT)
"""Operators by their text: the layers of a network share them."""

observers: list[Callable[[fx.GraphModule, int], object]] = []
"""Who gets every graph that is compiled, with kernels in it, and the floating-point operations of all of it."""
KEPT = (
    aten.addmm, aten.embedding_dense_backward, aten._scaled_dot_product_flash_attention_for_cpu,
    aten.max_pool2d_with_indices, aten.avg_pool2d,
)  # fmt: skip
"""What torch would take apart but is better left whole."""
TAKEN_APART = (
    aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data,
    aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward,
    aten.native_batch_norm, aten.native_batch_norm_backward, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit_no_training, aten._fused_rms_norm,
    aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward, aten.sigmoid_backward, aten.tanh_backward,
    aten.threshold_backward, aten.leaky_relu, aten.hardswish, aten.hardtanh, aten.elu, aten.mse_loss,
    aten.mse_loss_backward, aten.var_mean,
)  # fmt: skip


def backend(module: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """The backend that `torch.compile` calls: `torch.compile(model, backend="tensor_comprehensions")`."""
    captured = aot_autograd(
        fw_compiler=_compile, decompositions=decomposition_table(), partition_fn=min_cut_rematerialization_partition
    )
    compiled: Callable[..., Any] = captured(module, examples)
    return compiled


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """How torch takes operations apart before a graph comes here."""
    table = {**core_aten_decompositions(), **get_decompositions(TAKEN_APART)}
    return {target: how for target, how in table.items() if target.overloadpacket not in KEPT}


def _compile(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    if has_symbolic_shapes(module.graph):
        return make_boxed_func(PerShapeCache(module, fuse_regions))
    fused = fuse_regions(module)
    work = sum(map(op_flops, module.graph.nodes))
    for observer in observers:
        observer(fused, work)
    return make_boxed_func(fused.forward)


def fuse_regions(module: fx.GraphModule, bounds: RegionLimits = ANY) -> fx.GraphModule:
    """`module` with calls of kernels in place of the regions that they compute."""
    split_conv_backward(module.graph)
    taken = _taken(module.graph, bounds)
    _explain(module.graph, taken)
    return _rewritten(module, taken)


def _taken(graph: fx.Graph, bounds: RegionLimits) -> list[FusedRegion]:
    """The regions of `graph` with their defs, without the operations whose formulas do not fit their arguments."""
    refused: set[fx.Node] = set()
    while True:
        before, taken = len(refused), []
        for region in filter(is_profitable, find_regions(graph, refused, bounds)):
            try:
                taken.append(emit_def(region))
            except UnsupportedArguments as refusal:
                get_logger("graph").debug("%s stays with torch: %s", refusal.node.target, refusal.why)
                refused.add(refusal.node)
        if len(refused) == before:
            return taken


def _parts(region: FusedRegion) -> Callable[[], fx.GraphModule] | None:
    """What to try where the kernel of `region` is slower than torch: kernels with fewer products, or with none."""
    products = sum(n.target in FLOPS for n in region.nodes)
    if not products or len(region.nodes) == 1:
        return None
    return lambda: fuse_regions(eager_module(region), RegionLimits(1) if products > 1 else RegionLimits(1, alone=True))


def flops_share(graph: fx.Graph, taken: Sequence[FusedRegion]) -> float:
    """The part of the floating-point work of `graph` that is in `taken`; of other operations one for each element."""
    total = sum(map(op_flops, graph.nodes))
    return sum(op_flops(n) for region in taken for n in region.nodes) / total if total else 0.0


def _explain(graph: fx.Graph, taken: Sequence[FusedRegion]) -> None:
    log = get_logger("graph")
    if not log.isEnabledFor(DEBUG):
        return
    inside = {node for region in taken for node in region.nodes}
    for node in graph.nodes:
        if is_compute(node) and node not in inside:
            log.debug("%s stays with torch: %s", node.target, "alone" if is_expressible(node) else "not in the table")
    for region in taken:
        log.debug("%d operations in one def:\n%s", len(region.nodes), region.text)
    log.debug(
        "%d kernels take %d operations, %.0f %% of the work", len(taken), len(inside), 100 * flops_share(graph, taken)
    )


def _rewritten(module: fx.GraphModule, taken: Sequence[FusedRegion]) -> fx.GraphModule:
    """A new module: every node is made when something needs it, a region when one of its outputs is needed."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    of = {node: region for region in taken for node in (*region.nodes, *region.outputs)}
    names = list(range(len(taken)))
    fresh = fx.GraphModule(module, graph)

    def make(node: fx.Node) -> fx.Node:
        if node not in made:
            if node in of:
                call(of[node])
            else:
                for needed in node.all_input_nodes:
                    make(needed)
                made[node] = graph.node_copy(node, lambda n: made[n])
        return made[node]

    def call(region: FusedRegion) -> None:
        name = f"region_{names.pop(0)}"
        inputs = tuple(make(n) for n in region.inputs)
        op = _operators.get(region.text, lambda: define(region.text)[NAME])
        work = sum(map(op_flops, region.nodes))
        results = tuple(OutputView.of(n.meta["val"].shape, memory_order(n)) for n in region.outputs)
        fresh.add_submodule(name, KernelOrEager(op, eager_module(region), results, region.finite, _parts(region), work))
        result = graph.call_module(name, inputs)
        for k, node in enumerate(region.outputs):
            made[node] = graph.call_function(_item, (result, k))

    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            make(node)
    graph.lint()
    fresh.recompile()
    return fresh


def _item(values: tuple[Tensor, ...], position: int) -> Tensor:
    return values[position]


def eager_module(region: FusedRegion) -> fx.GraphModule:
    """The operations of `region` as torch runs them: from its inputs to a tuple of its outputs."""
    graph = fx.Graph()
    made = {n: graph.placeholder(f"x{k}") for k, n in enumerate(region.inputs)}
    for n, placeholder in made.items():
        placeholder.meta = dict(n.meta)

    def make(node: fx.Node) -> fx.Node:
        if node not in made:
            for needed in node.all_input_nodes:
                make(needed)
            made[node] = graph.node_copy(node, lambda n: made[n])
        return made[node]

    graph.output(tuple(make(n) for n in region.outputs))
    return fx.GraphModule({}, graph)
