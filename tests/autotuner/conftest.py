"""One process to fork workers from, for all tests of the tuner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensor_comprehensions.autotuner.worker_pool import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()
