"""Worker processes, from the tuner's side: they answer bytes with bytes, and are replaced when they die.

Invariant: a call of a worker returns or raises within its limits; a worker that failed is gone before the next one
starts; no worker outlives its pool.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import ArgumentError, InternalError
from . import ipc
from .fork_server import receive_json, send_json

SERVICE = "tensor_comprehensions.autotuner.worker:handle_request"
MAX_REQUESTS = 400
"""Requests after which a worker is replaced, which bounds the memory that libraries leak."""
FIRST_PHASE = "prepare"


class WorkerDied(Exception):
    """A worker did not answer.

    Attributes:
        kind: "crash", "timeout" or "garbage".
        phase: the step that it was in.
        detail: the signal or exit code, or the bytes that it sent.
    """

    def __init__(self, kind: str, phase: str, detail: str) -> None:
        super().__init__(f"{kind} while it was to {phase}: {detail}")
        self.kind, self.phase, self.detail = kind, phase, detail


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The settings of a worker process.

    Attributes:
        service: "module:function" that answers requests. path: folders to search for it first.
        cpus: the processors it may use; () for all. threads: the size of torch's thread pool.
        memory: bytes that it may allocate; 0 for no limit.
    """

    service: str = SERVICE
    path: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()
    threads: int = 1
    memory: int = 0


class ForkServer:
    """A process that forks workers; closing it ends them all. It preloads their modules in the background."""

    def __init__(self) -> None:
        if not hasattr(os, "fork") or not hasattr(socket, "send_fds"):
            raise ArgumentError("this system cannot fork, and the tuner runs candidates in forked processes")
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", __package__ + ".fork_server", str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder for files that workers share, removed when the fork server ends. Waits for the server's start."""
        with self._lock:
            return self._wait_for_folder()

    def _wait_for_folder(self) -> Path:
        if self._folder is None:
            try:
                self._folder = Path(receive_json(self._control)[0]["folder"])
            except ipc.Disconnected as error:
                raise InternalError(f"the process for workers does not start: {self._process.wait()}") from error
        return self._folder

    def fork(self, settings: WorkerConfig) -> tuple[int, socket.socket]:
        """Fork a worker; return its process ID and the connection to it. Raises Disconnected."""
        ours, theirs = socket.socketpair()
        with theirs:
            order = {name: getattr(settings, name) for name in settings.__slots__}
            try:
                return int(self._ask(order, theirs.fileno())["pid"]), ours
            except BaseException:
                ours.close()
                raise

    def reap(self, pid: int) -> int:
        """Wait until a worker has ended; return its exit code, or minus its signal. Raises Disconnected."""
        return int(self._ask({"reap": pid})["status"])

    def _ask(self, order: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        with self._lock:
            self._wait_for_folder()
            send_json(self._control, order, descriptors)
            return receive_json(self._control)[0]

    def close(self) -> None:
        """End all workers and the fork server; returns when they are gone."""
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its workers die with it
            self._process.wait()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


class Worker:
    """A process that answers one request at a time."""

    def __init__(self, fork_server: ForkServer, settings: WorkerConfig) -> None:
        self._fork_server = fork_server
        self.pid, self._connection = fork_server.fork(settings)
        self.answered = 0

    def call(self, request: bytes, limits: Mapping[str, float]) -> bytes:
        """Send a request and return the reply. limits: the seconds that each phase may take; other phases are errors.

        Raises WorkerDied; then the process is gone.
        """
        phase = FIRST_PHASE
        try:
            ipc.send_frame(self._connection, ipc.REQUEST, request)
            while True:
                kind, payload = ipc.receive_frame(self._connection, limits[phase])
                if kind == ipc.REPLY:
                    self.answered += 1
                    return payload
                phase_name = payload[:32].decode(errors="replace")
                if kind != ipc.PHASE or phase_name not in limits:
                    raise ipc.ProtocolError(f"phase {phase_name!r}")
                phase = phase_name
        except ipc.Timeout:
            self.kill()
            raise WorkerDied("timeout", phase, f"it took more than {limits[phase]:.3g} s") from None
        except ipc.ProtocolError as error:
            self.kill()
            raise WorkerDied("garbage", phase, str(error)) from None
        except ipc.Disconnected:
            raise WorkerDied("crash", phase, _describe_exit(self.kill())) from None

    def end(self) -> None:
        """Kill the process without waiting; a thread that waits for its answer notices."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def kill(self) -> int | None:
        """End the process and wait until it is gone. Returns its exit code or minus its signal, None if unknown."""
        self._connection.close()
        self.end()
        try:
            return self._fork_server.reap(self.pid)
        except ipc.Disconnected:
            return None


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "it was ended"
    if code >= 0:
        return f"it exited with code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class WorkerPool:
    """Interchangeable workers, which start on demand; a request goes to a free one.

    suspect: whether a reply means that its worker may be corrupted; the worker is then replaced.
    lost: whether a reply says that the worker's device is gone. No worker is started there again, and the request goes
        to another device if one is left.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        settings: Iterable[WorkerConfig],
        suspect: Callable[[bytes], bool] = lambda reply: False,
        lost: Callable[[bytes], bool] = lambda reply: False,
    ) -> None:
        self._fork_server, self._suspect, self._lost = fork_server, suspect, lost
        self._free: queue.LifoQueue[tuple[WorkerConfig, Worker | None]] = queue.LifoQueue()
        every = tuple(settings)
        for one in every:
            self._free.put((one, None))
        self.size = len(every)
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="tc-tune")
        self._lock = threading.Lock()
        self._living: set[Worker] = set()
        self._closed = False

    def submit(self, request: bytes, limits: Mapping[str, float]) -> Future[bytes]:
        """A future for the reply, which may raise WorkerDied. Raises RuntimeError once the pool is closed."""
        return self._threads.submit(self._run, request, limits)

    def _run(self, request: bytes, limits: Mapping[str, float]) -> bytes:
        while True:
            reply = self._try_worker(request, limits)
            if reply is not None:
                return reply

    def _try_worker(self, request: bytes, limits: Mapping[str, float]) -> bytes | None:
        """The reply of a free worker; None if its device is lost and was dropped from the pool."""
        settings, worker = self._free.get()
        kept = True
        try:
            if worker is None:
                worker = self._start(settings)
            reply = worker.call(request, limits)
        except WorkerDied:
            self._forget(worker)
            worker = None
            raise
        else:
            kept = not (self._lost(reply) and self._drop_lost_device())
            if not kept or worker.answered >= MAX_REQUESTS or self._suspect(reply):
                worker.kill()
                self._forget(worker)
                worker = None
            return reply if kept else None
        finally:
            if kept:
                self._free.put((settings, worker))

    def _drop_lost_device(self) -> bool:
        """Drop one device unless it is the last; return whether it was dropped."""
        with self._lock:
            left = self.size > 1
            self.size -= left
        return left

    def _start(self, settings: WorkerConfig) -> Worker:
        with self._lock:
            if self._closed:
                raise WorkerDied("crash", FIRST_PHASE, "it was ended")
            try:
                worker = Worker(self._fork_server, settings)
            except ipc.Disconnected as error:
                raise WorkerDied("crash", FIRST_PHASE, "there is no process to fork it from") from error
            self._living.add(worker)
            return worker

    def _forget(self, worker: Worker | None) -> None:
        with self._lock:
            if worker is not None:
                self._living.discard(worker)

    def close(self) -> None:
        """End all workers; pending calls raise WorkerDied. Returns when all workers are gone."""
        with self._lock:
            self._closed = True
            for worker in self._living:
                worker.end()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._living:
            worker.kill()
        self._living.clear()
