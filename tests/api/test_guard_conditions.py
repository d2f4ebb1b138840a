"""Every condition under which machine code serves a call of any size matters: without it, a call goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.api import Op
from tensor_comprehensions.compiler.compiled_kernel import CompiledRangeKernel
from tensor_comprehensions.core.knobs import override_knobs
from tensor_comprehensions.dispatch import inline_cache
from tensor_comprehensions.runtime.fastpath import launch_ir
from tests.api.test_inner_sizes import ATTENTION, LAYER, PRODUCT, SOFTMAX
from tests.helpers.row_kernels import require_close

BATCHED = "def bmm(float(B,N,K) P, float(B,K,D) Q) -> (R) { R(b,n,d) +=! P(b,n,k) * Q(b,k,d) }"
LOOKUP = "def lookup(float(V,D) t, int32(N,L) k) -> (o) { o(n,d) +=! t(k(n,l),d) }"
SIZES = {"B": 3, "N": 5, "K": 4, "D": 6, "T": 5, "V": 9, "L": 2}
PROGRAMS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "softmax": (SOFTMAX, "ND", ("ND",)),
    "product": (PRODUCT, "NKD", ("NK", "KD")),
    "product by columns": (PRODUCT, "D", ("NK", "KD")),
    "layer by rows": (LAYER, "N", ("NK", "DK", "D")),
    "layer": (LAYER, "NKD", ("NK", "DK", "D")),
    "batches": (BATCHED, "B", ("BNK", "BKD")),
    "batches of rows": (BATCHED, "BN", ("BNK", "BKD")),
    "attention": (ATTENTION, "T", ("TK", "TK", "TK")),
    "lookup": (LOOKUP, "N", ("VD", "NL")),
}
CONDITIONS = [
    (name, tensor, part, d)
    for name, (_, dynamic, tensors) in PROGRAMS.items()
    for tensor, dims in enumerate(tensors)
    for part, d in product(("sizes", "strides"), range(len(dims)))
    if part == "strides" or dims[d] not in dynamic or any(dims[d] in other for other in tensors[:tensor])
]
"""All but the sizes that are known from no tensor before."""


@pytest.fixture(autouse=True, scope="module")
def kernels_of_other_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Most tests differ in their guards alone, so kernels are compiled once."""
    folder = str(tmp_path_factory.mktemp("cache"))
    with override_knobs(cache="readwrite", cache_dir=folder, verify=False):
        yield


def make_tensor(dims: str, *, is_index: bool) -> Tensor:
    """Numbers of these sizes, with memory behind them."""
    memory = torch.randint(0, SIZES["V"], (20_000,), dtype=torch.int32) if is_index else torch.randn(20_000)
    shape = [SIZES[d] for d in dims]
    memory[: torch.Size(shape).numel()][-1] = SIZES["V"] - 1
    return memory.as_strided(shape, torch.empty(shape).stride())


def list_changes(x: Tensor) -> Iterator[Tensor]:
    """Views of the memory of `x` that differ in one size, or in one stride, or in more as these say."""
    for d in range(x.ndim):
        for more in (1, -1):
            shape = [*x.shape[:d], x.shape[d] + more, *x.shape[d + 1 :]]
            yield x.as_strided(shape, x.stride())
            yield x.as_strided(shape, torch.empty(shape).stride())
        for factor in (2, 3):
            yield x.as_strided(x.shape, [s * factor if n == d else s for n, s in enumerate(x.stride())])
            yield x.as_strided(x.shape, [s * factor if n <= d else s for n, s in enumerate(x.stride())])


def list_calls(name: str) -> Iterator[list[Tensor]]:
    """A call, and others of which one tensor differs."""
    text, _, tensors = PROGRAMS[name]
    first = [make_tensor(dims, is_index=text == LOOKUP and dims == "NL") for dims in tensors]
    yield first
    for n, x in enumerate(first):
        for other in list_changes(x):
            yield [*first[:n], other, *first[n + 1 :]]


def call_all(name: str, op: Op) -> None:
    """Each call gives what the reference evaluator does, or is refused by both."""
    calls = list(list_calls(name))
    op(*calls[0])
    for given in calls:
        try:
            expected: Any = op.reference(*given)
        except tc.TCError:
            with pytest.raises(tc.TCError):
                op(*given)
        else:
            for _ in range(2):
                require_close(op(*given), expected, op, given)


@pytest.mark.sampled
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_that_differ_in_a_size_or_a_stride(name: str) -> None:
    text, dynamic, _ = PROGRAMS[name]
    (op,) = tc.define(text, dynamic=set(dynamic))
    call_all(name, op)


@pytest.mark.sampled  # sizes and strides of each program
@pytest.mark.parametrize(("name", "tensor", "part", "dimension"), CONDITIONS)
def test_every_condition_matters(
    name: str, tensor: int, part: str, dimension: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, dynamic, _ = PROGRAMS[name]
    (op,) = tc.define(text, dynamic=set(dynamic))
    wanted = op.function.parameters[tensor].name
    original = inline_cache._row_guard

    def drop(compiled: CompiledRangeKernel, t: Any, *rest: Any) -> Any:
        guard = original(compiled, t, *rest)
        if t.name != wanted or not rest:
            return guard
        values = list(getattr(guard, part))
        values[dimension] = launch_ir.ANY if part == "strides" else launch_ir.FIRST_PARAMETER + 7
        return replace(guard, **{part: tuple(values)})

    monkeypatch.setattr(inline_cache, "_row_guard", drop)
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError)):
        call_all(name, op)
