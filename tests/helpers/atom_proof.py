"""Every row of the table of atoms on random bits: on the first CUDA device, or else in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.codegen.gpu.ptx import architecture_for
from tensor_comprehensions.core.errors import TCError
from tensor_comprehensions.loop_ir.nodes import Module
from tensor_comprehensions.runtime.cuda import launch, nvrtc
from tensor_comprehensions.runtime.emulate import emulator

from . import atom_cases, hopper_cases
from .atom_cases import Array, Case

UNITS = {2: 2.0**-9, 4: 2.0**-20, 8: 2.0**-50}
"""Of a sum's magnitude, that tensor cores may be off, by its bytes: they align terms, and cut off what is below."""
Run = Callable[[Module, dict[str, Any]], tuple[int, int]]


def prove_atoms() -> int:
    """Run all rows that the machine has; print those that are wrong, and give their number."""
    capability, where, run = _machine()
    cases = dict(atom_cases.cases())
    cases |= hopper_cases.cases() if capability == 90 else {}
    if capability < 90:
        cases = {name: c for name, c in cases.items() if not name.startswith("stmatrix")}
    wrong = 0
    for name, c in cases.items():
        arrays = atom_cases.arrays_of(c)
        try:
            assert run(c.module, arrays) == (0, 0)
            fault = difference(c, arrays["out"])
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault:
            wrong += 1
            print(f"{name}: {fault[:400]}", flush=True)
    print(f"atoms: {len(cases)} rows {where}, {wrong} wrong, seeds {atom_cases.SEED} and {hopper_cases.SEED}")
    return wrong


def difference(c: Case, found: Array) -> str:
    """The first element that is wrong; empty: none is."""
    wanted = c.expected.view(np.float16) if c.expected.dtype == np.float16 else c.expected
    found = found.view(wanted.dtype)
    with np.errstate(all="ignore"):
        good = (found == wanted) | ((found != found) & (wanted != wanted))
        if c.scale is not None and wanted.dtype.kind == "f":
            scale = c.scale.view(np.float16) if c.scale.dtype == np.float16 else c.scale
            most = UNITS[wanted.itemsize] * scale.astype(np.float64)
            good |= np.abs(found.astype(np.float64) - wanted.astype(np.float64)) <= most
            good |= ~np.isfinite(found) & ~np.isfinite(most)
    if good.all():
        return ""
    at = tuple(int(n) for n in np.argwhere(~good)[0])
    return f"out{list(at)} is {found[at]}, not {wanted[at]}; {int((~good).sum())} of {good.size} are wrong"


def _machine() -> tuple[int, str, Run]:
    """The compute capability, the name, and how to run a module."""
    try:
        target = launch.device_target(0)
    except TCError:
        return 90, "in the emulator", _emulate

    def run(module: Module, arrays: dict[str, Any]) -> tuple[int, int]:
        code = emit_cuda(module)
        cubin = nvrtc.compile_text(code.source, architecture_for(code.source, target.name))
        return launch.run_on_device(code, cubin, module, arrays, torch.device("cuda", 0))

    return target.capability, f"on a device of {target.name}", run


def _emulate(module: Module, arrays: dict[str, Any]) -> tuple[int, int]:
    return emulator.run_emulated_code(emit_cuda(module), module, arrays)
