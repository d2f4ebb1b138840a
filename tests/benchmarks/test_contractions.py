"""The benchmark of contractions: its list, its checks, its reports. No time is asserted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.bars import draw
from benchmarks.contractions import (
    BOUND,
    EINSUM,
    NUMPY,
    SEARCHED,
    SIZES,
    VIEW,
    Contraction,
    Settings,
    contractions,
    main,
    means,
    measure,
    part,
    random_contractions,
    read_json,
    sampled_error,
    select,
    write_json,
)
from benchmarks.runner import OURS, def_name
from tensor_comprehensions.tc_lang.semantics.check import compile_source

GIB = 1 << 30


@pytest.fixture(scope="module")
def small() -> Contraction:
    (found,) = select(contractions("odd"), ["abcd-aebf-fdec"])
    return found


def test_a_contraction_in_row_major_order(small: Contraction) -> None:
    assert small.equation == "fbea,cedf->dcba"
    assert small.product == (5 * 7, 9 * 11, 13 * 15)
    assert small.flops == 2 * math.prod(small.product)
    (function,) = compile_source(small.source)
    assert function.name == def_name(small.source) == "contract"


@pytest.mark.parametrize("size", SIZES)
def test_the_list(size: str) -> None:
    cases = contractions(size)
    assert len({c.name for c in cases}) == len({c.id for c in cases}) == 48
    for c in cases:
        output, *factors = map(set, c.tensors)
        assert output == factors[0] ^ factors[1]
        assert set(c.sizes) == factors[0] | factors[1]
        elements = sum(math.prod(c.shape(t)) for t in c.tensors)
        assert elements * c.dtype.itemsize < 1.3 * GIB


def test_random_contractions_are_those_of_their_seed() -> None:
    cases = random_contractions(50, 1)
    assert cases == [*random_contractions(20, 1), *cases[20:]]
    assert cases != random_contractions(50, 2)
    for c in cases:
        output, *factors = map(set, c.tensors)
        assert output == factors[0] ^ factors[1]
        assert 3 <= len(c.sizes) <= 8
        assert set(c.sizes) == factors[0] | factors[1]
        assert 2e6 <= c.flops <= 60e6


def test_random_contractions_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--random", "1", "--seed", "1", "--seconds", "0.01", "--without", NUMPY]) == 0
    assert "ours / torch.mm: geometric mean" in capsys.readouterr().out


def test_measured_and_reported(small: Contraction, tmp_path: Path) -> None:
    result = measure(small, "odd", Settings(seconds=0.01))
    assert set(result.times) == {OURS, BOUND, EINSUM, NUMPY}
    assert not result.failures
    assert max(result.errors.values()) < 1e-4
    assert result.schedule
    assert result.ratios[BOUND].low <= result.ratios[BOUND].median <= result.ratios[BOUND].high
    write_json(tmp_path / "r.json", [result], {"seconds": 0.01})
    assert read_json(tmp_path / "r.json") == [result]
    assert sum(small.name in line for line in means([result])) == 3
    draw([result], tmp_path / "r.svg")
    assert "torch.mm of equal size" in (tmp_path / "r.svg").read_text()


def test_einsum_does_equal_work_and_its_view_stands_beside() -> None:
    (case,) = select(contractions("odd"), ["abcdef-dega-gfbc"])
    assert not torch.einsum(case.equation, *(torch.randn(case.shape(t)) for t in case.tensors[1:])).is_contiguous()
    assert {EINSUM, VIEW} <= set(measure(case, "odd", Settings(seconds=0.01)).times)


def test_search_and_regret(small: Contraction) -> None:
    result = measure(small, "odd", Settings(seconds=0.01, search=3, left_out=(NUMPY,)))
    assert set(result.times) == {OURS, SEARCHED, BOUND, EINSUM}
    assert "tile(" in result.searched
    assert result.regret is not None
    assert result.regret >= 0
    assert result.over(BOUND, SEARCHED) > 0
    *_, last = means([result])
    assert last.startswith("regret of the model: mean")
    assert small.name in last


def test_shards_are_a_partition() -> None:
    cases = contractions("odd")
    parts = [part(cases, f"{k}/5") for k in range(1, 6)]
    assert sorted(c.name for p in parts for c in p) == sorted(c.name for c in cases)
    with pytest.raises(SystemExit, match="K from 1 to N"):
        part(cases, "6/5")


def test_a_wrong_element_is_found(small: Contraction) -> None:
    a, b = (torch.randn(small.shape(t)) for t in small.tensors[1:])
    right = torch.einsum(small.equation, a, b)
    assert sampled_error(small, a, b, right, seed=0) < 1e-5
    assert sampled_error(small, a, b, right.flip(0), seed=0) > 0.1


def test_command_line_lists_and_loads(small: Contraction, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--kernels", "ccsd9"]) == 0
    assert capsys.readouterr().out.split() == ["abcd-aebf-fdec", "ccsd", "fbea,cedf->dcba"]
    write_json(tmp_path / "r.json", [measure(small, "odd", Settings(seconds=0.01))], {})
    assert main(["--load", str(tmp_path / "r.json")]) == 0
    assert "geometric mean" in capsys.readouterr().out
