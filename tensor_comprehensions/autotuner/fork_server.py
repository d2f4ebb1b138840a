"""The process that worker processes are forked from: it has loaded torch and the compiler, and runs neither.

`python -m tensor_comprehensions.autotuner.fork_server FD PARENT` takes orders over the socket FD until its peer or the
process PARENT is gone, and then kills its workers. A worker starts in some milliseconds and has its own memory, threads
and limits, so a candidate can harm no other process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from . import ipc

PARENT_CHECK_SECONDS = 1.0
"""Seconds between checks that the parent is alive."""
PRELOAD = (
    "torch",
    "numpy",
    "llvmlite.binding",
    "islpy",
    "tensor_comprehensions.autotuner.worker",
    "tensor_comprehensions.polyhedral.cpu.lower",
)
PREFIX = "tensorc-tune-"
Handler = Callable[[bytes, Callable[[str], None]], bytes]
"""The function that a worker runs: (request, callback for the next phase) -> reply."""


class ParentGone(Exception):
    """The parent is gone."""


def serve(descriptor: int, parent: int) -> None:
    """Serve until the parent is gone; then kill all workers and remove the folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _raise_parent_gone)
    _die_with_parent(signal.SIGTERM)
    for module in PRELOAD:
        importlib.import_module(module)
    gc.freeze()  # the collector of a worker then neither scans nor copies the shared objects
    children: set[int] = set()
    remove_stale_folders()
    folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
    try:
        with socket.socket(fileno=descriptor) as control, contextlib.suppress(ipc.Disconnected, ParentGone):
            send_json(control, {"folder": folder})
            while (order := _next_order(control, parent)) is not None:
                _obey_order(control, order, children)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale_folders() -> None:
    """Remove the temporary folders of fork servers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _raise_parent_gone(number: int, frame: FrameType | None) -> None:
    raise ParentGone


def _next_order(control: socket.socket, parent: int) -> tuple[dict[str, Any], list[int]] | None:
    while not select.select([control], [], [], PARENT_CHECK_SECONDS)[0]:
        if os.getppid() != parent:
            return None
    return receive_json(control)


def _obey_order(control: socket.socket, order: tuple[dict[str, Any], list[int]], children: set[int]) -> None:
    what, descriptors = order
    if "reap" in what:
        pid = int(what["reap"])
        _, status = os.waitpid(pid, 0)
        children.discard(pid)
        send_json(control, {"status": os.waitstatus_to_exitcode(status)})
        return
    server_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        control.close()
        _serve_requests(socket.socket(fileno=descriptors[0]), what, server_pid)
    os.close(descriptors[0])
    children.add(pid)
    send_json(control, {"pid": pid})


# --- in the worker -----------------------------------------------------------------------------------------------


def _serve_requests(connection: socket.socket, settings: dict[str, Any], server_pid: int) -> None:
    """Answer requests until the tuner disconnects, then exit; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _die_with_parent(signal.SIGKILL)
        if os.getppid() == server_pid:
            _apply_worker_limits(settings)
            handler = _import_handler(settings)
            while True:
                try:
                    _, request = ipc.receive_frame(connection)
                except ipc.Disconnected:
                    break
                reply = handler(request, lambda name: ipc.send_frame(connection, ipc.PHASE, name.encode()))
                ipc.send_frame(connection, ipc.REPLY, reply)
            code = 0
    finally:
        os._exit(code)


def _import_handler(settings: dict[str, Any]) -> Handler:
    for folder in settings.get("path", ()):
        sys.path.insert(0, folder)
    module, _, name = settings["service"].partition(":")
    handler: Handler = getattr(importlib.import_module(module), name)
    return handler


def _apply_worker_limits(settings: dict[str, Any]) -> None:
    """Limit this process to its processors, threads and memory, and silence its standard streams."""
    import torch

    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    if settings.get("cpus") and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, settings["cpus"])
    torch.set_num_threads(settings.get("threads", 1))
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if settings.get("memory"):
            limit = _virtual_memory() + int(settings["memory"])
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _virtual_memory() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * os.sysconf("SC_PAGESIZE")


def _die_with_parent(number: int) -> None:
    """Have the kernel send a signal to this process when its parent ends; only on Linux."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


# --- orders ------------------------------------------------------------------------------------------------------

_LENGTH = struct.Struct("<I")


def send_json(control: socket.socket, value: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Send an order or an answer, with descriptors. Raises Disconnected."""
    text = json.dumps(value).encode()
    try:
        socket.send_fds(control, [_LENGTH.pack(len(text)) + text], descriptors)
    except OSError as error:
        raise ipc.Disconnected(str(error)) from error


def receive_json(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next order or answer, with its descriptors. Raises Disconnected."""
    try:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        while data and len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]:
            part = control.recv(1 << 16)
            data = data + part if part else b""
    except OSError as error:
        raise ipc.Disconnected(str(error)) from error
    if not data:
        raise ipc.Disconnected("end of stream")
    return json.loads(data[_LENGTH.size :]), descriptors


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # skips the teardown of torch, for which the tuner would wait
