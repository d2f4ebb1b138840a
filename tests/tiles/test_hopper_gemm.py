"""A product with TMA, barriers and wgmma by hand; planted faults are reported or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.codegen.gpu.ptx import architecture_for
from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.rename import rename
from tensor_comprehensions.loop_ir.rewrite import map_stmt
from tensor_comprehensions.loop_ir.show import format_program
from tensor_comprehensions.loop_ir.verify import verify
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator

from ..helpers.tile_gemm_hopper import Gemm90, call

Array = np.ndarray[Any, Any]
Change = Callable[[ir.Stmt], ir.Stmt]
SEED = 90
CASES = {"whole": Gemm90(256, 512, 512, bn=256), "rest": Gemm90(200, 304, 328, bn=64, depth=3)}
SMALL = Gemm90(128, 32, 256, bn=32, depth=2)
needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")


def factors(g: Gemm90) -> tuple[torch.Tensor, torch.Tensor]:
    """Small whole numbers, whose sums are exact."""
    rng = np.random.default_rng(SEED)
    shapes = ((g.m, g.k), (g.n, g.k))
    left, right = (torch.from_numpy(rng.integers(-3, 4, s).astype(np.float32)).bfloat16() for s in shapes)
    return left, right


def bits(t: torch.Tensor) -> Array:
    return t.view(torch.int16).numpy().view(np.uint16).copy()


def emulate(g: Gemm90, m: ir.Module, built: emulator.Emulated) -> Array:
    left, right = factors(g)
    arrays = {"A": bits(left), "B": bits(right), "C": np.zeros((g.m, g.n), np.uint16)}
    assert emulator.run_emulated_module(built, m, arrays) == (0, 0)
    return arrays["C"]


def product(g: Gemm90) -> torch.Tensor:
    left, right = factors(g)
    return (left.float() @ right.float().T).bfloat16()


def interpreted(g: Gemm90, m: ir.Module) -> Array:
    """What the interpreter makes, as bits; it holds bfloat16 in float32."""
    left, right = factors(g)
    arrays = {"A": left.float().numpy(), "B": right.float().numpy(), "C": np.zeros((g.m, g.n), np.float32)}
    assert interpret(m, arrays) == []
    return (arrays["C"].view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("g", [SMALL, Gemm90(120, 40, 136, bn=64, depth=2)], ids=str)
def test_interpreter_equals_torch(g: Gemm90) -> None:
    m = g.module()
    verify(m)
    np.testing.assert_array_equal(interpreted(g, m), bits(product(g)), err_msg=f"seed {SEED}")


@needs_compiler
def test_emulator_equals_torch() -> None:
    modules = [g.module() for g in CASES.values()]
    built = emulator.build_emulated([emit_cuda(m) for m in modules])
    for g, m, one in zip(CASES.values(), modules, built, strict=True):
        verify(m)
        np.testing.assert_array_equal(emulate(g, m, one), bits(product(g)), err_msg=f"{g}, seed {SEED}")


def log_of(source: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nvrtc.Resources, str]:
    """What the assembler reports, with its warnings."""
    logs: list[str] = []
    original = nvrtc._resources
    monkeypatch.setattr(nvrtc, "_resources", lambda log: (logs.append(log), original(log))[1])
    (found,) = nvrtc.compile_text(source, "sm_90a").resources.values()
    return found, logs[0]


@needs_nvrtc
@pytest.mark.parametrize("name", CASES)
def test_compiles_without_spills_and_warnings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = emit_cuda(CASES[name].module()).source
    assert architecture_for(source, "sm_90") == "sm_90a"
    assert architecture_for("", "sm_90") == "sm_90"
    resources, log = log_of(source, monkeypatch)
    assert (resources.local, resources.spill_stores, resources.spill_loads) == (0, 0, 0)
    assert resources.registers <= 168
    assert not re.search(r"C75\d\d|warning", log), log


def test_the_program_reads_like_this() -> None:
    text = format_program(SMALL.module())
    assert "map A of A box (128, 64) swizzle 128 bytes" in text
    assert "tma_load_2(&sA[i % 2, 0, 0], &A[block.y * 128, i * 64], &full[i % 2], 0)" in text
    renamed = rename(SMALL.module(), str.lower, "product")
    verify(renamed)
    assert [m.buffer.name for m in renamed.kernels[0].maps] == ["a", "b"]


def test_the_text_reads_like_this() -> None:
    text = emit_cuda(CASES["whole"].module()).source
    assert "__launch_bounds__(384, 1) gemm90(" in text
    assert "const __grid_constant__ tensor_map map_0" in text
    assert "extern __shared__ __align__(1024) unsigned char dynamic_shared[];" in text
    assert "role = broadcast_warp(tx / 128);" in text
    for behind in (0, 32, 64, 96):  # one place and constants: each descriptor is an addition
        assert f"matrix_descriptor<1, 64, 1, {behind}>(base_sB, j % 4 * 2048)" in text
    assert re.search(r"tma_load_2\(&sA\[i % 4\]\[0\]\[.*\], &map_0, i \* 64, by \* 128, &full\[i % 4\]\);", text)


# --- planted faults ----------------------------------------------------------------------------------------------


def changed(m: ir.Module, change: Change) -> ir.Module:
    def on_stmt(s: ir.Stmt) -> ir.Stmt:
        return change(map_stmt(s, lambda e: e, on_stmt))

    (kernel,) = m.kernels
    return replace(m, kernels=(replace(kernel, body=on_stmt(kernel.body)),))


def at(name: str, change: Callable[[ir.Invoke], ir.Stmt], buffer: str = "", *, only: int | None = None) -> Change:
    """Change the calls of `name`, of those on `buffer`; of these that with a number, in the order of the program."""
    count = 0

    def on_stmt(s: ir.Stmt) -> ir.Stmt:
        nonlocal count
        if not isinstance(s, ir.Invoke) or not s.name.startswith(name):
            return s
        if buffer and all(x.name != buffer for x, _ in s.operands):
            return s
        count += 1
        return change(s) if only is None or count == only + 1 else s

    return on_stmt


def gone(s: ir.Invoke) -> ir.Stmt:
    return b.block()


def twice(s: ir.Invoke) -> ir.Stmt:
    return b.block(s, s)


def with_values(*values: ir.Expr) -> Callable[[ir.Invoke], ir.Stmt]:
    return lambda s: replace(s, values=values)


def with_attributes(*attributes: int) -> Callable[[ir.Invoke], ir.Stmt]:
    return lambda s: replace(s, attributes=attributes)


def other_parity(s: ir.Invoke) -> ir.Stmt:
    return replace(s, values=(b.sub(1, s.values[0]),))


def early(s: ir.Stmt) -> ir.Stmt:
    """Release the stage of this step, whose products still read it."""
    if isinstance(s, ir.If) and isinstance(s.then, ir.Invoke) and s.then.name == "barrier_arrive":
        stage = b.mod(b.var("j"), SMALL.depth)
        release = call("barrier_arrive", (s.then.operands[0][0], (stage,)))
        return ir.If(b.eq(b.mod(b.var(ir.THREAD[0]), 128), 0), release)
    return s


def always(s: ir.Stmt) -> ir.Stmt:
    """Every thread of the warpgroup releases, not one."""
    if isinstance(s, ir.If) and isinstance(s.then, ir.Invoke) and s.then.name == "barrier_arrive":
        return ir.If(b.gt(b.var("j"), 0), s.then)
    return s


def touching(s: ir.Stmt) -> ir.Stmt:
    """Sums change before they are waited for."""
    if isinstance(s, ir.Invoke) and s.name == "wgmma_wait" and s.attributes == (1,):
        acc = b.buffer("acc", FLOAT32, (SMALL.bn // 2,), ir.Space.REGISTER)
        return b.block(s, b.store(acc, (b.const(3),), b.const(0.0, FLOAT32)))
    return s


def reading(s: ir.Stmt) -> ir.Stmt:
    """The last groups are not waited for."""
    return b.block() if isinstance(s, ir.Invoke) and s.name == "wgmma_wait" and s.attributes == (0,) else s


def stored(s: ir.Invoke) -> ir.Stmt:
    """An ordinary store into the tile, before the products read it."""
    tile = s.operands[2][0]
    place = (*s.operands[2][1][:-2], b.mod(b.var(ir.THREAD[0]), 32), b.const(0))
    write = b.store(tile, place, b.const(1.0, tile.type.dtype))
    return b.block(ir.If(b.lt(b.var(ir.THREAD[0]), 160), write), call("barrier_part", attributes=(3, 256)), s)


FAULTS: dict[str, tuple[Change, str]] = {
    "wait for data missing": (at("barrier_wait", gone, "full"), r"undefined: .*s[AB]\["),
    "wait for room missing": (
        at("barrier_wait", gone, "empty"),
        r"race: .* sA\[.*(products|copies)|too many arrivals.*full",
    ),
    "parity of full": (at("barrier_wait", other_parity, "full"), r"undefined: .*sA"),
    "parity of empty": (at("barrier_wait", other_parity, "empty"), r"deadlock: .*(full|empty)\["),
    "fewer bytes": (at("barrier_expect", with_attributes(16384)), r"undefined|bytes: .*full"),
    "more bytes": (at("barrier_expect", with_attributes(32768)), r"deadlock: .*full\[0\].*lacks 0 arrivals and \d+"),
    "no expect": (at("barrier_expect", gone), r"deadlock: .*full\[0\].*lacks 1 arrivals"),
    "arrive missing": (at("barrier_arrive", gone), r"deadlock: .*empty\["),
    "arrive twice": (at("barrier_arrive", twice), r"race|other arrivers|lapped|deadlock"),
    "expect twice": (at("barrier_expect", twice), r"too many arrivals: .*full"),
    "all arrive": (always, r"race|other arrivers|too many|lapped|deadlock"),
    "early release": (early, r"race: .* sA\[.*products of warpgroup"),
    "fewer arrivals": (at("barrier_init", with_attributes(1), "empty"), r"race: .*products|other arrivers|lapped"),
    "more arrivals": (at("barrier_init", with_attributes(3), "empty"), r"deadlock: .*empty\[.*lacks 1 arrivals"),
    "barrier not made": (at("barrier_init", gone, "full", only=1), r"undefined: .*full\[1\], which nothing made"),
    "barriers not fenced": (at("fence_barrier_init", gone), r"fence: .*(full|empty)\[0\]"),
    "no barrier of the block": (
        at("barrier", lambda s: gone(s) if s.name == "barrier" else s),
        r"(fence|undefined): .*(full|empty)",
    ),
    "products without fence": (at("wgmma_fence", gone), r"wgmma_fence"),
    "products not waited for": (reading, r"touched: .* reads register|acc.* is read but undefined"),
    "sums written": (touching, r"touched: .* writes (register 3|acc)"),
    "stores without fence": (at("wgmma_m64", stored, "sB", only=0), r"fence: .* sB\[|race: .* sB"),
    "copy of the other stage": (
        at("tma_load", lambda s: replace(s, operands=(*s.operands[:2], (s.operands[2][0], (b.const(0),)))), "sB"),
        r"deadlock|bytes|undefined",
    ),
}  # fmt: skip


@cache
def faulty(name: str) -> ir.Module:
    return changed(SMALL.module(), FAULTS[name][0])


@cache
def built_faults() -> dict[str, emulator.Emulated]:
    return dict(zip(FAULTS, emulator.build_emulated([emit_cuda(faulty(n)) for n in FAULTS]), strict=True))


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_emulator_reports(name: str) -> None:
    with pytest.raises(InternalError, match=FAULTS[name][1]) as found:
        emulate(SMALL, faulty(name), built_faults()[name])
    assert "line " in str(found.value) or "at a line" in str(found.value)


@pytest.mark.parametrize("name", FAULTS)
def test_interpreter_reports(name: str) -> None:
    with pytest.raises(InternalError, match=FAULTS[name][1]):
        interpreted(SMALL, faulty(name))


def swizzle_of_b(swizzle: tuple[int, int, int] | None) -> Change:
    def buffer(x: ir.Buffer) -> ir.Buffer:
        return replace(x, swizzle=swizzle) if x.name == "sB" else x

    def on_stmt(s: ir.Stmt) -> ir.Stmt:
        if isinstance(s, ir.Allocate):
            return replace(s, buffers=tuple(map(buffer, s.buffers)))
        if isinstance(s, ir.Invoke):
            return replace(s, operands=tuple((buffer(x), where) for x, where in s.operands))
        return s

    return on_stmt


def with_map(**fields: Any) -> ir.Module:
    m = SMALL.module()
    (kernel,) = m.kernels
    maps = (kernel.maps[0], replace(kernel.maps[1], **fields))
    return replace(m, kernels=(replace(kernel, maps=maps),))


REFUSED: dict[str, tuple[Callable[[], ir.Module], str]] = {
    "swizzle": (lambda: changed(SMALL.module(), swizzle_of_b((2, 3, 3))), "is not swizzled as|no descriptor"),
    "no swizzle": (lambda: changed(SMALL.module(), swizzle_of_b(None)), "is not swizzled as|no descriptor"),
    "swizzle of the map": (lambda: with_map(swizzle=64), "longer than its swizzle"),
    "box": (lambda: with_map(box=(64, 64)), "holds no box"),
    "narrow box": (lambda: with_map(box=(32, 32)), "holds no box"),
    "wide box": (lambda: with_map(box=(512, 64)), "beyond 256"),
    "map": (lambda: changed(SMALL.module(), at("tma_load", with_attributes(1), "sA")), "is of B, not of A"),
    "one thread at a product": (
        lambda: changed(
            SMALL.module(),
            at("wgmma_m", lambda s: ir.If(b.eq(b.var(ir.THREAD[0]), 128), s)),
        ),
        "not all of 128 threads come to wgmma",
    ),
    "rows beyond": (
        lambda: changed(SMALL.module(), at("wgmma_m", lambda s: replace(s, name=s.name.replace("n32", "n64")))),
        "holds no 64 x 16|dimension 0 of acc",
    ),
    "ordinary access of a barrier": (
        lambda: changed(
            SMALL.module(),
            lambda s: b.store(s.operands[0][0], s.operands[0][1], b.const(1, s.operands[0][0].type.dtype))
            if isinstance(s, ir.Invoke) and s.name == "barrier_arrive" else s,
        ),
        "only intrinsics reach them",
    ),
    "registers": (lambda: changed(SMALL.module(), at("registers_inc", with_attributes(260))), "no thread has so many"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_verify_refuses(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(InternalError, match=message):
        verify(make())


def test_the_small_case_is_right() -> None:
    m = SMALL.module()
    verify(m)
    if emulator.is_emulator_available():
        (built,) = emulator.build_emulated([emit_cuda(m)])
        np.testing.assert_array_equal(emulate(SMALL, m, built), bits(product(SMALL)))
