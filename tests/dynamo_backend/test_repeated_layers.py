"""Equal layers of a network become equal regions, which compile once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tensor_comprehensions.dynamo_backend.emit_def import emit_def
from tensor_comprehensions.dynamo_backend.insert_kernels import region_key
from tensor_comprehensions.dynamo_backend.kernel_or_eager import KernelOrEager, kernel_flops
from tensor_comprehensions.dynamo_backend.partition import LARGEST, find_regions
from tensor_comprehensions.dynamo_backend.repeated_layers import number_repetitions

LAYERS, WIDTH = 9, 256


def _capture(rows: int, layers: int = LAYERS) -> fx.Graph:
    """Layers before which a normalization runs, and one more at the end; before them an operation of its own."""

    def network(x: Tensor, weight: Tensor) -> Tensor:
        x = torch.tanh(x)
        for k in range(layers):
            y = F.layer_norm(x, (WIDTH,))
            x = x + F.gelu(y @ weight[2 * k]) @ weight[2 * k + 1]
        return F.layer_norm(x, (WIDTH,))

    fake = (torch.randn(rows, WIDTH), torch.randn(2 * layers, WIDTH, WIDTH))
    return make_fx(network, tracing_mode="fake")(*fake).graph


def test_layers_have_one_def() -> None:
    graph = _capture(rows=256)
    numbers = number_repetitions(graph, LARGEST)
    assert sorted(set(numbers.values())) == list(range(LAYERS))
    assert not any("tanh" in str(n.target) for n in numbers)
    inside = [r for r in find_regions(graph) if r.nodes[0] in numbers]
    assert all(len({numbers.get(n) for n in r.nodes}) == 1 for r in inside)
    assert len(inside) == LAYERS
    assert len({region_key(emit_def(r)) for r in inside}) == 1


def test_repetitions_start_where_the_fewest_bytes_pass() -> None:
    """The sum of a layer passes to the next one alone; after the normalization, both would pass."""
    numbers = number_repetitions(_capture(rows=256), LARGEST)
    first = [n for n, k in numbers.items() if k == 0]
    assert "layer_norm" in str(first[0].target)
    assert "add" in str(first[-1].target)


def test_small_layers_share_regions() -> None:
    numbers = number_repetitions(_capture(rows=1), LARGEST)
    assert 1 < len(set(numbers.values())) < LAYERS


def test_a_graph_of_one_region_is_not_split() -> None:
    assert number_repetitions(_capture(rows=256, layers=2), LARGEST) == {}


def test_repetitions_without_a_product_are_not_split() -> None:
    def network(x: Tensor) -> Tensor:
        for _ in range(2 * LARGEST):
            x = torch.tanh(x) + 1
        return x

    graph = make_fx(network, tracing_mode="fake")(torch.randn(300, 300)).graph
    assert number_repetitions(graph, LARGEST) == {}


class _Region(KernelOrEager):
    """A region whose kernel does 5 operations."""

    flops = 5

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


def test_the_work_of_a_shared_region_counts_at_each_call() -> None:
    root, graph, region = torch.nn.Module(), fx.Graph(), _Region()
    x = graph.placeholder("x")
    for name in ("first", "second"):
        root.add_module(name, region)
        x = graph.call_module(name, (x,))
    graph.output(x)
    assert kernel_flops(fx.GraphModule(root, graph)) == 10
