"""The options of the mapper: builders, presets, and what is illegal."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest

from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.options import MappingOptions, check_mapping
from tensor_comprehensions.target import GPUS, parse_gpu_target

H200 = parse_gpu_target("cuda:sm_90")
PRESETS = ("naive", "single_thread", "pointwise", "mlp", "convolution", "group_convolution")


def test_builders_give_copies() -> None:
    naive = MappingOptions.naive()
    built = naive.tile(32, 32).map_to_threads(32, 8).map_to_blocks(4, 5).unroll(16).fuse("max").use_shared_memory()
    assert built == MappingOptions(
        tile=(32, 32),
        threads=(32, 8),
        blocks=(4, 5),
        unroll=16,
        outer_fusion="max",
        intra_tile_fusion="max",
        shared_memory=True,
    )
    assert naive == MappingOptions.naive()


def test_records_are_plain_values() -> None:
    options = MappingOptions().tile(8, 0, 4).unroll(2)
    assert eval(repr(options)) == options
    assert pickle.loads(pickle.dumps(options)) == copy.deepcopy(options) == options
    assert hash(options) == hash(MappingOptions(tile=(8, 0, 4), unroll=2))
    assert options.tile == (8, 0, 4)
    assert options.unroll + 1 == 3


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kind", sorted(GPUS))
def test_presets_are_legal_everywhere(name: str, kind: str) -> None:
    check_mapping(getattr(MappingOptions, name)(), GPUS[kind])


ILLEGAL: tuple[dict[str, Any], ...] = (
    {"tile": ()},
    {"tile": 32},
    {"tile": (-1,)},
    {"threads": ()},
    {"threads": (0,)},
    {"threads": (1, 1, 1, 1)},
    {"threads": (1024, 2)},
    {"threads": (2048,)},
    {"threads": (1, 1, 65)},
    {"threads": ("a",)},
    {"blocks": (1, 65536)},
    {"blocks": (0,)},
    {"unroll": 0},
    {"unroll": True},
    {"outer_fusion": "most"},
    {"intra_tile_fusion": 3},
    {"shared_memory": 1},
    {"max_shared_memory": 1024},
    {"shared_memory": True, "max_shared_memory": 1 << 20},
    {"unroll_copy_shared": True},
    {"double_buffer": True},
    {"split_k": 0},
    {"vector_width": 3},
    {"shared_depth": -2},
    {"private_depth": 1.0},
    {"read_only_cache": 1},
)


@pytest.mark.parametrize("wrong", ILLEGAL, ids=repr)
def test_illegal_options_are_reported(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as error:
        check_mapping(replace(MappingOptions(), **wrong), H200)
    assert next(iter(wrong)) in str(error.value)


def test_limits_are_those_of_the_target() -> None:
    options = MappingOptions(shared_memory=True, max_shared_memory=100 << 10)
    check_mapping(options, H200)
    with pytest.raises(ArgumentError, match="sm_75"):
        check_mapping(options, parse_gpu_target("cuda:sm_75"))
