"""C++ for the emulator: a table and a function for each atom that a kernel's source calls."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...codegen.gpu.ptx import ATOM_CALLS
from ...core.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, INT8, INT32, UINT8, UINT16
from ...loop_ir.atoms import ATOMS, MATMUL, TFLOAT32, WARPGROUP, AtomOperand
from ...loop_ir.intrinsics import INTRINSICS
from ...loop_ir.nodes import Space

_FORMATS = {
    FLOAT16: "HALF", BFLOAT16: "BFLOAT", TFLOAT32: "TENSOR_FLOAT", FLOAT32: "FLOAT", FLOAT64: "DOUBLE",
    INT8: "BYTE", UINT8: "UNSIGNED_BYTE", INT32: "INTEGER", UINT16: "BITS",
}  # fmt: skip


def atom_functions(source: str) -> str:
    """The definitions of the atoms that `source` names."""
    words = set(re.findall(r"[A-Za-z_]\w*", source))
    return "".join(f"{line}\n" for name in ATOM_CALLS if name in words for line in _emit_atom_function(name))


def _emit_atom_function(name: str) -> Iterator[str]:
    known, atom = INTRINSICS[name], ATOMS[INTRINSICS[name].atom]
    operands = ", ".join(map(_emit_operand, atom.operands))
    row = f"machine_row_{name}"
    if atom.group == WARPGROUP:
        registers = 1 in known.registers
        left, given = ("const unsigned *a", "a, 0") if registers else ("unsigned long long a", "nullptr, a")
        lanes = f"{atom.threads.size}, {_emit_modes(atom.threads.flat, 2)}"
        taken = f"void *c, {left}, unsigned long long b, unsigned more, int line = __builtin_LINE()"
        yield f"static const MachineProduct {row} = {{{operands}, {lanes}}};"
        yield f"inline void {name}({taken}) {{"
        yield f"    machine_group_product(&{row}, c, {given}, b, more, {sum(known.across)}, line);"
    elif atom.kind == MATMUL:
        lanes = f"{atom.threads.size}, {_emit_modes(atom.threads.flat, 2)}"
        yield f"static const MachineProduct {row} = {{{operands}, {lanes}}};"
        yield f"inline void {atom.name}(void *c, const void *a, const void *b, int line = __builtin_LINE()) {{"
        yield f"    machine_product(&{row}, c, a, b, line);"
    elif atom.operands[0].space is Space.SHARED:
        yield f"static const MachineMove {row} = {{{operands}}};"
        yield f"inline void {atom.name}(void *to, const unsigned *from, int line = __builtin_LINE()) {{"
        yield f"    machine_matrix_store(&{row}, to, from, line);"
    else:
        in_memory = atom.operands[1].space is Space.SHARED
        source = "const void *from" if in_memory else "unsigned from"
        yield f"static const MachineMove {row} = {{{operands}}};"
        yield f"inline void {atom.name}(unsigned *to, {source}, int line = __builtin_LINE()) {{"
        yield f"    machine_{'matrices' if in_memory else 'transposition'}(&{row}, to, from, line);"
    yield "}"


def _emit_operand(o: AtomOperand) -> str:
    if o.layout is None:  # in shared memory, given by a descriptor
        nothing = _emit_modes((), 3)
        return f"{{{_FORMATS[o.dtype]}, {o.dtype.bits}, {o.rows}, {o.columns}, 0, {nothing}, {nothing}}}"
    threads, values = (_emit_modes(mode.flat, 3) for mode in o.layout.modes)
    numbers = ", ".join(map(str, (_FORMATS[o.dtype], o.dtype.bits, o.rows, o.columns, o.registers)))
    return f"{{{numbers}, {threads}, {values}}}"


def _emit_modes(flat: tuple[tuple[int, int], ...], count: int) -> str:
    """(size, stride) of each mode, padded with trivial modes to a fixed number."""
    parts = (*flat, *[(1, 0)] * (count - len(flat)))
    return f"{{{', '.join(f'{{{size}, {stride}}}' for size, stride in parts)}}}"
