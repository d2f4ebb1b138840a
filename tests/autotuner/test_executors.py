"""Candidates that are evaluated by executors: any, and Dask's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.autotuner import tuner_pb2 as pb
from tensor_comprehensions.autotuner.device import TuningDevice, cpu_fingerprint, parse_device, parse_devices
from tensor_comprehensions.autotuner.evaluators import ExecutorWorkers, close_site, evaluate_in_site
from tensor_comprehensions.autotuner.search_loop import SearchBudget, Tuner
from tensor_comprehensions.autotuner.session import tune
from tensor_comprehensions.autotuner.worker import VERSION
from tensor_comprehensions.cache.options_proto import to_message
from tensor_comprehensions.core.errors import ArgumentError

from . import pretend
from .pretend import Pretend, subject

HERE = (TuningDevice("cpu", (0,), 1),)
EFFORT = SearchBudget(seconds=1000.0, generations=3, population=12)


DEFAULT = to_message(tc.CpuOptions())


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    close_site()


class Losing(Executor):
    """An executor that loses every third request when it is sent first, as when a worker dies."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        lost = args[0] not in self.seen and len(self.seen) % 3 == 0
        self.seen.add(args[0])
        if lost:
            future.set_exception(RuntimeError("the worker is gone"))
        else:
            future.set_result(function(*args))
        return future


def winner_of(executor: Executor, **others: Any) -> tc.CpuOptions:
    where = ExecutorWorkers(executor, HERE[0], function=pretend.evaluate)
    return tune(subject(), EFFORT, HERE, evaluator=where, **others).options


def test_any_executor_gives_the_same_winner() -> None:
    with ThreadPoolExecutor(3) as pool:
        expected = winner_of(pool)
    assert expected == tune(subject(), EFFORT, HERE, evaluator=WidePretend()).options
    assert winner_of(Losing()) == expected


class WidePretend(Pretend):
    width = 16


def test_evaluate_always_answers() -> None:
    asked = cpu_fingerprint()
    for raw, status in (
        (b"\xff\xff\xff", pb.REFUSED),
        (pb.Request(version=VERSION + 1).SerializeToString(), pb.REFUSED),
        (pb.Request(version=VERSION, stage=pb.EVALUATE, fingerprint="another").SerializeToString(), pb.REFUSED),
        (pb.Request(version=VERSION, stage=pb.EVALUATE, options=[DEFAULT]).SerializeToString(), pb.INVALID),
    ):
        reply = pb.Reply.FromString(evaluate_in_site(raw))
        assert (pb.Status.Name(reply.status), reply.version) == (pb.Status.Name(status), VERSION)
        assert reply.fingerprint == asked


def test_an_operator_is_tuned_on_an_executor() -> None:
    op = tc.define("def f(float(N) x) -> (y) { y(i) = x(i) + 1 }").f
    x = torch.arange(500.0)
    with ThreadPoolExecutor(2) as pool, tc.core.knobs.override_knobs(cache="off"):
        op.autotune(x, generations=1, population=4, executor=pool)
    assert torch.equal(op(x), x + 1)


@pytest.mark.parametrize(("name", "cpus"), [("cpu:0", (0,)), ("cpu:0,0", (0,))])
def test_devices_by_name(name: str, cpus: tuple[int, ...]) -> None:
    assert parse_device(name).cpus == cpus
    assert parse_device("cpu").threads == torch.get_num_threads()


@pytest.mark.parametrize("wrong", [[], ["cuda"], ["cpu:"], ["cpu:1-0"], [3], ["cpu", "cpu"]])
def test_devices_that_there_are_not(wrong: list[object]) -> None:
    with pytest.raises(ArgumentError, match=r"device|processor"):
        parse_devices(wrong)


# --- Dask --------------------------------------------------------------------------------------------------------


@pytest.fixture
def client() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    import cloudpickle

    cloudpickle.register_pickle_by_value(pretend)
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    )
    with cluster, distributed.Client(cluster) as made:
        yield made
    cloudpickle.unregister_pickle_by_value(pretend)


def test_a_dask_cluster_that_loses_a_worker_finds_the_same_winner(client: Any) -> None:
    executor = client.get_executor(pure=False, retries=2)
    expected = winner_of(executor)
    killed: list[int] = []

    def kill(tuner: Tuner, generation: int) -> None:
        if not killed and len(tuner.outcomes) > 10:
            pids = client.run(os.getpid)
            killed.append(next(iter(pids.values())))
            os.kill(killed[0], signal.SIGKILL)

    assert winner_of(executor, observe=kill) == expected
    assert killed
    with ThreadPoolExecutor(1) as pool:
        assert winner_of(pool) == expected
