"""The search for tiles of tensor cores: what its space holds, and what a worker says of a candidate."""

from __future__ import annotations

from random import Random
from typing import cast

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.autotuner import tuner_pb2 as pb
from tensor_comprehensions.autotuner import worker_gpu
from tensor_comprehensions.autotuner.problem import problem_message
from tensor_comprehensions.autotuner.space_tiles import tile_space
from tensor_comprehensions.autotuner.worker import VERSION
from tensor_comprehensions.cache.options_proto import from_message, to_message
from tensor_comprehensions.dispatch.call_steps import normalize_detached
from tensor_comprehensions.options import MappingOptions, TileOptions, check_tiles
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target

SM80 = parse_gpu_target("cuda:sm_80")
MODEL = "emulated:sm_80"
SOURCE = "def mm(half(M,K) A, half(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }"
FLOATS = "def mm(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }"
needs_compiler = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)


def test_genes_are_the_fields_of_the_options() -> None:
    odd = TileOptions(tile=(48, 24, 16), stages=5)
    made, seeds = tile_space(SM80, TileOptions(), [odd])
    assert [g.name for g in made.genes] == [
        "tile",
        "warps",
        "stages",
        "group",
        "split",
        "instruction",
        "cluster",
        "warpgroups",
    ]
    options = [made.options(g) for g in seeds]
    assert options[:2] == [TileOptions(), odd]
    assert len(set(options)) == len(options)
    assert TileOptions(tile=(128, 64, 32)) in options
    assert made.genome(TileOptions(tile=(16, 512, 16))) is None


def test_random_tiles_are_legal_and_can_be_stored() -> None:
    made, _ = tile_space(SM80, TileOptions())
    source = Random(1)
    found = [cast("TileOptions", o) for _ in range(200) if (o := made.key(made.options(made.random(source))))]
    assert len(set(found)) > 60
    for options in found:
        check_tiles(options, SM80)
        assert made.options(made.genome(options) or ()) == options
        assert from_message(to_message(options)) == options


def request_reply(options: object, source: str = SOURCE) -> pb.Reply:
    op, dtype = tc.define(source).mm, torch.float16 if source == SOURCE else torch.float32
    tensors = torch.ones(40, 32, dtype=dtype), torch.ones(32, 24, dtype=dtype)
    problem = problem_message(op.function, normalize_detached(op._kernels.call_signature, tensors, {}), 0)
    request = pb.Request(
        version=VERSION, stage=pb.EVALUATE, problem=problem, options=[to_message(options)], device=MODEL,
        fingerprint=MODEL,
    )  # fmt: skip
    return pb.Reply.FromString(worker_gpu.handle_gpu_request(request.SerializeToString(), lambda phase: None))


@needs_compiler
def test_what_a_worker_answers() -> None:
    assert request_reply(TileOptions(tile=(32, 32, 32), warps=(2, 1))).status == pb.OK
    assert request_reply(MappingOptions.naive()).status == pb.OK
    assert "no tiles of tile" in request_reply(TileOptions(tile=(256, 256, 128))).message
    assert "no product of mm" in request_reply(TileOptions(), FLOATS).message
