"""Operations that torch captures, as graphs of operations with formulas in the table.

The captured graph keeps every operation whole: a decomposition is only another way to write a def, so operations that
stay with torch run in their fastest form.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, _decomp, fx
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from ..core.diagnostics import get_logger
from ..core.single_flight import SingleFlightCache
from ..dispatch.arguments import TYPES
from . import convolution, matmul, pooling, upsampling  # noqa: F401 (they add rows to the tables)
from .op_table import MULTI_OUTPUT_OPS, TABLE, VIEWS, aten

SPLIT = aten.split_with_sizes.default
KEPT = (
    aten.addmm, aten.embedding_dense_backward, aten._scaled_dot_product_flash_attention_for_cpu,
    aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward, aten.avg_pool2d, aten.avg_pool2d_backward,
    aten.index_add, aten.index_put, aten.gather, aten.scatter_add, aten.select_scatter, aten.diagonal_scatter,
    aten.slice_backward, aten.select_backward, aten.constant_pad_nd, aten.roll,
)  # fmt: skip
"""Operations that torch would decompose, but that are better left whole."""
DECOMPOSED = (
    aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data,
    aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward,
    aten.native_batch_norm, aten.native_batch_norm_backward, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit_no_training, aten._fused_rms_norm,
    aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward, aten.sigmoid_backward, aten.tanh_backward,
    aten.threshold_backward, aten.leaky_relu, aten.hardswish, aten.hardtanh, aten.elu, aten.mse_loss,
    aten.mse_loss_backward, aten.var_mean,
)  # fmt: skip
"""Operations that are decomposed in addition to those of core ATen."""
SCALED_PRODUCTS = aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.addbmm.default
"""Operations that add a product times `alpha`."""
LIMIT = 4096
_META = "tensor_comprehensions.decomposition"
"""The key of a node's decomposition in its `meta`."""


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The computation of an operation, by operations of the table.

    Attributes:
        graph: takes the distinct tensors among the arguments, in order.
        is_view: whether it has only views, which cost nothing.
        weight: the number of operations that are not views.
    """

    graph: fx.Graph
    is_view: bool
    weight: int


_decompositions: SingleFlightCache[str, Decomposition | None] = SingleFlightCache(LIMIT)


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of the operations that captured graphs leave whole."""
    core = getattr(_decomp, "_core_aten_decompositions_post_autograd", _decomp.core_aten_decompositions)
    table = {**core(), **get_decompositions(DECOMPOSED), aten._safe_softmax.default: _decompose_safe_softmax}
    return {target: how for target, how in table.items() if target.overloadpacket not in KEPT}


def _decompose_safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """A softmax whose rows of -inf give 0, from one maximum and one sum for each row."""
    returned = x.dtype if dtype is None else dtype
    x = x.to(torch.promote_types(returned, torch.float32))
    most = x.amax(dim, keepdim=True)
    powers = torch.exp(x - torch.where(most == -torch.inf, 0.0, most))
    total = powers.sum(dim, keepdim=True)
    return (powers / torch.where(total == 0, 1.0, total)).to(returned)


_table: dict[Any, Callable[..., Any]] = {}


def has_formula(node: fx.Node) -> bool:
    """Whether the table has a formula for `node`, on CPU tensors of known sizes, and its arguments allow it."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and (
            node.args[0].target is SPLIT or node.args[0].target in MULTI_OUTPUT_OPS
        )
    listed = node.target in TABLE or node.target in MULTI_OUTPUT_OPS or node.target is SPLIT
    return listed and has_plain_values(node) and not _ignores_product(node)


def _ignores_product(node: fx.Node) -> bool:
    """Whether `node` adds 0 times a product. torch does not read its factors then, which may be NaN."""
    return node.target in SCALED_PRODUCTS and node.kwargs.get("alpha", 1) in (0, 0.0)


def has_plain_values(node: fx.Node) -> bool:
    """Whether defs support the tensors that `node` takes and returns; unused results do not count."""
    inputs = (n.meta.get("val") for n in node.all_input_nodes if n.target is not SPLIT)
    return all(map(is_plain, inputs)) and is_plain(_used_values(node))


def _used_values(node: fx.Node) -> object:
    value = node.meta.get("val")
    return [value[k] for k in used_results(node)] if isinstance(value, tuple | list) else value


def used_results(node: fx.Node) -> list[int]:
    """The indices of the results of `node` that are used."""
    return sorted({n.args[1] for n in node.users if n.target is operator.getitem})  # type: ignore[misc]


def is_plain(value: object) -> bool:
    """Whether `value` is a CPU tensor of known sizes, none of them 0, or several such tensors."""
    if isinstance(value, tuple | list):
        return all(x is None or is_plain(x) for x in value)
    if not isinstance(value, Tensor):
        return False
    sizes = all(isinstance(n, int) and n > 0 for n in value.shape)
    return sizes and value.device.type == "cpu" and value.dtype in TYPES and value.layout is torch.strided


def find_decomposition(node: fx.Node) -> Decomposition | None:
    """The decomposition of `node`; None if it has its own formula, or if only torch can compute it."""
    if _META not in node.meta:
        node.meta[_META] = _find(node) if _may_decompose(node) else None
    found: Decomposition | None = node.meta[_META]
    return found


def is_random(node: fx.Node) -> bool:
    """Whether `node` draws random numbers. Attention does so for its dropout only."""
    if not is_seeded(node):
        return False
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: a.default_value for a in schema} | dict(zip((a.name for a in schema), node.args, strict=False))
    return bool((given | node.kwargs).get("dropout_p", True))


def is_seeded(node: fx.Node) -> bool:
    """Whether `node` is an operation that may draw random numbers."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _may_decompose(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_random(node):
        return False
    if node.target in TABLE or node.target in MULTI_OUTPUT_OPS or node.target is SPLIT:
        return False
    return not node.target._schema.is_mutable and has_plain_values(node) and not _ignores_product(node)


def _find(node: fx.Node) -> Decomposition | None:
    if not _table:
        _table.update(decomposition_table())
    if node.target not in _table:
        return None
    return _decompositions.get(_make_decomposition_key(node), lambda: _trace(node))


def _make_decomposition_key(node: fx.Node) -> str:
    """The facts that the decomposition of `node` depends on, as a text."""
    numbers = {n: k for k, n in enumerate(node.all_input_nodes)}
    arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: _Operand(numbers[n]))  # type: ignore[arg-type,return-value]
    tensors = [(tuple(x.shape), x.stride(), x.dtype) for x in map(_get_fake_tensor, numbers)]
    return f"{node.target} {arguments!r} {tensors} {used_results(node)} {torch.get_default_dtype()}"


@dataclass(frozen=True, slots=True)
class _Operand:
    number: int


def _get_fake_tensor(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _trace(node: fx.Node) -> Decomposition | None:
    """Run the decomposition of `node` on tensors without elements, and keep its operations."""
    sources = node.all_input_nodes

    def call(*tensors: Tensor) -> Any:
        of = dict(zip(sources, tensors, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: of[n])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with unset_fake_temporarily(), FakeTensorMode(), torch.no_grad(), torch._C._DisableAutocast():
        tensors = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            for x in map(_get_fake_tensor, sources)
        ]
        try:
            graph = make_fx(call, _table, tracing_mode="real")(*tensors).graph
        except Exception as refusal:  # a decomposition of torch that does not take these arguments
            get_logger("graph").debug("%s cannot be decomposed: %s", node.target, refusal)
            return None
    _drop_results(graph, node)
    _restore_views(graph)
    inner = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    if not all(map(has_formula, inner)) or any(True for n in inner for _ in convolution.padded_weights(n)):
        return None
    work = [n for n in inner if n.target is not operator.getitem and n.target not in VIEWS and n.target is not SPLIT]
    return Decomposition(graph, not work, len(work))


def _restore_views(graph: fx.Graph) -> None:
    """Use a view for each `as_strided` of all elements in their order, as in torch's decomposition of group norms."""
    for node in graph.nodes:
        if node.target is not aten.as_strided.default or any(node.args[3:]):
            continue
        source, result = node.args[0].meta["val"], node.meta["val"]
        if source.is_contiguous() and result.is_contiguous() and source.numel() == result.numel():
            node.target, node.args = aten.view.default, (node.args[0], node.args[1])


def _drop_results(graph: fx.Graph, node: fx.Node) -> None:
    """Remove from `graph` the nodes that only unused results need."""
    (output,) = (n for n in graph.nodes if n.op == "output")
    if isinstance(output.args[0], tuple | list):
        used = used_results(node)
        output.args = ([x if k in used else None for k, x in enumerate(output.args[0])],)
        graph.eliminate_dead_code()
