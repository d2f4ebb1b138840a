"""File operations of the cache. The functions of the operating system are a value, so that tests can inject faults."""

from __future__ import annotations

import errno
import os
import socket
import stat
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags that refuse symbolic links, by which another user may have replaced a file."""


_user: Callable[[], int] = getattr(os, "geteuid", lambda: -1)


@dataclass(frozen=True, slots=True)
class OsFunctions:
    """Functions of `os`, the clock, and the effective user id (-1 on systems without one)."""

    open: Callable[..., int] = os.open
    close: Callable[..., None] = os.close
    read: Callable[..., bytes] = os.read
    write: Callable[..., int] = os.write
    fstat: Callable[..., os.stat_result] = os.fstat
    stat: Callable[..., os.stat_result] = os.stat
    lstat: Callable[..., os.stat_result] = os.lstat
    listdir: Callable[..., list[str]] = os.listdir
    mkdir: Callable[..., None] = os.mkdir
    replace: Callable[..., None] = os.replace
    unlink: Callable[..., None] = os.unlink
    rmdir: Callable[..., None] = os.rmdir
    utime: Callable[..., None] = os.utime
    user: Callable[[], int] = _user
    clock: Callable[[], float] = time


def read_file(system: OsFunctions, path: Path, limit: int) -> bytes:
    """Read a regular file that belongs to this user and that only this user can write.

    Raises OSError, also for other files and for files of more than `limit` bytes.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = system.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | SAFE)
    try:
        found = system.fstat(descriptor)
        reason = _find_permission_problem(system, found)
        if not stat.S_ISREG(found.st_mode):
            reason = "it is not a regular file"
        elif found.st_size > limit:
            reason = f"it has {found.st_size} bytes"
        if reason:
            raise PermissionError(f"{path} is not read: {reason}")
        pieces = []
        left = found.st_size
        while left > 0 and (piece := system.read(descriptor, left)):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)
    finally:
        system.close(descriptor)


def read_bounded(path: Path, limit: int, *, pipes: bool = False) -> bytes:
    """Read a file that the user names, of any owner.

    pipes: also read pipes and devices such as `/dev/stdin`, and wait for their content.

    Raises OSError, also for an invalid name, and for more than `limit` bytes.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | (0 if pipes else getattr(os, "O_NONBLOCK", 0)))

    try:
        with open(path, "rb", opener=opener) as file:
            if not pipes and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", str(path))
            data = file.read(limit + 1)
    except ValueError as error:  # a NUL in the name, or half of a character
        raise OSError(errno.EINVAL, str(error), repr(path)) from None
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return data


def write_file(system: OsFunctions, path: Path, data: bytes) -> None:
    """Write a file atomically. Raises OSError; no partial file remains then."""
    temporary = path.with_name(f".{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}{TEMPORARY}")
    descriptor = system.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, 0o600)
    try:
        try:
            left = memoryview(data)
            while left:
                left = left[system.write(descriptor, left) :]
        finally:
            system.close(descriptor)
        system.replace(temporary, path)
    except BaseException:
        remove_file(system, temporary)
        raise


def remove_file(system: OsFunctions, path: Path) -> bool:
    """Remove a file; returns False if that fails, for example because it is gone already."""
    try:
        system.unlink(path)
    except OSError:
        return False
    return True


def make_private_folder(system: OsFunctions, path: Path) -> str:
    """Make a folder that only this user may enter, unless it exists.

    Returns "", or why the folder cannot be trusted. Raises OSError.
    """
    try:
        found = system.stat(path)
    except FileNotFoundError:
        make_folders(system, path)
        found = system.stat(path)
    if not is_folder(found):
        return "it is not a folder"
    return _find_permission_problem(system, found)


def make_folders(system: OsFunctions, path: Path) -> None:
    """Make a folder and its parents. Raises OSError."""
    try:
        system.mkdir(path, 0o700)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_folders(system, path.parent)
        with suppress(FileExistsError):
            system.mkdir(path, 0o700)
    except FileExistsError:
        pass


def is_folder(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode)


def _find_permission_problem(system: OsFunctions, found: os.stat_result) -> str:
    user = system.user()
    if user < 0:  # a system without owners and modes
        return ""
    if found.st_uid != user:
        return f"it belongs to user {found.st_uid}, and this is user {user}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


TEMPORARY = ".tmp"
SYSTEM = OsFunctions()
