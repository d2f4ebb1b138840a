"""Messages for the faults that the emulator detects, with tensor, thread and line."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ...codegen.gpu.gpu_printer import GpuCode, GpuKernelSource
from ...loop_ir import nodes as ir
from ...loop_ir.swizzled_buffer import swizzle_offset

_SHARED = -1
_ACTIONS = {0: "reads", 1: "writes", 2: "updates"}
RACE, UNDEFINED, OUTSIDE, SUBSCRIPT, DIVERGED, DEADLOCK, EXITED, MISALIGNED, LANE = range(1, 10)
ARRIVALS, ARRIVERS, LAPPED, STUCK, FENCE, TOUCHED, NOT_MADE, BYTES, MISUSE, ENDED = range(10, 20)


_ASYNCHRONOUS = {
    ARRIVALS: "too many arrivals: {who} arrives at {place}, whose phase lacks only bytes",
    ARRIVERS: "other arrivers: a phase of {place} ends with an arrival of {other}, which was not in the phase before",
    LAPPED: "lapped: {who} waits for a phase of {place}, and the next one has ended, too",
    STUCK: "deadlock: {who} waits at {place}, whose {text}",
    FENCE: "fence: {who} relies on {place}, which {other} wrote, with no fence and barrier between",
    TOUCHED: "touched: {who} {action} register {offset} of a product that it has not waited for",
    NOT_MADE: "undefined: {who} uses the barrier {place}, which nothing made",
    BYTES: "bytes: more land on {place} than its phase expects",
    MISUSE: "{text}: {who}, {place}",
    ENDED: "ended: {who} {text}",
}
"""Messages of faults around asynchronous operations."""


class EmulatorFailure(ctypes.Structure):
    """`struct Failure` of `machine.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "kind", "region", "offset", "action", "other_action", "thread", "block", "other_thread", "other_block",
            "line", "other_line", "address",
        )),
        ("text", ctypes.c_char * 96),
    )  # fmt: skip


def describe_failure(
    f: EmulatorFailure, kernel: GpuKernelSource, code: GpuCode, buffers: Sequence[ir.Buffer], library: Path
) -> str:
    """The message for a failure of a kernel, with the line of its source."""
    line = f.line or _find_source_line(library, f.address)
    what = _describe_failure(f, kernel, buffers, library)
    lines = code.source.splitlines()
    shown = f"line {line}: {lines[line - 1].strip()}" if 0 < line <= len(lines) else "at a line that is not known"
    return f"{kernel.name}: {what}, {shown}"


def _describe_failure(f: EmulatorFailure, kernel: GpuKernelSource, buffers: Sequence[ir.Buffer], library: Path) -> str:
    who = _describe_thread(f.thread, f.block, kernel)
    if f.kind in (RACE, UNDEFINED, OUTSIDE, MISALIGNED):
        place = _describe_address(f, kernel, buffers, library)
        does = f"{who} {_ACTIONS[f.action]} {place}"
        if f.kind == RACE:
            before = _ACTIONS[f.other_action].removesuffix("s")
            before = {"read": "read", "write": "wrote", "update": "updated"}[before]
            other = "several threads" if f.other_thread < 0 else _describe_thread(f.other_thread, f.other_block, kernel)
            if f.text:  # an asynchronous operation
                on_barrier = f.text.endswith(b" ")
                other = f.text.decode() + (_shared_place(f.other_block, kernel, library) if on_barrier else "")
            return f"race: {does}, which {other} {before} with no barrier between"
        if f.kind == UNDEFINED:
            return f"undefined: {does}, which nothing wrote"
        return f"misaligned: {does}" if f.kind == MISALIGNED else f"out of bounds: {does}"
    if f.kind == SUBSCRIPT:
        return f"out of bounds: {who} has the subscript {f.offset} in an array of type {f.text.decode()}"
    if f.kind == LANE:
        return f"undefined: {who} takes a value from a lane that does not exist"
    block = f.block if f.other_block < 0 else f.other_block
    other = _describe_thread(f.other_thread, block, kernel) if f.other_thread >= 0 else "nobody"
    if f.kind in _ASYNCHRONOUS:
        place = "" if f.kind == TOUCHED else _describe_address(f, kernel, buffers, library)
        action = _ACTIONS[f.action]
        return _ASYNCHRONOUS[f.kind].format(
            who=who, place=place, other=other, text=f.text.decode(), action=action, offset=f.offset
        )
    if f.kind == EXITED:
        return f"divergence: {who} waits, but {other} has returned"
    if f.kind == DIVERGED:
        return f"divergence: {who} waits, and {other} waits at line {f.other_line}"
    return f"deadlock: {who} waits for others, {other} among them (line {f.other_line})"


def _describe_thread(thread: int, block: int, kernel: GpuKernelSource) -> str:
    return (
        f"thread {_describe_point(thread, kernel.launch.block)} of block {_describe_point(block, kernel.launch.grid)}"
    )


def _describe_point(number: int, extents: tuple[int, int, int]) -> str:
    x, y, _ = extents
    point = (number % x, number // x % y, number // x // y)
    rank = max((k + 1 for k in range(3) if extents[k] > 1), default=1)
    return f"({', '.join(map(str, point[:rank]))})" if rank > 1 else str(point[0])


def _describe_address(f: EmulatorFailure, kernel: GpuKernelSource, buffers: Sequence[ir.Buffer], library: Path) -> str:
    """The accessed element, by its subscripts."""
    if f.region == _SHARED:
        return _shared_place(f.offset, kernel, library)
    if 0 <= f.region < len(buffers):
        return _describe_element(buffers[f.region], f.offset)
    return "memory that is no tensor"


def _shared_place(at: int, kernel: GpuKernelSource, library: Path) -> str:
    name, offset = _find_shared_array(library, at, kernel)
    buffer = next((b for b in kernel.arrays if b.name == name), None)
    return _describe_element(buffer, offset) if buffer is not None else "shared memory"


def _describe_element(buffer: ir.Buffer, offset: int) -> str:
    """The element of `buffer` that is `offset` bytes from its first."""
    left = offset // buffer.type.dtype.size
    if buffer.swizzle is not None:
        left = swizzle_offset(left, buffer.swizzle)
    subscripts = [0] * len(buffer.shape)
    for d in sorted(range(len(buffer.shape)), key=lambda d: -buffer.strides[d]):
        if buffer.strides[d] > 0 and buffer.shape[d] > 1:
            subscripts[d], left = divmod(left, buffer.strides[d])
    return f"{buffer.name}[{', '.join(map(str, subscripts))}]" + (f" + {left}" if left else "")


def _find_shared_array(library: Path, offset: int, kernel: GpuKernelSource) -> tuple[str, int]:
    """The shared array at an offset of the thread-local memory, and the bytes into it."""
    if kernel.dynamic:
        start = _read_tls_offsets(library).get("dynamic_shared", 0)
        for b, size in zip(kernel.arrays, kernel.sizes, strict=True):
            if start <= offset < start + size:
                return b.name, offset - start
            start += size
    names = {identifier: b.name for identifier, b in zip(kernel.identifiers, kernel.arrays, strict=True)}
    known = ((at, n) for n, at in _read_tls_offsets(library).items() if n in names and at <= offset)
    start, found = max(known, default=(0, ""))
    return names.get(found, ""), offset - start


def _read_tls_offsets(library: Path) -> dict[str, int]:
    """The offsets of the thread-local variables of a library, by name; none without `nm`."""
    nm = shutil.which("nm")
    if nm is None:
        return {}
    text = subprocess.run([nm, "-C", "--defined-only", str(library)], capture_output=True, text=True, check=False)
    rows = [line.split(" ", 2) for line in text.stdout.splitlines()]
    return {row[2].rpartition("::")[2]: int(row[0], 16) for row in rows if len(row) == 3 and row[1] in "bBdD"}


def _find_source_line(library: Path, address: int) -> int:
    """The line of the kernel's source for the code at `address`; 0 if it is not known."""
    tool = shutil.which("addr2line")
    if tool is None or not address:
        return 0
    done = subprocess.run([tool, "-i", "-e", str(library), hex(address)], capture_output=True, text=True, check=False)
    for place in done.stdout.splitlines():
        file, _, line = place.split(" ")[0].rpartition(":")
        if file.endswith("kernel.cu") and line.isdigit():
            return int(line)
    return 0
