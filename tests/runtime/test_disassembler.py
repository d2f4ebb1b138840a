"""Machine code as text: the search for the disassembler, and its arguments. A script stands in for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.errors import ArgumentError, InternalError
from tensor_comprehensions.runtime.cuda import cubins, disassembler
from tensor_comprehensions.runtime.cuda.disassembler import disassemble
from tensor_comprehensions.runtime.cuda.nvrtc import Cubin
from tensor_comprehensions.tiles.library.rows import layernorm

CODE = Cubin("sm_90", b"machine code", {})


def install(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disassembler in a folder, the only one that is searched."""
    tool = folder / "nvdisasm"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)

    def folders(kind: str) -> Iterator[Path]:
        assert kind == "bin"
        yield from (folder / "empty", folder)

    monkeypatch.setattr(disassembler, "find_cuda_folders", folders)


def test_kernels_of_all_kinds_have_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, 'echo "options: $1"; cat "$2"', monkeypatch)
    monkeypatch.setattr(cubins, "cubin_of", lambda source, architecture: CODE)
    ops = tc.define("def scale(float a, float(N) x) -> (y) { y(n) = a * x(n) }")
    rows = torch.empty(4, 32).half(), torch.empty(32).half(), torch.empty(32).half()
    for kernel in (
        ops.scale.compile(2.0, torch.ones(8), target="cuda:sm_90"),
        layernorm.compile(*rows, target="cuda:sm_90"),
    ):
        assert kernel.source("sass") == "options: -c\nmachine code"


def test_a_refusal_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "echo 'no such machine' >&2; exit 1", monkeypatch)
    with pytest.raises(InternalError, match="refuses our code for sm_90: no such machine"):
        disassemble(CODE)


def test_without_a_disassembler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembler, "find_cuda_folders", lambda kind: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArgumentError, match="pip install nvidia-cuda-nvdisasm"):
        disassemble(CODE)
