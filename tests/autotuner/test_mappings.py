"""The search for mappings to a graphics processor, by a model of one: what is searched, rejected and found."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.autotuner import op_api_gpu, worker_gpu
from tensor_comprehensions.autotuner import tuner_pb2 as pb
from tensor_comprehensions.autotuner.problem import problem_message
from tensor_comprehensions.autotuner.space_gpu import PRESETS, mapping_space
from tensor_comprehensions.autotuner.worker import VERSION
from tensor_comprehensions.cache.options_proto import to_message
from tensor_comprehensions.compiler.gpu_passes import CompiledGpuKernel
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.dispatch.call_steps import normalize_detached
from tensor_comprehensions.options import CpuOptions, MappingOptions, check_mapping
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target

from ..helpers.fake_cuda import FakeCuda, fake

__all__ = ["fake"]
needs_compiler = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)
MODEL = "emulated:sm_90"
SM90 = parse_gpu_target("cuda:sm_90")
SOURCE = "def mm(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }"
A, B = torch.randn(24, 12), torch.randn(12, 20)
SLOW = MappingOptions.single_thread()


def kernel() -> CompiledGpuKernel:
    made: CompiledGpuKernel = tc.define(SOURCE).mm.compile(A, B, target=SM90).compiled
    return made


def test_a_space_is_made_from_the_sizes() -> None:
    made, seeds = mapping_space(kernel().bound, SM90, SLOW)
    genes = {g.name: g.choices for g in made.genes}
    assert {"tile.0", "tile.2", "threads.0", "threads.2", "blocks.1", "unroll", "shared_memory"} <= set(genes)
    assert "tile.3" not in genes
    assert {0, 1, 2, 3, 6, 8, 12, 16, 24} <= set(genes["tile.0"])
    assert {1, 3, 5, 10, 16, 20} <= set(genes["threads.0"])
    options = [made.options(g) for g in seeds]
    assert options[0] == SLOW
    assert len(set(options)) == len(options)
    for name in PRESETS:
        preset = getattr(MappingOptions, name)()
        assert replace(preset, tile=preset.tile[:3]) in options
    assert replace(SLOW, shared_memory=True, private_memory=True) in options


def test_random_mappings_differ_and_their_options_go_together() -> None:
    made, _ = mapping_space(kernel().bound, SM90, SLOW)
    source = Random(1)
    options = [o for _ in range(300) if made.key(o := made.options(made.random(source)))]
    assert len(set(options)) > 60
    for o in options:
        check_mapping(o, SM90)
        assert made.options(made.genome(o) or ()) == o
    assert made.genome(replace(SLOW, tile=(7777,))) is None
    odd = replace(SLOW, tile=(7777,))
    again, seeds = mapping_space(kernel().bound, SM90, SLOW, [odd])
    assert again.options(seeds[1]) == odd


@needs_compiler
def test_a_search_finds_what_the_model_thinks_faster(tmp_path: Path) -> None:
    """By workers that may die; two searches with one seed agree, since the model gives the same times each time."""
    op = tc.define(SOURCE).mm
    report = tmp_path / "report.html"
    effort: dict[str, Any] = {"budget": 600, "generations": 2, "population": 8, "search": "random"}
    found = op.autotune(A, B, devices=[MODEL], options=SLOW, store=tmp_path, report=report, **effort).options
    assert found != SLOW
    assert found.threads != (1,)
    assert "mm" in report.read_text()
    assert op.compile(A, B, target=SM90).source() == op.compile(A, B, target=SM90, options=found).source()
    assert op.compile(A[:5], B, target=SM90).compiled.options is None  # other sizes are as before


def request_reply(options: object, stage: pb.Stage = pb.EVALUATE, **more: Any) -> pb.Reply:
    op = tc.define(SOURCE).mm
    problem = problem_message(op.function, normalize_detached(op._kernels.call_signature, (A, B), {}), 0)
    request = pb.Request(
        version=VERSION, stage=stage, problem=problem, options=[to_message(options)], device=MODEL,
        fingerprint=more.pop("fingerprint", MODEL), **more,
    )  # fmt: skip
    return pb.Reply.FromString(worker_gpu.handle_gpu_request(request.SerializeToString(), lambda phase: None))


@needs_compiler
def test_what_a_worker_answers() -> None:
    good, again = request_reply(MappingOptions.naive()), request_reply(MappingOptions.naive())
    assert good.status == pb.OK
    assert good.timings == again.timings
    assert good.digest == again.digest
    slow = request_reply(SLOW)
    assert slow.timings[0].low > 2 * good.timings[0].low
    assert request_reply(SLOW, hopeless=good.timings[0].low).status == pb.SLOW
    raced = request_reply(MappingOptions.naive(), pb.RACE, fresh=True)
    assert raced.status == pb.OK
    assert raced.timings[0].low == good.timings[0].low
    assert request_reply(CpuOptions()).status == pb.INVALID
    assert request_reply(MappingOptions(threads=(1024, 2))).status == pb.INVALID
    assert request_reply(SLOW, fingerprint="another").status == pb.REFUSED
    assert request_reply(SLOW, pb.COMPILE).status == pb.REFUSED


@needs_compiler
def test_wrong_kernels_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    original = worker_gpu.compile_gpu

    def broken(*given: Any, **more: Any) -> CompiledGpuKernel:
        made = original(*given, **more)
        text = made.code.source
        assert change[0] in text
        return replace(made, code=replace(made.code, source=text.replace(*change)))

    monkeypatch.setattr(worker_gpu, "compile_gpu", broken)
    change = ("+=", "-=")
    assert request_reply(SLOW).status == pb.WRONG_RESULT
    assert "an element is off" in request_reply(SLOW).message or "elements are wrong" in request_reply(SLOW).message
    change = ("a2[", "a2[1 + ")
    assert "out of bounds" in request_reply(SLOW).message


def test_devices_that_are_not_there() -> None:
    op = tc.define(SOURCE).mm
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match="there is no device cuda:0") as caught:
            op.autotune(A, B, devices=["cuda:0"])
        assert "emulated:sm_90" in str(caught.value)
    for devices, message in (
        (["cuda"], "the device is 'cuda'"),
        ("cpu:none", "the device is 'cpu:none'"),  # a single one
        (["emulated:sm_10"], "no target"),
        (["cpu", MODEL], "expected: one graphics processor"),
    ):
        with pytest.raises(ArgumentError, match=message):
            op.autotune(A, B, devices=devices)
    with pytest.raises(ArgumentError, match="expected: MappingOptions"):
        op.autotune(A, B, devices=[MODEL], options=CpuOptions())


# --- calls of a library ------------------------------------------------------------------------------------------

LAYER = """
def layer(float(M,K) A, float(K,N) B, float(N) bias) -> (out) {
    C(m,n) +=! A(m,k) * B(k,n)
    out(m,n) = fmax(C(m,n) + bias(n), 0)
}
"""
CALLS = replace(SLOW, match_library_calls=True)


class Played:
    """What evaluates in this process, on the CPU that plays a device."""

    separate, width, fingerprint = False, 1, "played"

    def __init__(self, device: str) -> None:
        self.asked: list[pb.Request] = []

    def begin(self) -> None:
        """Nothing starts."""

    def submit(self, request: pb.Request) -> Future[bytes]:
        request.device = "cpu"
        self.asked.append(request)
        future: Future[bytes] = Future()
        future.set_result(worker_gpu.handle_gpu_request(request.SerializeToString(), lambda phase: None))
        return future

    def close(self) -> None:
        """Nothing ends."""


class Event:
    """The time of the played device: a launch takes 1000 s, of one of several kernels 10 s, a product of torch 1 s."""

    clock: list[Any] = []  # noqa: RUF012

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self, stream: object) -> None:
        launches, products = self.clock
        self.at = sum(10.0 if name[-1].isdigit() else 1000.0 for name, *_ in launches) + len(products)

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


@pytest.fixture
def played(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The played device for the tuner; the products that torch computes there."""
    products: list[str] = []
    original, mm = worker_gpu.compile_gpu, torch.mm

    def compiled(*given: Any, **more: Any) -> CompiledGpuKernel:
        made = original(*given, **more)
        fake.known[made.code.source] = made
        return made

    def counted(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        products.append(str(tuple(out.shape)))
        return mm(left, right, out=out)

    monkeypatch.setattr(Event, "clock", [fake.launches, products])
    for where, name, value in (
        (op_api_gpu, "GpuWorkers", Played), (op_api_gpu, "gpu_target_of", lambda name: SM90),
        (worker_gpu, "gpu_target_of", lambda name: SM90), (worker_gpu, "gpu_fingerprint", lambda name: "played"),
        (worker_gpu, "compile_gpu", compiled), (worker_gpu, "calls_for", lambda first: 1),
        (torch, "mm", counted), (torch.cuda, "Event", Event),
        (torch.cuda, "current_stream", lambda device: None), (torch.cuda, "synchronize", lambda device: None),
    ):  # fmt: skip
        monkeypatch.setattr(where, name, value)
    return products


def test_calls_of_a_library_are_a_gene_where_they_can_be_timed() -> None:
    bound = kernel().bound
    made, seeds = mapping_space(bound, SM90, SLOW, calls=True)
    assert CALLS in [made.options(g) for g in seeds]
    source = Random(1)
    options = {made.options(made.random(source)) for _ in range(60)}
    assert [o for o in options if o.match_library_calls] == [CALLS]  # there is nothing to map
    assert made.options(made.genome(CALLS) or ()) == CALLS
    made, _ = mapping_space(bound, SM90, SLOW)
    assert "match_library_calls" not in {g.name for g in made.genes}
    shapes = (torch.ones(4, 6), torch.ones(6, 5), torch.ones(5))
    bound = tc.define(LAYER).layer.compile(*shapes, target=SM90).compiled.bound
    made, _ = mapping_space(bound, SM90, SLOW, calls=True)
    options = {made.options(made.random(source)) for _ in range(60)}
    assert len([o for o in options if o.match_library_calls]) > 10
    bound = tc.define("def f(float(N) x) -> (y) { y(n) = x(n) }").f.compile(torch.ones(4), target=SM90).compiled.bound
    made, _ = mapping_space(bound, SM90, SLOW, calls=True)
    assert "match_library_calls" not in {g.name for g in made.genes}


@needs_compiler
def test_the_tuner_measures_calls_of_a_library(
    fake: FakeCuda, played: list[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """It finds that they are fast here, says so, and later calls make them."""
    effort: dict[str, Any] = {"budget": 600, "generations": 1, "population": 4, "store": tmp_path}
    op, tensors = tc.define(LAYER).layer, (A, B, torch.randn(20))
    with caplog.at_level(logging.INFO, "tensor_comprehensions"):
        found = op.autotune(*tensors, devices=["cuda:0"], options=SLOW, **effort).options
    assert found.match_library_calls
    (message,) = [r.getMessage() for r in caplog.records if "torch computes" in r.getMessage()]
    assert "torch.mm(A.permute(0, 1), B.permute(0, 1), out=C.permute(0, 1))" in message
    for _ in range(2):
        fake.launches.clear()
        played.clear()
        torch.testing.assert_close(op(*tensors), op.reference(*tensors), rtol=1e-4, atol=1e-4)
        assert ([name for name, *_ in fake.launches], played) == (["layer_1"], ["(24, 20)"])


def test_a_model_knows_nothing_of_a_library() -> None:
    refused = request_reply(CALLS)
    assert refused.status == pb.INVALID
    assert "emulated:sm_90 has no model of what torch's products take" in refused.message
    op = tc.define(SOURCE).mm
    with pytest.raises(ArgumentError, match="cannot model their time"):
        op.autotune(A, B, devices=[MODEL], options=CALLS)
