"""What a worker process might do instead of its work. Imported by worker processes only."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable

import torch

from tensor_comprehensions.autotuner import tuner_pb2 as pb

Phase = Callable[[str], None]


def handle(request: bytes, phase: Phase) -> bytes:
    """Do what the request names."""
    return BEHAVIOURS[request.decode()](phase)


def _connection() -> socket.socket:
    """The worker's own connection, which its service never sees."""
    frame = sys._getframe()
    while "connection" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    found: socket.socket = frame.f_locals["connection"]
    return found


def _spin(name: str) -> Callable[[Phase], bytes]:
    def spin(phase: Phase) -> bytes:
        phase(name)
        while True:
            pass

    return spin


def _sleep(phase: Phase) -> bytes:
    phase("run")
    time.sleep(1000)
    return b""


def _raise_signal(number: int) -> Callable[[Phase], bytes]:
    def kill(phase: Phase) -> bytes:
        phase("run")
        os.kill(os.getpid(), number)
        return b""

    return kill


def _exit(phase: Phase) -> bytes:
    os._exit(0)


def _system_exit(phase: Phase) -> bytes:
    raise SystemExit(0)


def _garbage(phase: Phase) -> bytes:
    _connection().sendall(b"\xff" * 64)
    return b""


def _partial(phase: Phase) -> bytes:
    _connection().sendall(b"R" + (1000).to_bytes(8, "little") + b"only this")
    os._exit(0)


def _huge(phase: Phase) -> bytes:
    _connection().sendall(b"R" + (1 << 63).to_bytes(8, "little"))
    time.sleep(1000)
    return b""


def _unknown_phase(phase: Phase) -> bytes:
    phase("dream")
    time.sleep(1000)
    return b""


def _stop_process(phase: Phase) -> bytes:
    phase("run")
    os.kill(os.getpid(), signal.SIGSTOP)
    return b""


def _greedy(phase: Phase) -> bytes:
    parts = []
    try:
        while True:
            parts.append(bytearray(1 << 26))
    except MemoryError:
        del parts
        return b"no memory"


_sticky: list[str] = []


def _fail_misaligned(phase: Phase) -> bytes:
    """A kernel after which a graphics processor answers nothing else, for this process."""
    _sticky.append("misaligned address")
    return _on_gpu(phase)


def _on_gpu(phase: Phase) -> bytes:
    if _sticky:
        return pb.Reply(status=pb.GPU_STICKY, message=_sticky[0]).SerializeToString()
    return pb.Reply(status=pb.OK, message=str(os.getpid())).SerializeToString()


def _on_a_device_that_may_go(phase: Phase) -> bytes:
    """Where there are two threads, the device is no longer there."""
    if torch.get_num_threads() == 2:
        return pb.Reply(status=pb.REFUSED, message="no such device").SerializeToString()
    time.sleep(0.05)
    return _on_gpu(phase)


BEHAVIOURS: dict[str, Callable[[Phase], bytes]] = {
    "echo": lambda phase: b"hello",
    "pid": lambda phase: str(os.getpid()).encode(),
    "spin in run": _spin("run"),
    "spin in compile": _spin("compile"),
    "sleep": _sleep,
    "stopped": _stop_process,
    "SIGSEGV": _raise_signal(signal.SIGSEGV),
    "SIGILL": _raise_signal(signal.SIGILL),
    "SIGABRT": _raise_signal(signal.SIGABRT),
    "SIGKILL": _raise_signal(signal.SIGKILL),
    "exit": _exit,
    "SystemExit": _system_exit,
    "garbage": _garbage,
    "partial": _partial,
    "huge": _huge,
    "unknown phase": _unknown_phase,
    "greedy": _greedy,
    "misaligned": _fail_misaligned,
    "on a gpu": _on_gpu,
    "on a device": _on_a_device_that_may_go,
}
