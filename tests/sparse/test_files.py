"""Files of sparse tensors: what is written is read back, what others wrote is read, and what is wrong is an error."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import torch
from patterns import random_tensor, store

from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.dispatch.sparse.tensor_files import read_tensor, write_tensor

RNG = np.random.default_rng()


@pytest.mark.parametrize("format", ["csr", "csc", "bsr(2,5)", "coo", "dcsr", "uc", "sd(1,0)", "dense"])
@pytest.mark.parametrize("ending", ["mtx", "npz"])
def test_matrices_come_back(format: str, ending: str, tmp_path: Path) -> None:
    x = random_tensor(RNG, (6, 5), 0.4) / 7
    write_tensor(path := tmp_path / f"x.{ending}", store(x, format))
    back = read_tensor(path)
    assert torch.equal(back.to_dense(), x)
    assert ending == "mtx" or str(back.format) == format
    assert str(read_tensor(path, "csc").format) == "csc"


@pytest.mark.parametrize("ending", ["tns", "npz"])
def test_tensors_of_three_dimensions_come_back(ending: str, tmp_path: Path) -> None:
    x = random_tensor(RNG, (4, 3, 5), 0.3) / 7
    x[3, 2, 4] = 1.0
    write_tensor(path := tmp_path / f"x.{ending}", store(x, "csf"))
    assert torch.equal(read_tensor(path, "csf").to_dense(), x)


@pytest.mark.parametrize("symmetry", ["general", "symmetric", "skew-symmetric"])
@pytest.mark.parametrize("field", ["real", "integer", "pattern"])
def test_matrix_market_files_of_others(symmetry: str, field: str, tmp_path: Path) -> None:
    if (symmetry, field) == ("skew-symmetric", "pattern"):
        return  # the negative of a place means nothing
    x = random_tensor(RNG, (5, 5), 0.4).numpy()
    if symmetry != "general":
        x = np.tril(x, -1)
        x = x + x.T if symmetry == "symmetric" else x - x.T
    if field == "pattern":
        x = (x != 0).astype(np.float64)
    kept = sp.coo_array(x if symmetry == "general" else np.tril(x))
    scipy.io.mmwrite(tmp_path / "x.mtx", kept, field=field, symmetry="general")
    text = (tmp_path / "x.mtx").read_text().replace(" general\n", f" {symmetry}\n% a comment\n\n", 1)
    (tmp_path / "x.mtx").write_text(text)
    np.testing.assert_array_equal(read_tensor(tmp_path / "x.mtx").to_dense().numpy(), x)


def test_dense_matrix_market_files(tmp_path: Path) -> None:
    x = random_tensor(RNG, (4, 3), 0.6).numpy()
    scipy.io.mmwrite(tmp_path / "x.mtx", x)
    np.testing.assert_array_equal(read_tensor(tmp_path / "x.mtx").to_dense().numpy(), x)


@pytest.mark.parametrize("name", ["csr", "csc", "coo", "bsr"])
def test_archives_of_scipy(name: str, tmp_path: Path) -> None:
    x = random_tensor(RNG, (6, 4), 0.4).numpy()
    sp.save_npz(tmp_path / "x.npz", getattr(sp, f"{name}_array")(x))
    np.testing.assert_array_equal(read_tensor(tmp_path / "x.npz").to_dense().numpy(), x)
    write_tensor(tmp_path / "y.npz", store(torch.from_numpy(x), "csr"))
    np.testing.assert_array_equal(sp.load_npz(tmp_path / "y.npz").toarray(), x)


GOOD = "%%MatrixMarket matrix coordinate real general\n3 4 2\n1 2 0.5\n3 4 2\n"
BAD = [
    ("x.mtx", ""),
    ("x.mtx", GOOD.replace("matrix", "vector")),
    ("x.mtx", GOOD.replace("real", "complex")),
    ("x.mtx", GOOD.replace("3 4 2\n1", "3 4 7\n1")),
    ("x.mtx", GOOD.replace("1 2 0.5", "9 2 0.5")),
    ("x.mtx", GOOD.replace("1 2 0.5", "1.5 2 0.5")),
    ("x.mtx", GOOD.replace("1 2 0.5", "1 two 0.5")),
    ("x.mtx", GOOD.replace("3 4 2\n1", "3 -4 2\n1")),
    ("x.mtx", GOOD.replace("1 2 0.5", "nan 2 0.5")),
    ("x.tns", ""),
    ("x.tns", "0 1 2.0\n"),
    ("x.tns", "1 1 2.0\n1 1\n"),
    ("x.npz", "PK but no archive"),
    ("x.bin", "whatever"),
]


@pytest.mark.parametrize(("name", "text"), BAD)
def test_files_that_are_wrong(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError, match=r"x\.|coordinate"):
        read_tensor(tmp_path / name)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot read"):
        read_tensor(tmp_path / "x.mtx")
    with pytest.raises(ArgumentError, match="cannot write"):
        write_tensor(tmp_path / "no" / "x.npz", store(torch.eye(3), "csr"))
    with pytest.raises(ArgumentError, match="holds matrices"):
        write_tensor(tmp_path / "x.mtx", store(torch.ones(2, 2, 2), "csf"))
    with pytest.raises(ArgumentError, match="no complex"):
        write_tensor(tmp_path / "x.mtx", store(torch.eye(3), "csr").with_values(torch.ones(3, dtype=torch.complex64)))
    with pytest.raises(ArgumentError, match="no bfloat16"):
        write_tensor(tmp_path / "x.npz", store(torch.eye(3).bfloat16(), "csr"))
    with pytest.raises(ArgumentError, match="a path is"):
        read_tensor(3)  # type: ignore[arg-type]


def test_any_changed_byte_of_a_file_is_an_error_or_a_tensor(tmp_path: Path) -> None:
    x = store(random_tensor(RNG, (6, 5), 0.4), "csr")
    for ending in ("mtx", "npz"):
        write_tensor(path := tmp_path / f"x.{ending}", x)
        good = path.read_bytes()
        for n in RNG.integers(0, len(good), 150).tolist():
            path.write_bytes(good[:n] + bytes([RNG.integers(256)]) + good[n + 1 :])
            with suppress(ArgumentError):
                read_tensor(path).check()
