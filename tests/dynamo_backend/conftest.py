"""Kernels in every test: which side is faster depends on the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tensor_comprehensions.core.single_flight import SingleFlightCache
from tensor_comprehensions.dynamo_backend import backend, kernel_or_eager


@pytest.fixture
def kernels_always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel wins every race, and races of other tests are forgotten."""
    monkeypatch.setattr(kernel_or_eager, "kernel_is_faster", lambda ours, theirs: True)
    monkeypatch.setattr(backend, "_kernels", SingleFlightCache(backend.LIMIT))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def small_regions(kernels_always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for every single operation that has a formula."""
    monkeypatch.setattr(backend, "is_profitable", lambda region: True)
