"""Sparse tensors in files: Matrix Market (`.mtx`), FROSTT (`.tns`) and NumPy archives (`.npz`)."""

from __future__ import annotations

import errno
import stat
import warnings
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.checked_fields import describe_value
from ...core.errors import ArgumentError
from ...tc_lang.formats import coo_format
from .interop import as_sparse
from .sparse_tensor import FormatLike, SparseTensor

_FIELDS = {"real": np.float64, "double": np.float64, "integer": np.int64, "pattern": np.float64}
_SYMMETRIES = {"general": 0, "symmetric": 1, "skew-symmetric": -1}
_LAYOUTS = ("csr", "csc", "bsr")
Elements = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], tuple[int, ...]]
"""Coordinates (rank, n), values (n), shape."""


def read_tensor(path: str | PathLike[str], format: FormatLike | None = None) -> SparseTensor:
    """Read a sparse tensor from a file; the suffix determines the file format.

    Args:
        path: `.mtx` (Matrix Market: coordinate or array; real, integer or pattern; general, symmetric or
            skew-symmetric), `.tns` (FROSTT: coordinates from 1, then the value) or `.npz` (SciPy's `save_npz`, or
            `write_tensor`).
        format: the format of the result; None: that of the file, or COO if the file has none.

    Raises:
        ArgumentError: the file cannot be read, or its content does not match its suffix.
    """
    place = _to_path(path)
    reader = _of_ending(place, _READERS)
    try:
        if not stat.S_ISREG(place.stat().st_mode):  # a pipe or a device may never end
            raise OSError(errno.EINVAL, "it is not a regular file")
        tensor: SparseTensor = reader(place)
    except OSError as error:
        raise ArgumentError(f"cannot read {place}: {error.strerror or error}") from None
    except ArgumentError as error:
        raise ArgumentError(
            f"{place}: {error.message}", expected=error.expected, found=error.found, suggestion=error.suggestion
        ) from None
    except Exception as error:  # NumPy raises any exception for a damaged archive
        raise ArgumentError(f"{place} is not a {place.suffix} file of a sparse tensor: {error}") from None
    return tensor if format is None else tensor.to(format)


def write_tensor(path: str | PathLike[str], x: Any) -> None:
    """Write a sparse tensor of any kind that `as_sparse` takes; the suffix determines the file format.

    See `read_tensor` for the suffixes.

    Raises:
        ArgumentError: the file cannot be written, or the file format cannot hold this tensor.
    """
    place, tensor = _to_path(path), as_sparse(x)
    if tensor.dtype.is_complex:
        raise ArgumentError("a file holds no complex elements", suggestion="write real and imaginary parts")
    writer = _of_ending(place, _WRITERS)
    try:
        writer(place, tensor)
    except OSError as error:
        raise ArgumentError(f"cannot write {place}: {error.strerror or error}") from None


def _to_path(path: object) -> Path:
    if not isinstance(path, str | PathLike):
        raise ArgumentError("a path is a string or a Path", found=describe_value(path))
    return Path(path)


def _of_ending(path: Path, table: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    found = table.get(path.suffix)
    if found is None:
        raise ArgumentError(f"the suffix of {path} is unknown", expected=", ".join(table), found=repr(path.suffix))
    return found


def _of_elements(elements: Elements) -> SparseTensor:
    places, values, shape = elements
    return SparseTensor.from_coordinates(places, values, shape, coo_format(len(shape)))


# --- Matrix Market -----------------------------------------------------------------------------------------------


def _read_mtx(path: Path) -> SparseTensor:
    with path.open(encoding="utf-8") as file:
        header = file.readline().lower().split()
        if header[:2] != ["%%matrixmarket", "matrix"] or len(header) != 5:
            raise ValueError("the first line must be '%%MatrixMarket matrix ...'")
        layout, field, symmetry = header[2:]
        if layout not in ("coordinate", "array") or field not in _FIELDS or symmetry not in _SYMMETRIES:
            raise ValueError(f"'{' '.join(header[2:])}' is not read here")
        line = file.readline()
        while line.startswith("%") or (line and not line.strip()):
            line = file.readline()
        sizes = [int(word) for word in line.split()]
        body = _read_numbers(file, field if layout == "coordinate" else "real")
    read = _coordinate_entries if layout == "coordinate" else _array_entries
    places, values, shape = read(body, sizes, field, symmetry)
    if sign := _SYMMETRIES[symmetry]:
        away = places[0] != places[1]
        places = np.concatenate((places, places[::-1, away]), axis=1)
        values = np.concatenate((values, sign * values[away]))
    return _of_elements((places, values.astype(_FIELDS[field]), shape))


def _read_numbers(file: Any, field: str) -> np.ndarray[Any, Any]:
    kind = np.int64 if field in ("integer", "pattern") else np.float64
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a file without entries
        return np.loadtxt(file, dtype=kind, comments="%", ndmin=2)


def _coordinate_entries(body: Any, sizes: list[int], field: str, _: str) -> Elements:
    if len(sizes) != 3:
        raise ValueError("a size line has rows, columns and entries")
    columns = 2 if field == "pattern" else 3
    if len(body) != sizes[2] or (len(body) and body.shape[1] != columns):
        raise ValueError(f"{sizes[2]} entries of {columns} numbers are announced, {body.shape} are there")
    body = body.reshape(-1, columns)
    values = np.ones(len(body)) if field == "pattern" else body[:, 2]
    return _parse_integers(body[:, :2]).T - 1, values, (sizes[0], sizes[1])


def _array_entries(body: Any, sizes: list[int], _: str, symmetry: str) -> Elements:
    if len(sizes) != 2:
        raise ValueError("a size line has rows and columns")
    rows, columns = sizes
    places = np.indices((columns, rows)).reshape(2, -1)[::-1]
    if symmetry != "general":
        places = places[:, places[0] >= places[1] + (symmetry == "skew-symmetric")]
    values = body.reshape(-1)
    if values.size != places.shape[1]:
        raise ValueError(f"{places.shape[1]} entries are announced, {values.size} are there")
    return places[:, values != 0], values[values != 0], (rows, columns)


def _parse_integers(x: Any) -> np.ndarray[Any, Any]:
    """Convert coordinates that were read as numbers of any type to int64. Raises ValueError if one is not whole."""
    if x.dtype.kind == "f" and not np.all(np.isfinite(x) & (x == np.trunc(x)) & (np.abs(x) < 2**53)):
        raise ValueError("a coordinate is not a whole number")
    return np.asarray(x, np.int64)


def _write_mtx(path: Path, t: SparseTensor) -> None:
    if t.ndim != 2:
        raise ArgumentError(f"a .mtx file holds matrices, this tensor has {t.ndim} dimensions", suggestion=".tns, .npz")
    field = "real" if t.dtype.is_floating_point else "integer"
    lines = [f"%%MatrixMarket matrix coordinate {field} general", f"{t.shape[0]} {t.shape[1]} {t.nnz}"]
    _write_lines(path, lines, t)


# --- FROSTT ------------------------------------------------------------------------------------------------------


def _read_tns(path: Path) -> SparseTensor:
    with path.open(encoding="utf-8") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        body = np.loadtxt(file, dtype=np.float64, comments="#", ndmin=2)
    if not body.size:
        raise ValueError("a file without elements has no shape")
    places = _parse_integers(body[:, :-1]).T - 1
    if places.size and places.min() < 0:
        raise ValueError("coordinates begin at 1")
    return _of_elements((places, body[:, -1], tuple(int(row.max()) + 1 for row in places)))


def _write_tns(path: Path, t: SparseTensor) -> None:
    _write_lines(path, [], t)


def _write_lines(path: Path, lines: list[str], t: SparseTensor) -> None:
    """Write `lines`, then a line for each element, with enough digits to read the same values back."""
    rows, values = t.coordinates().T.tolist(), t.values.detach().reshape(-1)
    values = values.to(torch.int64) if values.dtype is torch.bool else values
    text = (" ".join([*(str(c + 1) for c in row), repr(v)]) for row, v in zip(rows, values.tolist(), strict=True))
    path.write_text("\n".join([*lines, *text, ""]), encoding="utf-8")


# --- NumPy archives ----------------------------------------------------------------------------------------------


def _read_npz(path: Path) -> SparseTensor:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        parts = {name: archive[name] for name in archive.files}
    word, shape = parts["format"].item(), tuple(int(n) for n in parts["shape"])
    name = word.decode("ascii") if isinstance(word, bytes) else str(word)
    if "data" not in parts:
        levels = [_parse_level(parts, n) for n in range(int(parts["levels"]))]
        return SparseTensor.from_arrays(name, shape, levels, torch.from_numpy(parts["values"]))
    data = torch.from_numpy(parts["data"])
    if name == "coo":
        places = parts["coords"] if "coords" in parts else np.stack((parts["row"], parts["col"]))
        return SparseTensor.from_coordinates(places, data, shape, coo_format(len(shape)))
    if name not in _LAYOUTS:
        raise ValueError(f"SciPy's format '{name}' is not read here")
    arrays = (torch.from_numpy(parts["indptr"]), torch.from_numpy(parts["indices"]))
    blocks = tuple(data.shape[1:])
    format = f"bsr({','.join(map(str, blocks))})" if blocks else name
    return SparseTensor.from_arrays(format, shape, (None, arrays, *(None for _ in blocks)), data)


def _parse_level(parts: dict[str, Any], n: int) -> tuple[Any, Any] | None:
    crd, pos = parts.get(f"crd{n}"), parts.get(f"pos{n}")
    return None if crd is None else (None if pos is None else torch.from_numpy(pos), torch.from_numpy(crd))


def _write_npz(path: Path, t: SparseTensor) -> None:
    """Write CSR, CSC and BSR matrices as SciPy does, so that SciPy can read them; other tensors level by level."""
    if t.dtype is torch.bfloat16:
        raise ArgumentError("a .npz file holds no bfloat16", suggestion="write x.with_values(x.values.float())")
    name = str(t.format).partition("(")[0]
    parts: dict[str, Any] = {"shape": np.array(t.shape), "format": name.encode()}
    if name in _LAYOUTS and t.levels[1] is not None:
        pos, crd = t.levels[1]
        assert pos is not None
        parts |= {"indptr": pos.numpy(), "indices": crd.numpy(), "data": t.values.detach().numpy()}
    else:
        parts |= {"format": str(t.format).encode(), "levels": len(t.levels), "values": t.values.detach().numpy()}
        for n, level in enumerate(t.levels):
            arrays = () if level is None else zip(("pos", "crd"), level, strict=True)
            parts |= {f"{what}{n}": x.numpy() for what, x in arrays if x is not None}
    with path.open("wb") as file:
        np.savez(file, **parts)


_READERS: dict[str, Callable[..., Any]] = {".mtx": _read_mtx, ".tns": _read_tns, ".npz": _read_npz}
_WRITERS: dict[str, Callable[..., Any]] = {".mtx": _write_mtx, ".tns": _write_tns, ".npz": _write_npz}
