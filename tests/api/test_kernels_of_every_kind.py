"""What kernels for CPUs, GPUs and sparse operands have in common."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc

DENSE = "def f(float(N,K) x, float(M,K) w) -> (o) { o(n,m) +=! x(n,k) * w(m,k) }"
SPARSE = "def f(float(N,M) A: csr, float(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }"
MATRIX = tc.as_sparse(torch.eye(4), "csr")


def compile_dense(target: str | None) -> Any:
    return tc.define(DENSE).f.compile(torch.randn(5, 4), torch.randn(3, 4), target=target)


def compile_sparse(target: str | None) -> Any:
    return tc.define(SPARSE).f.compile(MATRIX, torch.randn(4), target=target)


KERNELS = {
    "cpu": lambda: compile_dense(None),
    "gpu": lambda: compile_dense("cuda:sm_80"),
    "sparse": lambda: compile_sparse(None),
    "sparse-gpu": lambda: compile_sparse("cuda:sm_80"),
}


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_texts_and_numbers(make: Callable[[], Any]) -> None:
    kernel = make()
    assert kernel.compile_seconds > 0
    assert kernel.resources
    assert all(n >= 0 for n in kernel.resources.values())
    assert str(kernel.show()) == kernel.source("schedule")
    with pytest.raises(tc.ArgumentError, match="no source of kind 'odd'"):
        kernel.source("odd")


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_a_copy_is_the_kernel_and_a_pickle_is_refused(make: Callable[[], Any]) -> None:
    kernel = make()
    assert copy.copy(kernel) is kernel
    assert copy.deepcopy([kernel])[0] is kernel
    with pytest.raises(tc.ArgumentError, match="code of this process"):
        pickle.dumps(kernel)
