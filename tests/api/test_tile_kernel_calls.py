"""Calls of tile kernels on a CUDA device whose part the CPU plays: where they run, and refusals before launches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.dispatch.cuda.tile_kernels import CompiledTileKernel
from tensor_comprehensions.runtime.cuda import launch
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tiles.library.rows import layernorm

from ..helpers.fake_cuda import FakeCuda, fake

__all__ = ["fake"]
needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")


def known_to(fake: FakeCuda, kernel: CompiledTileKernel) -> CompiledTileKernel:
    """A kernel that the stand-in finds by its text."""
    fake.known[kernel.code.source] = SimpleNamespace(  # type: ignore[assignment]
        code=kernel.code, arguments=kernel.module.arguments, temporaries=()
    )
    return kernel


def arguments() -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 32).half(), torch.ones(32).half(), torch.zeros(32).half()


def compute_expected(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.float(), (32,), g.float(), b.float()).half()


@needs_compiler
def test_views_of_any_layout_run(fake: FakeCuda) -> None:
    """Strided, misaligned and negated inputs are copied; the code is loaded once."""
    x, g, b = arguments()
    kernel = known_to(fake, layernorm.compile(x, g, b, target="cuda:sm_90"))
    shifted = torch.randn(4 * 32 + 1).half()[1:].view(4, 32)
    negated = torch.complex(torch.zeros(32), torch.ones(32)).conj().imag  # torch keeps the sign apart
    assert negated.is_neg()
    for given in (x, torch.randn(32, 4).half().T, shifted):
        torch.testing.assert_close(kernel(given, g, b), compute_expected(given, g, b), rtol=2e-3, atol=2e-3)
    with pytest.raises(tc.ArgumentError, match="compiled for other tensors"):
        kernel(x, g, negated)
    half = negated.half()
    torch.testing.assert_close(kernel(x, g, half), compute_expected(x, g, half), rtol=2e-3, atol=2e-3)
    assert fake.log.count("load_module") == 1
    assert {entry[-1] for entry in fake.launches} == {fake.stream}


def test_tensors_elsewhere_are_refused(fake: FakeCuda) -> None:
    """The address of another device would make this one unusable."""
    x, g, b = arguments()
    kernel = known_to(fake, layernorm.compile(x, g, b, target="cuda:sm_90"))
    elsewhere = torch.empty(32, dtype=torch.float16, device="meta")
    for call in (kernel, layernorm):
        with pytest.raises(tc.ArgumentError, match=r"takes tensors on one CUDA device(.|\n)*found: cpu, meta"):
            call(x, g, elsewhere)
    assert not fake.launches


@pytest.mark.parametrize(
    ("target", "device", "message"),
    [
        ("sm_80", "sm_90", "compiled for sm_80, and cpu is sm_90"),
        ("sm_90", "sm_80", "compiled for sm_90, and cpu is sm_80"),
        ("sm_90", "sm_100", "compiled for sm_90, and cpu is sm_100"),
        ("sm_86", "sm_80", "compiled for sm_86, and cpu is sm_80"),
        ("sm_80", "sm_86", ""),
        ("sm_100", "sm_100", ""),
    ],
)
def test_code_runs_on_devices_of_its_major_number(
    monkeypatch: pytest.MonkeyPatch, target: str, device: str, message: str
) -> None:
    there = parse_gpu_target(device)
    monkeypatch.setattr(launch, "device_target", lambda index: there)
    given: dict[str, Any] = {"target": parse_gpu_target(target), "device": torch.device("cpu")}
    if not message:
        launch.check_runs_on(**given)
        return
    with pytest.raises(tc.ArgumentError, match=message):
        launch.check_runs_on(**given)


def test_code_for_another_device_is_not_loaded(fake: FakeCuda) -> None:
    x, g, b = arguments()
    kernel = known_to(fake, layernorm.compile(x, g, b, target="cuda:sm_80"))
    with pytest.raises(tc.ArgumentError, match=r"compiled for sm_80, and cpu is sm_90(.|\n)*leave target= out"):
        kernel(x, g, b)
    assert "load_module" not in fake.log


@needs_compiler
def test_nothing_is_loaded_during_a_capture(fake: FakeCuda) -> None:
    x, g, b = arguments()
    kernel = known_to(fake, layernorm.compile(x, g, b, target="cuda:sm_90", warps=2))
    fake.capturing = True
    with pytest.raises(tc.ArgumentError, match=r"layernorm has not run(.|\n)*call it once before the capture"):
        kernel(x, g, b)
    assert "load_module" not in fake.log
    fake.capturing = False
    first = kernel(x, g, b)
    fake.capturing = True
    assert torch.equal(kernel(x, g, b), first)


def test_devices_with_fewer_processors_than_a_cluster() -> None:
    """Parts of a device have a cluster at least."""
    part = replace(parse_gpu_target("cuda:sm_90"), num_sms=1)
    op = tc.define("def mm(half(M,K) A, half(N,K) B) -> (C) { C(m,n) +=! A(m,k) * B(n,k) }").mm
    a, b = torch.empty(256, 64).half(), torch.empty(64, 64).half()
    options = tc.TileOptions(instruction="wgmma", cluster=2, tile=(128, 64, 64), warps=(8, 1))
    kernel = op.compile(a, b, target=part, options=options)
    assert kernel.compiled.code.kernels[0].launch.grid == (2, 1, 1)
