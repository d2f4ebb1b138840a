"""Faults planted in programs of the tile language: the emulator reports them, or the builder refuses the program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a kernel of three warpgroups, one that loads and two that multiply, for a function to misuse."""

    k: Any
    C: Any
    A: Any
    every: Any
    load: Any
    math: Any
    m: Any
    n: Any
    tile: Any
    full: Any
    acc: Any
    source: Any


Misuse = Callable[[Parts], None]
MISUSES: dict[str, tuple[str, Misuse]] = {}


def expect_refusal(message: str) -> Callable[[Misuse], Misuse]:
    """Add a function to `MISUSES` that the builder refuses with `message`."""

    def add(misuse: Misuse) -> Misuse:
        MISUSES[misuse.__name__.replace("_", " ")] = message, misuse
        return misuse

    return add


def make_kernel(misuse: Misuse) -> Any:
    """A kernel whose function does something wrong."""

    def body(k: Any, C: Any, A: Any) -> None:
        every = k.threads(384).tile(128)
        load, math = every.split(1, 2)
        (m, n) = k.blocks(C.tile(128, 64))
        tile, full = k.shared("s", (2, 128, 64), t.bf16), k.barriers("full", 2, 1)
        acc = k.accumulator("acc", (128, 64), A, A, by=math)
        misuse(Parts(k, C, A, every, load, math, m, n, tile, full, acc, A.tile(128, 64)[m, 0]))

    return tc.tile_kernel("C:[M,K].bf16 <- A:[M,K].bf16")(body)


@expect_refusal("all threads would expect the same bytes")
def expect_by_all(p: Parts) -> None:
    p.k.expect(p.full[0], p.tile[0])


@expect_refusal("all threads would begin the same copy")
def copy_by_all(p: Parts) -> None:
    p.k.move(p.tile[0], p.source, done=p.full[0])


@expect_refusal("a role is whole warpgroups")
def part_of_a_warpgroup(p: Parts) -> None:
    with p.k.role(p.k.threads(384).tile(64).split(1, 5)[0]):
        pass


@expect_refusal("a role is whole warpgroups")
def no_threads(p: Parts) -> None:
    with p.k.role(5):
        pass


@expect_refusal("roles overlap")
def overlapping_roles(p: Parts) -> None:
    with p.k.role(p.load):
        p.k.arrive(p.full[0])
    with p.k.role(p.every):
        p.k.arrive(p.full[0])


@expect_refusal("roles ask for 66,560 of 65,536 registers")
def too_many_registers(p: Parts) -> None:
    with p.k.role(p.load, registers=40):
        p.k.arrive(p.full[0])
    with p.k.role(p.math, registers=240):
        p.k.arrive(p.full[0])


@expect_refusal("a role cannot have so many registers")
def odd_registers(p: Parts) -> None:
    with p.k.role(p.load, registers=41):
        pass


@expect_refusal("some warpgroups have registers= and others not")
def registers_of_one_role(p: Parts) -> None:
    with p.k.role(p.load, registers=40):
        p.k.arrive(p.full[0])
    with p.k.role(p.math):
        p.k.arrive(p.full[0])


@expect_refusal("are made in a role")
def barriers_in_a_role(p: Parts) -> None:
    with p.k.role(p.load):
        p.k.barriers("b", 1, 1)


@expect_refusal("a role inside of a role")
def roles_in_roles(p: Parts) -> None:
    with p.k.role(p.load), p.k.role(p.math):
        pass


@expect_refusal("not all threads of the block come here")
def barrier_of_the_block_in_a_role(p: Parts) -> None:
    with p.k.role(p.load):
        p.k.sync()


@expect_refusal("stages are released by the steps of a loop")
def release_outside_of_steps(p: Parts) -> None:
    with p.k.role(p.math):
        steps = list(p.k.steps(4, 2))
        p.k.release(p.full, steps[0])


@expect_refusal("cannot release full")
def release_of_other_stages(p: Parts) -> None:
    with p.k.role(p.math):
        for i in p.k.steps(4, 3):
            p.k.release(p.full, i)


@expect_refusal("this is no barrier")
def no_barrier(p: Parts) -> None:
    p.k.wait(5, 0)


@expect_refusal("phases are counted by whole numbers")
def phase(p: Parts) -> None:
    p.k.wait(p.full[0], 0.5)


@expect_refusal("a phase is 0 or 1")
def other_phase(p: Parts) -> None:
    for i in p.k.steps(4, 2):
        p.k.wait(p.full[0], i.phase ^ 2)


@expect_refusal(r"there is no full\[2\]")
def barrier_beyond(p: Parts) -> None:
    p.k.wait(p.full[2], 0)


@expect_refusal("the body of k.steps is left")
def left_loop(p: Parts) -> None:
    for _ in p.k.steps(4, 2):
        break


@expect_refusal("ended with the loop, branch or role")
def ended_tile(p: Parts) -> None:
    with p.k.role(p.math):
        x = p.k.init(p.k.accumulator("x", (128, 64), p.A, p.A, by=p.math), 0)
    with p.k.role(p.math):
        p.k.move(p.C.tile(128, 64)[p.m, p.n], x)


@expect_refusal("%acc.* is read before it is set")
def sums_not_begun(p: Parts) -> None:
    p.k.matmul(p.acc, p.tile[0], p.tile[1].tile(64, 64)[0, 0], by=p.math)


@expect_refusal("nothing made %r")
def row_not_set(p: Parts) -> None:
    p.k.map(lambda x, y: x + y, p.k.init(p.acc, 0), p.acc.row("r"))


@expect_refusal("cannot divide sums of 96 x 64")
def sums_of_half_a_role(p: Parts) -> None:
    p.k.accumulator("x", (96, 64), p.A, p.A, by=p.math)


@expect_refusal("no rule decomposes")
def factor_in_global_memory(p: Parts) -> None:
    p.k.matmul(p.k.init(p.acc, 0), p.source, p.source, by=p.math)


@expect_refusal("factors that lie along K, if not of 16 bits")
def bytes_across(p: Parts) -> None:
    sums, q = p.k.accumulator("x", (128, 64), *[p.k.shared("p", (128, 64), INT8)] * 2, by=p.math), (64, 128)
    p.k.matmul(p.k.init(sums, 0), p.k.shared("q", q, INT8).T, p.k.shared("r", (64, 64), INT8), by=p.math)


@expect_refusal("factors of one type, fp16 or bf16")
def left_factor_elsewhere(p: Parts) -> None:
    other = p.k.init(p.k.accumulator("x", (128, 64), p.A, p.A, by=p.math), 0)
    p.k.matmul(p.k.init(p.acc, 0), other, p.tile[0], by=p.math)


@expect_refusal("a ring is loaded by a warpgroup")
def ring_without_a_role(p: Parts) -> None:
    p.k.ring(4, 2, lambda s, j: None, lambda s, j: None, load=p.every)


@expect_refusal("an index has no value before the run")
def condition(p: Parts) -> None:
    if p.m < 3:
        pass


@expect_refusal("the role that loads is between others")
def ring_between_roles(p: Parts) -> None:
    p.k.ring(4, 2, lambda s, j: None, lambda s, j: None, load=p.every.split(1, 1, 1)[1])


@expect_refusal("has no axis 2")
def axis_of_positions(p: Parts) -> None:
    p.acc.positions(2)


@expect_refusal("blocks are mapped already")
def persistent_twice(p: Parts) -> None:
    for _ in p.k.each(p.C.tile(128, 64), persistent=True):
        pass


@pytest.mark.parametrize("name", MISUSES)
def test_the_builder_refuses(name: str) -> None:
    message, misuse = MISUSES[name]
    with pytest.raises(tc.ArgumentError, match=message):
        make_kernel(misuse).compile(torch.empty(128, 64, dtype=torch.bfloat16), target=TARGET)
