"""Worker processes that hang, crash or talk nonsense: whoever asked learns it, and the next one is well.

The numbers of the faults are those of the table at the end of docs/developers/testing.md.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensor_comprehensions.autotuner import evaluators
from tensor_comprehensions.autotuner import tuner_pb2 as pb
from tensor_comprehensions.autotuner.fork_server import PREFIX, remove_stale_folders
from tensor_comprehensions.autotuner.worker_pool import ForkServer, WorkerConfig, WorkerDied, WorkerPool

HERE = str(Path(__file__).parent)
LIMITS = {"prepare": 60.0, "compile": 0.3, "run": 0.3}


def fakes(**others: int) -> WorkerConfig:
    return WorkerConfig(service="fakes:handle", path=(HERE,), **others)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def group(fork_server: ForkServer) -> Iterator[WorkerPool]:
    made = WorkerPool(fork_server, [fakes()])
    yield made
    made.close()


def gone(pid: int) -> bool:
    """Is there no such process? Waits for one that is about to go."""
    for _ in range(1200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("behavior", "kind", "phase", "detail"),
    [
        ("spin in run", "timeout", "run", "0.3 s"),  # case 34
        ("sleep", "timeout", "run", "0.3 s"),
        ("stopped", "timeout", "run", "0.3 s"),
        ("spin in compile", "timeout", "compile", "0.3 s"),  # case 35
        ("SIGSEGV", "crash", "run", "SIGSEGV"),  # case 36
        ("SIGILL", "crash", "run", "SIGILL"),
        ("SIGABRT", "crash", "run", "SIGABRT"),
        ("SIGKILL", "crash", "run", "SIGKILL"),
        ("exit", "crash", "prepare", "code 0"),
        ("SystemExit", "crash", "prepare", "code 1"),
        ("garbage", "garbage", "prepare", "kind"),  # case 37
        ("partial", "crash", "prepare", "code 0"),
        ("huge", "garbage", "prepare", "9223372036854775808 bytes"),
        ("unknown phase", "garbage", "prepare", "dream"),
    ],
)
def test_cases_34_to_37_of_a_worker_that_fails(
    group: WorkerPool, behavior: str, kind: str, phase: str, detail: str
) -> None:
    before = int(group.submit(b"pid", LIMITS).result())
    with pytest.raises(WorkerDied) as death:
        group.submit(behavior.encode(), LIMITS).result()
    assert (death.value.kind, death.value.phase) == (kind, phase)
    assert detail in death.value.detail
    assert gone(before)
    assert group.submit(b"echo", LIMITS).result() == b"hello"
    assert int(group.submit(b"pid", LIMITS).result()) != before


@pytest.mark.parametrize(
    ("behavior", "status"),
    [
        ("spin in run", pb.RUN_TIMEOUT),
        ("spin in compile", pb.COMPILE_TIMEOUT),
        ("SIGSEGV", pb.CRASH),
        ("garbage", pb.CRASH),
        ("echo", pb.CRASH),
    ],
)
def test_what_failed_workers_count_as(group: WorkerPool, behavior: str, status: pb.Status) -> None:
    assert evaluators.future_reply(group.submit(behavior.encode(), LIMITS), "").status == status


def test_case_51_a_device_that_answers_nothing_else_costs_its_worker_only(fork_server: ForkServer) -> None:
    group = WorkerPool(fork_server, [fakes(threads=1), fakes(threads=2)], evaluators.is_tainted)
    try:
        first, second = (
            group.submit(b"on a gpu", LIMITS).result(),
            group.submit(b"misaligned", LIMITS).result(),
        )
        assert pb.Reply.FromString(second).status == pb.GPU_STICKY
        later = [pb.Reply.FromString(group.submit(b"on a gpu", LIMITS).result()) for _ in range(3)]
        assert {r.status for r in later} == {pb.OK}
        assert first != later[0].SerializeToString()  # the same worker had both, and is gone
        assert len({r.message for r in later}) == 1
    finally:
        group.close()


def test_case_52_a_lost_device_leaves_its_work_to_the_others(fork_server: ForkServer) -> None:
    group = WorkerPool(fork_server, [fakes(threads=1), fakes(threads=2)], lost=evaluators.device_lost)
    try:
        replies = [pb.Reply.FromString(f.result()) for f in [group.submit(b"on a device", LIMITS) for _ in range(6)]]
        assert {r.status for r in replies} == {pb.OK}
        assert len({r.message for r in replies}) == 1
        assert group.size == 1
    finally:
        group.close()


def test_case_52_when_all_devices_are_lost_their_refusal_is_reported(fork_server: ForkServer) -> None:
    group = WorkerPool(fork_server, [fakes(threads=2), fakes(threads=2)], lost=evaluators.device_lost)
    try:
        reply = pb.Reply.FromString(group.submit(b"on a device", LIMITS).result())
        assert (reply.status, reply.message) == (pb.REFUSED, "no such device")
    finally:
        group.close()


def test_case_38_a_worker_without_memory_goes_on(fork_server: ForkServer) -> None:
    group = WorkerPool(fork_server, [fakes(memory=1 << 28)])
    first = group.submit(b"pid", LIMITS).result()
    assert group.submit(b"greedy", LIMITS).result() == b"no memory"
    assert group.submit(b"pid", LIMITS).result() == first
    group.close()


def test_workers_of_a_group_work_side_by_side(fork_server: ForkServer) -> None:
    group = WorkerPool(fork_server, [fakes(), fakes()])
    hanging = group.submit(b"sleep", {**LIMITS, "run": 5.0})
    assert group.submit(b"echo", LIMITS).result() == b"hello"
    assert not hanging.done()
    group.close()
    with pytest.raises(WorkerDied):
        hanging.result()


_PARENT = """
import sys
from tensor_comprehensions.autotuner.device import available_cpus
from tensor_comprehensions.autotuner.worker_pool import WorkerPool, WorkerConfig, ForkServer
fork_server = ForkServer()
group = WorkerPool(fork_server, [WorkerConfig(service="fakes:handle", path=(sys.argv[1],))] * 2)
pids = [int(group.submit(b"pid", {"prepare": 60.0}).result())]
waiting = group.submit(b"sleep", {"prepare": 60.0, "run": 1000.0})
print(fork_server._process.pid, *pids, fork_server.folder, flush=True)
waiting.result()
"""


def test_case_49_no_worker_survives_its_client() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, HERE], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    *words, folder = parent.stdout.readline().split()
    pids = [int(word) for word in words]
    assert Path(folder).is_dir()
    assert len(pids) == 2
    assert not any(map(_dead, pids))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert all(map(gone, pids))
    assert not Path(folder).exists()


def _dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_folders_of_killed_processes_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    kept = [f"{PREFIX}{os.getpid()}-x", f"{PREFIX}other", "something"]
    for name in (*kept, f"{PREFIX}{dead.pid}-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    remove_stale_folders()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_closed_fork_server_leaves_no_process() -> None:
    fork_server = ForkServer()
    group = WorkerPool(fork_server, [fakes()])
    pid = int(group.submit(b"pid", LIMITS).result())
    hanging = group.submit(b"sleep", {**LIMITS, "run": 1000.0})
    while not hanging.running():
        time.sleep(0.01)
    group.close()
    fork_server.close()
    assert gone(pid)
    with pytest.raises(WorkerDied, match=r"SIGKILL|ended"):
        hanging.result()
    with pytest.raises(WorkerDied):
        WorkerPool(fork_server, [fakes()]).submit(b"echo", LIMITS).result()
