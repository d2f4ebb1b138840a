"""Random programs as operators: autograd, torch.func and forward mode against differences in double."""

from __future__ import annotations

import time

import pytest

from tensor_comprehensions.core import knobs
from tests.helpers.gradient_checks import Rejected
from tests.helpers.gradient_operators import check_operator
from tests.helpers.gradient_programs import draw_program

SEED = time.time_ns() % 1_000_000_000

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own forward mode


@pytest.mark.parametrize("interpret", [True, False], ids=["interpreted", "compiled"])
def test_random_programs(interpret: bool, capsys: pytest.CaptureFixture[str]) -> None:
    right = n = 0
    while right < (3 if interpret else 1):
        name, n = f"{SEED}:{interpret}:{n}", n + 1
        program = draw_program(name, 2)
        try:
            with knobs.override_knobs(interpret=interpret):
                check_operator(program, n)
            right += 1
        except Rejected:
            assert n < 50, "most programs are rejected"
        except Exception as error:
            raise AssertionError(f"program {name}, {program.sizes}:\n{program.source}") from error
    with capsys.disabled():
        print(f" [seed {SEED}]", end="")
