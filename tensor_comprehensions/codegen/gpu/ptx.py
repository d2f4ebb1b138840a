"""PTX statements, each wrapped in a device function that the CUDA text calls.

A statement names its operands `$name`; their declarations say how many registers each takes. Statements of atoms are
generated from the table of atoms; the others are listed here, each with the first architecture that has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from ...core.dtypes import FLOAT32, FLOAT64, INT32, DType
from ...loop_ir.atoms import ATOMS, HOPPER, MATMUL, Atom, AtomOperand
from ...loop_ir.intrinsics import (
    BARRIER_ARRIVE,
    BARRIER_ARRIVE_CLUSTER,
    BARRIER_EXPECT,
    BARRIER_INIT,
    BARRIER_WAIT,
    BULK_COMMIT,
    BULK_WAIT,
    CLUSTER_BARRIER,
    ELECT,
    FENCE_ASYNC,
    FENCE_BARRIER_INIT,
    GROUP_SUFFIXES,
    INTRINSICS,
    REGISTERS_DEC,
    REGISTERS_INC,
    TMA_LOADS,
    TMA_MULTICASTS,
    TMA_STORES,
    WGMMA_COMMIT,
    WGMMA_FENCE,
    WGMMA_WAIT,
    Intrinsic,
)
from ...loop_ir.nodes import Space

KNOWN = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
"""The architectures that the table distinguishes."""
GUARD = "TC_MACHINE"
"""The macro that is defined where the device functions are implemented otherwise: in the CPU emulator."""

_CONSTRAINTS = {
    "h": "unsigned short", "r": "unsigned int", "i": "int", "l": "unsigned long long", "f": "float", "d": "double",
    "s": "void", "g": "void", "p": "void", "n": "int",
}  # fmt: skip
"""The C type of an operand by its letter. Beyond those of inline assembly, s is an address in shared memory, g one in
global memory, p a generic one, and n a constant."""


@dataclass(frozen=True, slots=True)
class PtxOperand:
    """An operand of a statement.

    mode: "=" for written, "+" for read and written, "" for read. letter: a key of `_CONSTRAINTS`. count: the registers
    of a vector; 0 for a scalar.
    """

    name: str
    mode: str
    letter: str
    count: int

    @property
    def is_address(self) -> bool:
        return self.letter in "sgp"

    @property
    def declaration(self) -> str:
        """The parameter declaration: vectors and outputs are passed by address."""
        spelling = _CONSTRAINTS[self.letter]
        if self.is_address:
            return f"const void *{self.name}"
        if self.mode or self.count:
            return f"{'' if self.mode else 'const '}{spelling} *{self.name}"
        return f"{spelling} {self.name}"

    def values(self) -> list[str]:
        """The C expression of each of its registers in the device function."""
        match self.letter:
            case "s":
                return [f"(unsigned int)__cvta_generic_to_shared({self.name})"]
            case "g":
                return [f"__cvta_generic_to_global({self.name})"]
        if self.count:
            return [f"{self.name}[{n}]" for n in range(self.count)]
        return [f"*{self.name}" if self.mode else self.name]

    @property
    def constraint(self) -> str:
        return f"{self.mode}{ {'s': 'r', 'g': 'l', 'p': 'l', 'i': 'r'}.get(self.letter, self.letter) }"


@dataclass(frozen=True, slots=True)
class Statement:
    """A PTX statement and its operands.

    Attributes:
        name: the name of the device function.
        text: the PTX, with `$name` for operands.
        parameters: the operands, in the order of the function's parameters.
        architectures: the members of `KNOWN` whose assembler accepts it.
    """

    name: str
    text: str
    parameters: tuple[PtxOperand, ...]
    architectures: tuple[str, ...]

    @property
    def constants(self) -> tuple[PtxOperand, ...]:
        """The operands that must be compile-time constants; they become template parameters."""
        return tuple(p for p in self.parameters if p.letter == "n")

    def number_registers(self, constants: Mapping[str, int] | None = None) -> str:
        """The statement with registers numbered `%0`, `%1`, ..., and with operands in `constants` as their values."""
        found = {name: str(value) for name, value in (constants or {}).items()}
        position = 0
        for p in self.parameters:
            if p.name in found:
                continue
            numbers = [f"%{position + n}" for n in range(max(1, p.count))]
            found[p.name] = f"{{{','.join(numbers)}}}" if p.count else numbers[0]
            position += len(numbers)
        return re.sub(r"\$(\w+)", lambda m: found[m[1]], self.text)

    def function(self) -> str:
        """The definition of the device function."""
        taken = ", ".join(p.declaration for p in self.parameters if p.letter != "n")
        outputs = [f'"{p.constraint}"({v})' for p in self.parameters if p.mode for v in p.values()]
        inputs = [f'"{p.constraint}"({v})' for p in self.parameters if not p.mode for v in p.values()]
        body = [f'    asm volatile("{self.number_registers()}"']
        parts = [", ".join(outputs), ", ".join(inputs), '"memory"' if self.touches_memory else ""]
        while parts and not parts[-1]:
            parts.pop()
        body += [f"        : {part}".rstrip() for part in parts]
        body[-1] += ");"
        constants = ", ".join(f"int {p.name}" for p in self.constants)
        head = [f"template <{constants}>"] if constants else []
        return "\n".join([*head, f"__device__ __forceinline__ void {self.name}({taken}) {{", *body, "}"])

    @property
    def touches_memory(self) -> bool:
        """Whether compilers must not reorder memory accesses across it (a "memory" clobber)."""
        return any(p.is_address for p in self.parameters) or not any(p.mode for p in self.parameters)


@cache
def architectures_since(first: str) -> tuple[str, ...]:
    """The architectures in `KNOWN` from `first` on; for `sm_90a` only itself: later ones lack its instructions."""
    if first == "sm_90a":
        return HOPPER
    return tuple(a for a in KNOWN if int(a[3:].rstrip("a")) >= int(first[3:]))


_DECLARATION = re.compile(r"([=+]?)([a-z])(\d*) (\w+)")


def make_ptx_statement(name: str, first: str, text: str, declared: str = "") -> Statement:
    """A statement. declared: such as "=r d, f x, r4 v, s to": mode, letter, registers and name of each operand."""
    return Statement(name, text, _parse_operands(declared), architectures_since(first))


@cache
def _parse_operands(declared: str) -> tuple[PtxOperand, ...]:
    found = [_DECLARATION.fullmatch(d) for d in declared.split(", ") if d]
    parameters = tuple(PtxOperand(m[4], m[1], m[2], int(m[3] or 0)) for m in found if m is not None)
    assert len(parameters) == len(found), declared
    return parameters


# --- atoms -------------------------------------------------------------------------------------------------------


def _get_constraint_letter(dtype: DType) -> str:
    """The constraint letter of an operand's registers: that of the dtype for accumulators, "r" for packed elements."""
    return {FLOAT32: "f", INT32: "i", FLOAT64: "d"}.get(dtype, "r")


def _declare_vector_operand(name: str, operand: AtomOperand, mode: str = "") -> str:
    return f"{mode}{_get_constraint_letter(operand.dtype)}{operand.registers} {name}"


def _make_mma_statement(atom: Atom, first: str) -> Statement:
    total, a, b = atom.operands
    declared = ", ".join(
        (_declare_vector_operand("c", total, "+"), _declare_vector_operand("a", a), _declare_vector_operand("b", b))
    )
    return make_ptx_statement(atom.name, first, f"{atom.opcode} $c, $a, $b, $c;", declared)


def _group_products(atom: Atom) -> Iterator[Statement]:
    """The `wgmma` variants of `atom`, with A in shared memory or in registers. With `more` = 0, sums start from 0."""
    total, a, b = atom.operands
    majors = 2 if b.dtype.bits == 16 else 0  # only 16-bit types may choose: 0 is K-major, 1 is MN-major
    signs = "" if total.dtype == INT32 else ", 1, 1"
    sums = _declare_vector_operand("c", total, "+")
    head = "{.reg .pred p; setp.ne.b32 p, $more, 0; " + atom.opcode
    for suffix, across in GROUP_SUFFIXES.items() if majors else (("", ()),):
        major_a, major_b = (f", {int(n in across)}" if majors else "" for n in (1, 2))
        text = f"{head} $c, $a, $b, p{signs}{major_a}{major_b};}}"
        yield make_ptx_statement(f"{atom.name}{suffix}", "sm_90a", text, f"{sums}, l a, l b, r more")
        if 1 in across:
            continue
        text = f"{head} $c, $a, $b, p{signs}{major_b};}}"
        yield make_ptx_statement(
            f"{atom.name}_registers{suffix}", "sm_90a", text, f"{sums}, r{a.registers} a, l b, r more"
        )


def _matrix_move(atom: Atom) -> Statement:
    count = max(o.registers for o in atom.operands)
    if atom.opcode.startswith("ldmatrix"):
        return make_ptx_statement(atom.name, "sm_75", f"{atom.opcode} $to, [$from];", f"=r{count} to, s from")
    return make_ptx_statement(atom.name, "sm_90", f"{atom.opcode} [$to], $from;", f"s to, r{count} from")


def _make_atom_statements() -> Iterator[Statement]:
    for atom in ATOMS.values():
        if atom.kind == MATMUL and atom.threads.size == 128:
            yield from _group_products(atom)
        elif atom.kind == MATMUL:
            later = {"sm_75": "sm_75", "sm_89": "sm_89"}.get(atom.architectures[0], "sm_80")
            yield _make_mma_statement(atom, later)
        elif "matrix.sync.aligned.m8n8.x" in atom.opcode:
            yield _matrix_move(atom)
        elif atom.name == "movmatrix_trans":
            yield make_ptx_statement(atom.name, "sm_75", f"{atom.opcode} $to, $from;", "=r to, r from")
        elif atom.name.startswith("copy_async"):
            zero = atom.name.startswith("copy_async_zero")  # it copies `bytes` bytes and fills the rest with zeros
            text = f"{atom.opcode} [$to], [$from], {atom.alignment}{', $bytes' if zero else ''};"
            yield make_ptx_statement(atom.name, "sm_80", text, "s to, g from, r bytes" if zero else "s to, g from")
        else:
            yield _thread_move(atom)


def _thread_move(atom: Atom) -> Statement:
    to, source = atom.operands
    loads = to.space is Space.REGISTER
    letter = "s" if Space.SHARED in (to.space, source.space) else "g"
    registers = {16: "r4", 8: "r2", 4: "r", 2: "h"}[atom.alignment]
    if loads:
        return make_ptx_statement(atom.name, "sm_75", f"{atom.opcode} $to, [$from];", f"={registers} to, {letter} from")
    return make_ptx_statement(atom.name, "sm_75", f"{atom.opcode} [$to], $from;", f"{letter} to, {registers} from")


# --- other statements --------------------------------------------------------------------------------------------


def _register_rows() -> Iterator[Statement]:
    """Statements whose operands are all registers, from rows: name, first architecture, opcode, result, operands."""
    unary, binary, ternary = ("$d, $x", "$d, $x, $y", "$d, $x, $y, $z")
    for name, first, opcode, operands, result, letter in (
        *((f"{op}_float32", "sm_75", f"{op}.f32", binary, "f", "f") for op in ("add", "sub", "mul", "min", "max")),
        ("max3_float32", "sm_100", "max.f32", ternary, "f", "f"),
        ("fma_float32", "sm_75", "fma.rn.f32", ternary, "f", "f"),
        ("fma_f16x2", "sm_75", "fma.rn.f16x2", ternary, "r", "r"),
        ("fma_relu_f16x2", "sm_80", "fma.rn.relu.f16x2", ternary, "r", "r"),
        ("fma_bf16x2", "sm_80", "fma.rn.bf16x2", ternary, "r", "r"),
        ("add_f16x2", "sm_75", "add.f16x2", binary, "r", "r"),
        ("mul_f16x2", "sm_75", "mul.f16x2", binary, "r", "r"),
        ("max_f16x2", "sm_80", "max.f16x2", binary, "r", "r"),
        ("max_bf16x2", "sm_80", "max.bf16x2", binary, "r", "r"),
        ("add_bf16x2", "sm_90", "add.rn.bf16x2", binary, "r", "r"),
        ("exp2_approx", "sm_75", "ex2.approx.ftz.f32", unary, "f", "f"),
        *(
            (f"{name}_approx", "sm_75", f"{op}.approx.f32", unary, "f", "f")
            for name, op in (
                ("log2", "lg2"),
                ("reciprocal", "rcp"),
                *((n, n) for n in ("rsqrt", "sqrt", "tanh", "sin")),
            )
        ),
        ("exp2_f16x2", "sm_75", "ex2.approx.f16x2", unary, "r", "r"),
        ("exp2_bf16x2", "sm_90", "ex2.approx.ftz.bf16x2", unary, "r", "r"),
        ("tanh_f16x2", "sm_75", "tanh.approx.f16x2", unary, "r", "r"),
        ("tanh_bf16x2", "sm_90", "tanh.approx.bf16x2", unary, "r", "r"),
        *(
            (f"pack_{relu}{t}", "sm_80", f"cvt.rn.{'relu.' if relu else ''}{t}.f32", binary, "r", "f")
            for t in ("f16x2", "bf16x2")
            for relu in ("", "relu_")
        ),
        ("round_tf32", "sm_80", "cvt.rna.tf32.f32", unary, "r", "f"),
        ("pack_e4m3x2", "sm_89", "cvt.rn.satfinite.e4m3x2.f32", binary, "h", "f"),
        ("unpack_e4m3x2", "sm_89", "cvt.rn.f16x2.e4m3x2", unary, "r", "h"),
    ):
        inputs = [f"{letter} {n}" for n in "xyz"[: operands.count("$") - 1]]
        yield make_ptx_statement(name, first, f"{opcode} {operands};", ", ".join((f"={result} d", *inputs)))


def _make_access_statements() -> Iterator[Statement]:
    """Loads and stores that are not atoms, and reductions in global memory."""
    for space, letter in (("global", "g"), ("shared", "s")):
        yield make_ptx_statement(f"load_{space}_u64", "sm_75", f"ld.{space}.u64 $to, [$from];", f"=l to, {letter} from")
        yield make_ptx_statement(f"store_{space}_u64", "sm_75", f"st.{space}.u64 [$to], $from;", f"{letter} to, l from")
    for name, how in (("cached", "nc"), ("streaming", "nc.L1::no_allocate.L2::128B")):
        yield make_ptx_statement(f"load_{name}_16", "sm_75", f"ld.global.{how}.v4.u32 $to, [$from];", "=r4 to, g from")
    zeros = " ".join(f"mov.u32 %{n},0;" for n in range(4))
    text = f"{{.reg .pred p; setp.ne.u32 p, $inside, 0; {zeros} @p ld.global.v4.u32 $to, [$from];}}"
    yield make_ptx_statement("load_inside_16", "sm_75", text, "=r4 to, g from, r inside")
    yield make_ptx_statement(
        "copy_async_near_16", "sm_80", "cp.async.ca.shared.global [$to], [$from], 16;", "s to, g from"
    )
    yield make_ptx_statement("add_global_float32", "sm_75", "red.global.add.f32 [$to], $x;", "g to, f x")
    yield make_ptx_statement("add_global_f16x2", "sm_75", "red.global.add.noftz.f16x2 [$to], $x;", "g to, r x")
    yield make_ptx_statement("add_global_4_float32", "sm_90", "red.global.add.v4.f32 [$to], $x;", "g to, f4 x")


def _exchange_rows() -> Iterator[Statement]:
    """Shuffles and warp reductions, barriers, and waits for asynchronous copies."""
    for name, mode, clamp in (("xor", "bfly", 31), ("down", "down", 31), ("up", "up", 0), ("index", "idx", 31)):
        text = f"shfl.sync.{mode}.b32 $d, $x, $lane, {clamp}, 0xffffffff;"
        yield make_ptx_statement(f"shuffle_{name}_all", "sm_75", text, "=r d, r x, r lane")
    # `segments` is shfl's operand c: the segment mask in bits 8 to 12, and the last lane of a segment in bits 0 to 4.
    text = "shfl.sync.{}.b32 $d, $x, {}, $segments, 0xffffffff;"
    yield make_ptx_statement("shuffle_xor_part", "sm_75", text.format("bfly", "$mask"), "=r d, r x, n mask, n segments")
    yield make_ptx_statement(
        "shuffle_index_part", "sm_75", text.format("idx", "$lane"), "=r d, r x, r lane, n segments"
    )
    for op in ("add.s32", "max.u32"):
        text = f"redux.sync.{op} $d, $x, 0xffffffff;"
        yield make_ptx_statement(f"reduce_lanes_{op.replace('.', '_')}", "sm_80", text, "=r d, r x")
    yield make_ptx_statement("barrier_block", "sm_75", "bar.sync 0;")
    yield make_ptx_statement("barrier_part", "sm_75", "bar.sync $number, $threads;", "n number, n threads")
    yield make_ptx_statement("barrier_part_arrive", "sm_75", "bar.arrive $number, $threads;", "n number, n threads")
    yield make_ptx_statement("barrier_warp", "sm_75", "bar.warp.sync 0xffffffff;")
    yield make_ptx_statement("copy_async_commit", "sm_80", "cp.async.commit_group;")
    yield make_ptx_statement("copy_async_wait", "sm_80", "cp.async.wait_group $groups;", "n groups")
    yield make_ptx_statement("copy_async_wait_all", "sm_80", "cp.async.wait_all;")
    text = "mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16 $c, $a, $b, $c;"
    yield make_ptx_statement("mma_m8n8k4_row_col_f16", "sm_75", text, "+r4 c, r2 a, r2 b")


def _hopper() -> Iterator[Statement]:
    """Statements of Hopper: mbarriers, TMA copies, clusters, `wgmma` synchronization, register allocation."""
    barrier = "mbarrier.{}.shared::cta.b64"
    yield make_ptx_statement("barrier_init", "sm_80", f"{barrier.format('init')} [$at], $arrivals;", "s at, n arrivals")
    yield make_ptx_statement(
        "barrier_arrive", "sm_80", f"{{.reg .b64 st; {barrier.format('arrive')} st, [$at];}}", "s at"
    )
    yield make_ptx_statement(
        "barrier_expect", "sm_90", f"{barrier.format('arrive.expect_tx')} _, [$at], $bytes;", "s at, r bytes"
    )
    wait = f"{{.reg .pred p; W%=: {barrier.format('try_wait.parity')} p, [$at], $phase; @!p bra W%=;}}"
    yield make_ptx_statement("barrier_wait", "sm_90", wait, "s at, r phase")
    yield make_ptx_statement(
        "copy_async_arrive", "sm_80", "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$at];", "s at"
    )
    remote = "{.reg .b32 q; mapa.shared::cluster.u32 q, $at, 1; "
    arrive = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [q];}"
    yield make_ptx_statement("barrier_arrive_remote", "sm_90", remote + arrive, "s at")
    # Stages are released after `wgmma` has read them, and no block reads what another one stored. So the arrival need
    # not release stores to the cluster, for which the assembler would wait for all of them, with MEMBAR.ALL.GPU.
    chosen = remote.replace("$at, 1", "$at, $block") + "mbarrier.arrive.shared::cluster.b64 _, [q];}"
    yield make_ptx_statement("barrier_arrive_cluster", "sm_90", chosen, "s at, r block")
    store = "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [q], $x, [q];}"
    yield make_ptx_statement("store_async_remote", "sm_90", remote + store, "s at, r x")
    loads = "shared::cluster.global.mbarrier::complete_tx::bytes"
    yield make_ptx_statement(
        "bulk_load", "sm_90", f"cp.async.bulk.{loads} [$to], [$from], $bytes, [$done];", "s to, g from, r bytes, s done"
    )
    for rank in (2, 3, 4, 5):
        at = [f"x{n}" for n in range(rank)]
        place, declared = ",".join(f"${x}" for x in at), ", ".join(f"r {x}" for x in at)
        load = f"cp.async.bulk.tensor.{rank}d.{loads}"
        yield make_ptx_statement(
            f"tma_load_{rank}",
            "sm_90",
            f"{load} [$to], [$map, {{{place}}}], [$done];",
            f"s to, p map, {declared}, s done",
        )
        store = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [$map, {{{place}}}], [$from];"
        yield make_ptx_statement(f"tma_store_{rank}", "sm_90", store, f"p map, {declared}, s from")
        text = f"{load}.multicast::cluster [$to], [$map, {{{place}}}], [$done], $blocks;"
        yield make_ptx_statement(
            f"tma_load_{rank}_multicast", "sm_90", text, f"s to, p map, {declared}, s done, h blocks"
        )
        add = (
            f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.tile.bulk_group [$map, {{{place}}}], [$from];"
        )
        yield make_ptx_statement(f"tma_add_{rank}", "sm_90", add, f"p map, {declared}, s from")
    yield make_ptx_statement("prefetch_tensor_map", "sm_90", "prefetch.tensormap [$map];", "p map")
    yield make_ptx_statement(
        "bulk_commit_and_wait", "sm_90", "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"
    )
    yield make_ptx_statement("bulk_commit", "sm_90", "cp.async.bulk.commit_group;")
    yield make_ptx_statement("bulk_wait", "sm_90", "cp.async.bulk.wait_group.read $groups;", "n groups")
    yield make_ptx_statement("fence_async", "sm_90", "fence.proxy.async.shared::cta;")
    yield make_ptx_statement("fence_barrier_init", "sm_90", "fence.mbarrier_init.release.cluster;")
    yield make_ptx_statement("wgmma_fence", "sm_90a", "wgmma.fence.sync.aligned;")
    yield make_ptx_statement(
        "wgmma_commit_and_wait", "sm_90a", "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    )
    yield make_ptx_statement("wgmma_commit", "sm_90a", "wgmma.commit_group.sync.aligned;")
    yield make_ptx_statement("wgmma_wait", "sm_90a", "wgmma.wait_group.sync.aligned $groups;", "n groups")
    for change in ("dec", "inc"):
        yield make_ptx_statement(
            f"registers_{change}", "sm_90a", f"setmaxnreg.{change}.sync.aligned.u32 $count;", "n count"
        )
    yield make_ptx_statement(
        "cluster_barrier", "sm_90", "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    )
    yield make_ptx_statement(
        "cluster_address", "sm_90", "mapa.shared::cluster.u32 $d, $at, $block;", "=r d, s at, r block"
    )
    yield make_ptx_statement("grid_wait", "sm_90", "griddepcontrol.wait;")
    yield make_ptx_statement("grid_launch", "sm_90", "griddepcontrol.launch_dependents;")
    yield make_ptx_statement("elect", "sm_90", "{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 $d,1,0,p;}", "=r d")


def _make_argument_template(s: Statement, position: int) -> str:
    """The format of a call's argument, given the address of the operand: values are dereferenced."""
    p = s.parameters[position]
    return "{}" if p.mode or p.count or p.is_address else "*{}"


STATEMENTS = {
    s.name: s
    for part in (_make_atom_statements(), _register_rows(), _make_access_statements(), _exchange_rows(), _hopper())
    for s in part
}
"""All statements by name."""


def _atom_call(i: Intrinsic) -> str:
    """The format of a call of an atom, from the addresses (or descriptors) of its operands and its values."""
    s = STATEMENTS[i.name]
    parts = ["{}" if n in i.described else _make_argument_template(s, n) for n in range(i.operands)]
    return f"{i.name}({', '.join([*parts, *('{}' for _ in i.values)])});"


ATOM_CALLS = {i.name: _atom_call(i) for i in INTRINSICS.values() if i.atom}
"""The format of the call of each intrinsic that is an atom."""
HOPPER_CALLS = {
    BARRIER_INIT: "barrier_init<{1}>({0});",
    BARRIER_ARRIVE: "barrier_arrive({});",
    BARRIER_ARRIVE_CLUSTER: "barrier_arrive_cluster({}, {});",
    BARRIER_EXPECT: "barrier_expect({}, {});",
    BARRIER_WAIT: "barrier_wait({}, {});",
    **{name: f"{name}({{0}}, {{1}}, {{2}});" for name in TMA_LOADS},
    **{name: f"{name}({{0}}, {{1}}, {{2}}, {{4}});" for name in TMA_MULTICASTS},
    **{name: f"{name}({{0}}, {{1}});" for name in TMA_STORES},
    **{
        name: f"{name}();"
        for name in (
            FENCE_BARRIER_INIT,
            FENCE_ASYNC,
            BULK_COMMIT,
            WGMMA_FENCE,
            WGMMA_COMMIT,
            CLUSTER_BARRIER,
        )
    },
    **{name: f"{name}<{{}}>();" for name in (BULK_WAIT, WGMMA_WAIT, REGISTERS_DEC, REGISTERS_INC)},
    ELECT: "elect({});",
}
"""The format of the call of each other intrinsic of Hopper. The operand in a mapped tensor prints as the address of the
tensor map followed by the coordinates, the fastest first."""
CALLED = (*ATOM_CALLS, *HOPPER_CALLS, "barrier_part", *(f"copy_async_zero_{size}" for size in (16, 8, 4)))
"""The names of the statements that loop programs may call."""


def needs_accelerated(source: str) -> bool:
    """Whether a text uses instructions that `sm_90a` has but `sm_90` lacks."""
    words = set(re.findall(r"\w+", source))
    return any(s.architectures == HOPPER for name, s in STATEMENTS.items() if name in words)


def architecture_for(source: str, architecture: str) -> str:
    """The architecture to compile `source` for, to run on `architecture`: `sm_90a` instead of `sm_90` if needed."""
    return f"{architecture}a" if architecture == "sm_90" and needs_accelerated(source) else architecture


def definition(name: str) -> str:
    """The definition of the device function `name`, left out where `GUARD` is defined."""
    return f"#ifndef {GUARD}\n{STATEMENTS[name].function()}\n#endif"
