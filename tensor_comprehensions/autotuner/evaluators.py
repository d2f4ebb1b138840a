"""Where candidates are evaluated: on this machine, or on the workers of an executor that run `evaluate_in_site`.

Invariant: every request message gets a reply message, even if its worker dies.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from types import TracebackType
from typing import Protocol

import torch
from google.protobuf.message import DecodeError

from . import tuner_pb2 as pb
from .device import TuningDevice, available_cpus, cpu_fingerprint
from .worker import CHECK, COMPILE, VERSION, clear_prepared_problems, handle_request, phase_limits
from .worker_pool import SERVICE, ForkServer, WorkerConfig, WorkerDied, WorkerPool


class Evaluator(Protocol):
    """The interface of evaluators.

    Attributes:
        separate: whether compiling and running are separate requests.
        width: the maximum number of requests in flight.
        fingerprint: the fingerprint that answering devices must have.
    """

    separate: bool
    width: int
    fingerprint: str

    def begin(self) -> None:
        """Start slow preparations: requests will follow."""

    def submit(self, request: pb.Request) -> Future[bytes]: ...

    def close(self) -> None: ...


def future_reply(future: Future[bytes], asked: str) -> pb.Reply:
    """The reply of a future, or one that reports its failure.

    asked: the fingerprint that the answering device must have; empty: any. The status is UNKNOWN if the cause of a
    failure is unknown, e.g. if an executor lost the worker.
    """
    try:
        raw = future.result()
        reply = pb.Reply.FromString(raw)
    except WorkerDied as death:
        return _death_reply(death)
    except (DecodeError, TypeError) as error:
        return pb.Reply(status=pb.CRASH, message=f"an answer that is none: {error}")
    except CancelledError:
        return pb.Reply(status=pb.REFUSED, message="cancelled")
    except Exception as error:  # raised by an executor
        return pb.Reply(status=pb.UNKNOWN, message=f"{type(error).__name__}: {error}")
    if reply.version != VERSION:
        return pb.Reply(status=pb.REFUSED, message=f"an answer of version {reply.version}, not {VERSION}")
    if asked and reply.fingerprint != asked:
        return pb.Reply(status=pb.REFUSED, message=f"the device is {reply.fingerprint}, not {asked}")
    return reply


def _death_reply(death: WorkerDied) -> pb.Reply:
    if death.kind != "timeout":
        return pb.Reply(status=pb.CRASH, message=f"{death.kind}: {death.detail}")
    status = pb.COMPILE_TIMEOUT if death.phase == COMPILE else pb.RUN_TIMEOUT
    what = "the right results" if death.phase == CHECK else "it"
    return pb.Reply(status=status, message=death.detail.replace("it", what, 1))


def is_tainted(raw: bytes) -> bool:
    """Whether a candidate may have corrupted its worker, or made its device unusable."""
    return pb.Reply.FromString(raw).status in (pb.WRONG_RESULT, pb.NAN, pb.GPU_STICKY)


def device_lost(raw: bytes) -> bool:
    """Whether the worker lost its device, or runs on another one than requested."""
    return pb.Reply.FromString(raw).status == pb.REFUSED


class LocalWorkers:
    """Worker processes on this machine: one per available processor to compile, one per device to run kernels.

    They start with `begin`, or with the first request. Usage: `with LocalWorkers(devices) as evaluator: ...`;
    leaving the block ends them.
    """

    separate = True

    def __init__(
        self, devices: Sequence[TuningDevice], *, memory: int = 0, service: str = SERVICE, path: tuple[str, ...] = ()
    ) -> None:
        compilers = len(available_cpus())
        self._compiling = [WorkerConfig(service, path, (), 1, memory)] * compilers
        self._running = [WorkerConfig(service, path, d.cpus, d.threads, memory) for d in devices]
        self._site: _Processes | None = None
        self.width = 8 * max(compilers, len(devices))
        self.fingerprint = cpu_fingerprint(devices[0].threads)

    def begin(self) -> None:
        """Start the process that workers are forked from, without waiting for it."""
        self._ensure_processes()

    def submit(self, request: pb.Request) -> Future[bytes]:
        """Compile on any processor, or run on a device that is free."""
        site = self._ensure_processes()
        request.folder = str(site.fork_server.folder)
        if request.stage == pb.COMPILE:
            request.fingerprint = ""  # compiling is the same on any number of threads
            return site.compilers.submit(request.SerializeToString(), phase_limits(request))
        return site.runners.submit(request.SerializeToString(), phase_limits(request))

    def _ensure_processes(self) -> _Processes:
        if self._site is None:
            self._site = _Processes(self._compiling, self._running)
        return self._site

    def close(self) -> None:
        """End every process."""
        if self._site is not None:
            self._site.close()
            self._site = None

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


class InProcess:
    """Evaluates in this process, without startup time: for candidates that are as safe as any kernel that is called.

    Kernels run on torch's current number of threads.
    """

    separate, width = True, 1

    def __init__(self) -> None:
        self.fingerprint = cpu_fingerprint()

    def begin(self) -> None:
        """Do nothing: this process is ready."""

    def submit(self, request: pb.Request) -> Future[bytes]:
        """Answer before returning."""
        future: Future[bytes] = Future()
        future.set_result(handle_request(request.SerializeToString(), lambda phase: None))
        return future

    def close(self) -> None:
        """Free the memory of prepared problems."""
        clear_prepared_problems()


class _Processes:
    """A fork server with its workers."""

    def __init__(self, compiling: Sequence[WorkerConfig], running: Sequence[WorkerConfig]) -> None:
        self.fork_server = ForkServer()
        self.compilers = WorkerPool(self.fork_server, compiling)
        self.runners = WorkerPool(self.fork_server, running, is_tainted, device_lost)

    def close(self) -> None:
        self.compilers.close()
        self.runners.close()
        self.fork_server.close()


# --- elsewhere ---------------------------------------------------------------------------------------------------


class ExecutorWorkers:
    """Workers behind any `concurrent.futures.Executor`.

    width: the maximum number of requests in flight. function: runs in the workers; None: `evaluate_in_site`.
    """

    separate = False

    def __init__(
        self,
        executor: Executor,
        device: TuningDevice,
        *,
        width: int = 16,
        function: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._executor, self.width, self._function = executor, width, evaluate_in_site if function is None else function
        self._threads = device.threads
        self.fingerprint = cpu_fingerprint(device.threads)

    def begin(self) -> None:
        """Do nothing: the executor starts its workers."""

    def submit(self, request: pb.Request) -> Future[bytes]:
        """Submit the serialized request to the executor."""
        request.threads = self._threads
        return self._executor.submit(self._function, request.SerializeToString())

    def close(self) -> None:
        """Do nothing: the caller owns the executor."""


def evaluate_in_site(raw: bytes) -> bytes:
    """Answer a request on this machine, in a child process that may crash; for `Executor.submit`.

    Never raises and always returns within the limits of the request. Calls in one process take turns, so that nothing
    else runs on a device that is timed.
    """
    request = pb.Request()
    try:
        request.ParseFromString(raw)
        threads = request.threads or torch.get_num_threads()
        with _site_lock:
            reply = future_reply(_get_worker_pool(threads).submit(raw, phase_limits(request)), cpu_fingerprint(threads))
    except Exception as error:
        reply = pb.Reply(status=pb.REFUSED, message=f"{type(error).__name__}: {error}")
    reply.version = VERSION
    reply.fingerprint = reply.fingerprint or cpu_fingerprint(request.threads or None)
    return reply.SerializeToString()


_site_lock = threading.Lock()
_sites: dict[tuple[int, int], tuple[ForkServer, WorkerPool]] = {}


def _get_worker_pool(threads: int) -> WorkerPool:
    """The pool of one worker with `threads` threads in this process; a new one replaces any other."""
    key = (os.getpid(), threads)
    if key not in _sites:
        close_site()
        fork_server = ForkServer()
        _sites[key] = fork_server, WorkerPool(fork_server, [WorkerConfig(threads=threads)], is_tainted)
        atexit.register(close_site)
    return _sites[key][1]


def close_site() -> None:
    """End the worker that `evaluate_in_site` keeps in this process."""
    while _sites:
        (pid, _), (fork_server, group) = _sites.popitem()
        if pid == os.getpid():
            group.close()
            fork_server.close()
