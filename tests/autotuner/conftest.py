"""One process to fork workers from, for all tests of the tuner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensor_comprehensions.autotuner.processes import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()
