"""Whatever a file of a sparse tensor holds: reading it gives a sound tensor or an ArgumentError, and never hangs.

A failure prints its seed; `python -m tools.fuzz tensor-files --examples 10000` runs many more.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensor_comprehensions as tc

from ..helpers.mutations import damage_bytes, no_hang

SEEDS = st.integers(0, 2**64 - 1)
MANY = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
HEADERS = ("%%MatrixMarket matrix coordinate real symmetric\n", "%%MatrixMarket matrix array integer general\n")
NUMBERS = (
    "0",
    "-1",
    "1e400",
    "nan",
    "99999999999999999999",
    str(2**63),
    str(2**31),
    "1" * 5000,
    "x",
    "",
    "1 1 1 1 1",
    "٣",
)


def write_files(folder: Path) -> Iterator[Path]:
    """A file of each kind, and an archive of each format that SciPy has."""
    x = tc.as_sparse(torch.diag(torch.arange(1.0, 6.0)), "csr")
    for name in ("a.mtx", "a.tns", "a.npz"):
        tc.write_tensor(folder / name, x)
        yield folder / name
    for layout in ("csr", "csc", "bsr", "coo"):
        shape, arrays = np.array([4, 4]), {"data": np.ones(3), "format": np.array(layout.encode())}
        places = {"row": np.arange(3), "col": np.arange(3)} if layout == "coo" else {}
        if layout == "bsr":
            arrays["data"] = np.ones((2, 2, 2))
        if layout != "coo":
            rows = 2 if layout == "bsr" else 4
            places = {"indptr": np.minimum(np.arange(rows + 1), len(arrays["data"])), "indices": np.arange(rows)[:3]}
        np.savez(folder / f"{layout}.npz", shape=shape, **arrays, **places)
        yield folder / f"{layout}.npz"


def assert_sound_or_refused(path: Path) -> None:
    try:
        found = tc.read_tensor(path)
    except tc.ArgumentError as error:
        str(error).encode()  # it can be printed
    else:
        assert found.check() is found


def odd_arrays(r: Random, data: bytes) -> bytes:
    """An archive with one array of another type, shape or value, or without it."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        arrays = dict(archive)
    name = r.choice(sorted(arrays))
    x = arrays[name]
    changes = (
        lambda: x.astype(r.choice(("U4", "i1", "u8", "f2", "c16", "M8[s]", "?"))),
        lambda: x + np.array(r.choice((-1, 2**31, 2**62, np.nan, np.inf))).astype(x.dtype),
        lambda: x.ravel()[: r.randrange(x.size + 1)], lambda: x[None], lambda: np.repeat(x, 3), lambda: x.ravel()[::-1],
        lambda: np.zeros((0, *x.shape), x.dtype), lambda: np.array({}, dtype=object),
    )  # fmt: skip
    if r.random() < 0.1:
        del arrays[name]
    else:
        with np.errstate(all="ignore"):
            try:
                arrays[name] = r.choice(changes)()
            except (TypeError, ValueError, OverflowError):  # there is no such number of this type
                arrays[name] = np.zeros(3)
    made = io.BytesIO()
    np.savez(made, **arrays)
    return made.getvalue()


def odd_lines(r: Random, text: str) -> str:
    """A text with another number, line or header."""
    lines = text.splitlines(keepends=True)
    at = r.randrange(len(lines))
    match r.randrange(4):
        case 0:
            words = lines[at].split(" ")
            words[r.randrange(len(words))] = r.choice(NUMBERS)
            lines[at] = " ".join(words) + "\n"
        case 1:
            lines.insert(at, r.choice((*HEADERS, "%\n", "\n", "\0\n", "1 " * 3000 + "\n", lines[at])))
        case 2:
            lines[at : at + 2] = lines[at : at + 2][::-1]
        case _:
            lines[0] = r.choice(HEADERS)
    return "".join(lines)


@MANY
@given(SEEDS)
@no_hang()
def test_damaged_tensor_files(seed: int) -> None:
    r = Random(seed)
    with TemporaryDirectory(prefix="tc-fuzz-") as folder:
        for path in write_files(Path(folder)):
            data = path.read_bytes()
            assert_sound_or_refused(path)
            path.write_bytes(damage_bytes(r, data))
            assert_sound_or_refused(path)
            odd = odd_arrays(r, data) if path.suffix == ".npz" else odd_lines(r, data.decode()).encode()
            path.write_bytes(odd)
            assert_sound_or_refused(path)
            path.rename(other := path.with_suffix(r.choice((".mtx", ".tns", ".npz"))))
            assert_sound_or_refused(other)


@no_hang()
def test_what_is_no_tensor_file(tmp_path: Path) -> None:
    for suffix in (".mtx", ".tns", ".npz"):
        (tmp_path / f"folder{suffix}").mkdir()
        (tmp_path / f"loop{suffix}").symlink_to(tmp_path / f"loop{suffix}")
        (tmp_path / f"device{suffix}").symlink_to("/dev/zero")
        os.mkfifo(tmp_path / f"pipe{suffix}")
        (tmp_path / f"empty{suffix}").touch()
        for name in ("folder", "loop", "device", "pipe", "empty", "absent", "a\0b", "\ud800"):
            with pytest.raises(tc.ArgumentError):
                tc.read_tensor(f"{tmp_path}/{name}{suffix}")
    with zipfile.ZipFile(tmp_path / "other.npz", "w") as archive:
        archive.writestr("a.npy", "no array")
    with pytest.raises(tc.ArgumentError, match=r"other\.npz"):
        tc.read_tensor(tmp_path / "other.npz")
