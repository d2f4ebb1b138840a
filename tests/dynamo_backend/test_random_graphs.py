"""Random programs give what eager gives: `python -m tools.fuzz graphs` runs more of them.

Every run draws others; what fails is printed as a program.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.dynamo_backend.random_graphs import find_fault, random_graph, reduce_program

EXAMPLES = 6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small_regions")
@settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=False, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)  # fmt: skip
@given(seed=st.integers(0, 2**48 - 1))
def test_random_graphs_agree_with_eager(seed: int) -> None:
    graph = random_graph(Random(seed))
    fault = find_fault(graph)
    if fault:
        short = reduce_program(graph)
        pytest.fail(f"{find_fault(short)}\nrandom_graph(Random({seed})), reduced:\n{short}")
