"""Faults planted in programs of the tile language: the emulator reports them, or the builder refuses the program."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions import tiles as t
from tensor_comprehensions.core.dtypes import INT8
from tensor_comprehensions.runtime.emulate import emulator

TARGET = "cuda:sm_90"
needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")


@tc.tile_kernel("C:[M,N].bf16 <- A:[M,K].bf16, B:[N,K].bf16")
def faulty(k: Any, C: Any, A: Any, B: Any, fault: str = "") -> None:
    """A product of 128 x 32 tiles, with one thing wrong."""
    depth, (bm, bn, bk) = 2, (128, 32, 64)
    load, math = k.threads(384).tile(128).split(1, 2)
    sA, sB = k.shared("sA", (depth, bm, bk), A.dtype), k.shared("sB", (depth, bn, bk), B.dtype)
    arrivals = {"fewer arrivals": 1, "more arrivals": 3}.get(fault, 2)
    full, empty = k.barriers("full", depth, 1), k.barriers("empty", depth, arrivals)
    (m, n) = k.blocks(C.tile(bm, bn))
    a, b = A.tile(bm, bk)[m], B.tile(bn, bk)[n]
    with k.role(load), k.one():
        for i in k.steps(a.count, depth):
            if fault != "no wait for room":
                k.wait(empty[i.stage], i.phase if fault == "parity of room" else i.phase ^ 1)
            tiles = {"fewer bytes": (sA[i.stage],), "more bytes": (sA[i.stage], sA[i.stage], sB[i.stage])}
            if fault != "no expect":
                k.expect(full[i.stage], *tiles.get(fault, (sA[i.stage], sB[i.stage])))
            if fault == "expected twice":
                k.expect(full[i.stage], sA[i.stage])
            k.move(sA[i.stage], a[i], done=full[i.stage])
            stage = 0 if fault == "copy to another stage" else i.stage
            k.move(sB[stage], b[i], done=full[0 if fault == "bytes on another barrier" else i.stage])
    with k.role(math):
        acc = k.init(k.accumulator("acc", (bm, bn), A, B, by=math), 0)
        for i in k.steps(a.count, depth):
            if fault != "no wait for data":
                k.wait(full[i.stage], i.phase ^ 1 if fault == "parity of data" else i.phase)
            if fault == "released before":
                k.arrive(empty[i.stage])
            if fault == "stored without fence":
                k.move(sA[i.stage], k.map(lambda x: x, k.init(k.accumulator("z", (bm, bk), A, B, by=math), 0)))
                k.sync(math)
            k.matmul(acc, sA[i.stage], sB[i.stage], by=math)
            if fault == "released while read":
                k.arrive(empty[i.stage])
            elif fault not in ("never released", "released before"):
                k.release(empty, i, after=1)
            if fault == "released twice":
                k.arrive(empty[i.stage])
        k.move(C.tile(bm, bn)[m, n], acc)


FAULTS = {
    "no wait for room": r"race: .*sA\[|too many arrivals: .*full",
    "parity of room": r"deadlock: .*(full|empty)\[",
    "fewer bytes": r"bytes: .*full|undefined: .*s[AB]\[",
    "more bytes": r"deadlock: .*full\[0\].*lacks 0 arrivals and \d+ bytes",
    "no expect": r"deadlock: .*full\[0\].*lacks 1 arrivals",
    "expected twice": r"too many arrivals: .*full",
    "copy to another stage": r"(undefined|race): .*sB\[",
    "bytes on another barrier": r"bytes: .*full|undefined: .*sB\[|deadlock: .*full",
    "no wait for data": r"undefined: .*s[AB]\[",
    "parity of data": r"undefined: .*s[AB]\[",
    "released before": r"(race|undefined): .*s[AB]\[",
    "stored without fence": r"fence: .*sA\[|race: .*sA\[",
    "released while read": r"race: .*s[AB]\[.*products of warpgroup",
    "never released": r"deadlock: .*empty\[",
    "released twice": r"race: .*s[AB]\[|other arrivers: .*empty|lapped: .*empty|too many arrivals: .*empty|deadlock",
    "fewer arrivals": r"race: .*s[AB]\[|other arrivers: .*empty|lapped: .*empty",
    "more arrivals": r"deadlock: .*empty\[.*lacks 1 arrivals",
}


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randint(-3, 4, (n, 320), generator=generator).bfloat16() for n in (128, 32))
    return a, b


@cache
def kernels() -> dict[str, Any]:
    """All of them, their texts compiled together."""
    made = {name: faulty.compile(*factors(), target=TARGET, fault=name) for name in ("", *FAULTS)}
    for kernel, built in zip(made.values(), emulator.build_emulated([x.code for x in made.values()]), strict=True):
        kernel.__dict__["_emulated"] = built
    return made


@needs_compiler
def test_the_program_without_a_fault() -> None:
    a, b = factors()
    assert torch.equal(kernels()[""].emulate(a, b), (a.float() @ b.float().T).bfloat16())


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_emulator_reports(name: str) -> None:
    with pytest.raises(tc.InternalError, match=FAULTS[name]) as found:
        kernels()[name].emulate(*factors())
    assert "line" in str(found.value)


# --- what the builder refuses ------------------------------------------------------------------------------------


def misuse(name: str) -> Any:
    """A kernel whose function does something wrong."""

    def body(k: Any, C: Any, A: Any) -> None:
        every = k.threads(384).tile(128)
        load, math = every.split(1, 2)
        (m, n) = k.blocks(C.tile(128, 64))
        tile, full = k.shared("s", (2, 128, 64), t.bf16), k.barriers("full", 2, 1)
        acc = k.accumulator("acc", (128, 64), A, A, by=math)
        source = A.tile(128, 64)[m, 0]
        match name:
            case "expect by all":
                k.expect(full[0], tile[0])
            case "copy by all":
                k.move(tile[0], source, done=full[0])
            case "part of a warpgroup":
                with k.role(k.threads(384).tile(64).split(1, 5)[0]):
                    pass
            case "no threads":
                with k.role(5):
                    pass
            case "overlapping roles":
                with k.role(load):
                    k.arrive(full[0])
                with k.role(every):
                    k.arrive(full[0])
            case "too many registers":
                with k.role(load, registers=40):
                    k.arrive(full[0])
                with k.role(math, registers=240):
                    k.arrive(full[0])
            case "odd registers":
                with k.role(load, registers=41):
                    pass
            case "registers of one role":
                with k.role(load, registers=40):
                    k.arrive(full[0])
                with k.role(math):
                    k.arrive(full[0])
            case "barriers in a role":
                with k.role(load):
                    k.barriers("b", 1, 1)
            case "roles in roles":
                with k.role(load), k.role(math):
                    pass
            case "barrier of the block in a role":
                with k.role(load):
                    k.sync()
            case "release outside of steps":
                with k.role(math):
                    steps = list(k.steps(4, 2))
                    k.release(full, steps[0])
            case "release of other stages":
                with k.role(math):
                    for i in k.steps(4, 3):
                        k.release(full, i)
            case "no barrier":
                k.wait(5, 0)
            case "phase":
                k.wait(full[0], 0.5)
            case "other phase":
                for i in k.steps(4, 2):
                    k.wait(full[0], i.phase ^ 2)
            case "barrier beyond":
                k.wait(full[2], 0)
            case "left loop":
                for _ in k.steps(4, 2):
                    break
            case "ended tile":
                with k.role(math):
                    x = k.init(k.accumulator("x", (128, 64), A, A, by=math), 0)
                with k.role(math):
                    k.move(C.tile(128, 64)[m, n], x)
            case "sums not begun":
                k.matmul(acc, tile[0], tile[1].tile(64, 64)[0, 0], by=math)
            case "row not set":
                k.map(lambda x, y: x + y, k.init(acc, 0), acc.row("r"))
            case "sums of half a role":
                k.accumulator("x", (96, 64), A, A, by=math)
            case "factor in global memory":
                k.matmul(k.init(acc, 0), source, source, by=math)
            case "bytes across":
                sums, q = k.accumulator("x", (128, 64), *[k.shared("p", (128, 64), INT8)] * 2, by=math), (64, 128)
                k.matmul(k.init(sums, 0), k.shared("q", q, INT8).T, k.shared("r", (64, 64), INT8), by=math)
            case "left factor elsewhere":
                other = k.init(k.accumulator("x", (128, 64), A, A, by=math), 0)
                k.matmul(k.init(acc, 0), other, tile[0], by=math)
            case "ring without a role":
                k.ring(4, 2, lambda s, j: None, lambda s, j: None, load=every)
            case "condition":
                if m < 3:
                    pass
            case "ring between roles":
                k.ring(4, 2, lambda s, j: None, lambda s, j: None, load=every.split(1, 1, 1)[1])
            case "axis of positions":
                acc.positions(2)
            case "persistent twice":
                for _ in k.each(C.tile(128, 64), persistent=True):
                    pass

    return tc.tile_kernel("C:[M,K].bf16 <- A:[M,K].bf16")(body)


MISUSES = {
    "expect by all": "all threads would expect the same bytes",
    "copy by all": "all threads would begin the same copy",
    "part of a warpgroup": "a role is whole warpgroups",
    "no threads": "a role is whole warpgroups",
    "overlapping roles": "roles overlap",
    "too many registers": "roles ask for 66,560 of 65,536 registers",
    "odd registers": "a role cannot have so many registers",
    "registers of one role": "some warpgroups have registers= and others not",
    "barriers in a role": "are made in a role",
    "roles in roles": "a role inside of a role",
    "barrier of the block in a role": "not all threads of the block come here",
    "release outside of steps": "stages are released by the steps of a loop",
    "release of other stages": "cannot release full",
    "no barrier": "this is no barrier",
    "phase": "phases are counted by whole numbers",
    "other phase": "a phase is 0 or 1",
    "barrier beyond": r"there is no full\[2\]",
    "left loop": "the body of k.steps is left",
    "ended tile": "ended with the loop, branch or role",
    "sums not begun": "%acc.* is read before it is set",
    "row not set": "nothing made %r",
    "sums of half a role": "cannot divide sums of 96 x 64",
    "factor in global memory": "no rule decomposes",
    "bytes across": "bytes that lie along K",
    "left factor elsewhere": "factors of one type, fp16 or bf16",
    "ring without a role": "a ring is loaded by a warpgroup",
    "condition": "an index has no value before the run",
    "ring between roles": "the role that loads is between others",
    "axis of positions": "has no axis 2",
    "persistent twice": "blocks are mapped already",
}


@pytest.mark.parametrize("name", MISUSES)
def test_the_builder_refuses(name: str) -> None:
    with pytest.raises(tc.ArgumentError, match=MISUSES[name]):
        misuse(name).compile(torch.empty(128, 64, dtype=torch.bfloat16), target=TARGET)
