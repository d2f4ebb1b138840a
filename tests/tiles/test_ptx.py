"""Statements of PTX: as the data have them, and the assembler takes each on the architectures named and on no other."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tensor_comprehensions.codegen.gpu.ptx import KNOWN, STATEMENTS, PtxOperand, Statement, definition
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir.atoms import ATOMS
from tensor_comprehensions.runtime.cuda import nvrtc

INSTRUCTIONS = json.loads((Path(__file__).parent / "data" / "atoms.json").read_text())["instructions"]
CONSTANTS = {
    "barrier_part": {"number": 1, "threads": 128},
    "barrier_part_arrive": {"number": 1, "threads": 256},
    "copy_async_wait": {"groups": 2},
    "shuffle_xor_part": {"mask": 1, "segments": 0x1C1F},
    "shuffle_index_part": {"segments": 0x1C1F},
    "barrier_init": {"arrivals": 1},
    "bulk_wait": {"groups": 1},
    "wgmma_wait": {"groups": 1},
    "registers_dec": {"count": 40},
    "registers_inc": {"count": 232},
}
TYPES = {"h": "unsigned short", "r": "unsigned int", "i": "int", "l": "unsigned long long", "f": "float", "d": "double"}
ASSEMBLED = [s for s in STATEMENTS.values() if not re.fullmatch(r"wgmma_m64n(?!8k|64k)\d+k.*", s.name)]
"""All but the products of warpgroups of other sizes, which take seconds."""

needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")


def test_statements_are_those_of_the_data() -> None:
    texts: dict[str, Statement] = {}
    for s in STATEMENTS.values():
        text = s.number_registers(CONSTANTS.get(s.name))
        assert text not in texts, s.name
        texts[text] = s
    for expected in INSTRUCTIONS:
        found = texts[expected["ptx"].replace("0x1c1f", str(0x1C1F))]
        assert list(found.architectures) == expected["archs"], expected["name"]


def test_each_atom_has_a_statement_where_it_is_chosen() -> None:
    for atom in ATOMS.values():
        chosen = {a for a in atom.architectures if a != "sm_86"}
        assert chosen <= set(STATEMENTS[atom.name].architectures), atom.name
        assert atom.opcode in STATEMENTS[atom.name].text


def test_a_device_function_reads_like_this() -> None:
    assert definition("ldmatrix_x2") == (
        "#ifndef TC_MACHINE\n"
        "__device__ __forceinline__ void ldmatrix_x2(unsigned int *to, const void *from) {\n"
        '    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"\n'
        '        : "=r"(to[0]), "=r"(to[1])\n'
        '        : "r"((unsigned int)__cvta_generic_to_shared(from))\n'
        '        : "memory");\n'
        "}\n"
        "#endif"
    )
    assert STATEMENTS["barrier_part"].function().startswith("template <int number, int threads>\n")


def kernel_of(s: Statement) -> str:
    """A kernel that calls `s` once, on values from memory, and keeps the results."""
    lines, arguments, results = [], [], []
    for p in s.parameters:
        if p.letter == "s":
            lines.append(f"__shared__ __align__(128) char {p.name}[256];")
        elif p.letter in TYPES:
            lines.append(f"{TYPES[p.letter]} {p.name}[{max(1, p.count)}]; {_copy_text(p, p.name, 'memory')}")
        if p.mode:
            results.append(_copy_text(p, "memory", p.name))
        if p.letter != "n":
            is_value = not (p.mode or p.count or p.is_address)
            arguments.append("memory" if p.letter in "gp" else f"{p.name}[0]" if is_value else p.name)
    values = CONSTANTS.get(s.name, {})
    constants = f"<{', '.join(str(values[p.name]) for p in s.constants)}>" if s.constants else ""
    body = "\n".join([*lines, f"{s.name}{constants}({', '.join(arguments)});", *results])
    head = f'extern "C" __global__ void __launch_bounds__(128, 1) run_{s.name}(char *memory) {{'
    return f"{s.function()}\n{head}\n{body}\n}}"


def _copy_text(p: PtxOperand, to: str, source: str) -> str:
    sides = [f"(({TYPES[p.letter]} *)memory)" if x == "memory" else x for x in (to, source)]
    return f"for (int n = 0; n < {max(1, p.count)}; n++) {sides[0]}[n] = {sides[1]}[n];"


def ptx_of(source: str, architecture: str) -> str:
    """What the compiler gives the assembler."""
    tools, program = nvrtc.find_toolchain(), ctypes.c_void_p()
    library = tools.library
    tools.check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    options = [o.encode() for o in tools.options(architecture.replace("sm", "compute")) if "ptxas" not in o]
    tools.check(library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)))
    size = ctypes.c_size_t()
    tools.check(library.nvrtcGetPTXSize(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    tools.check(library.nvrtcGetPTX(program, text))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return text.value.decode()


def list_refused(statements: Sequence[Statement], architecture: str) -> set[str]:
    """The names of those that the assembler has errors about."""
    source = "\n".join(map(kernel_of, statements))
    try:
        nvrtc.compile_text(source, architecture)
    except InternalError as error:
        numbers = {int(n) for n in re.findall(r"line (\d+); error", str(error))}
    else:
        return set()
    names, current = set(), ""
    for number, line in enumerate(ptx_of(source, architecture).splitlines(), 1):
        if entry := re.search(r"\.entry run_(\w+)", line):
            current = entry[1]
        if number in numbers:
            names.add(current)
    return names


def test_releases_of_stages_do_not_wait_for_stores() -> None:
    """An arrival that releases to the cluster would first wait for all stores of the thread (MEMBAR.ALL.GPU)."""
    assert ".release.cluster" not in STATEMENTS["barrier_arrive_cluster"].text


@needs_nvrtc
@pytest.mark.parametrize("architecture", KNOWN)
def test_the_assembler_takes_what_it_should_and_refuses_the_rest(architecture: str) -> None:
    taken = [s for s in ASSEMBLED if architecture in s.architectures]
    rest = [s for s in ASSEMBLED if architecture not in s.architectures]
    cubin = nvrtc.compile_text("\n".join(map(kernel_of, taken)), architecture)
    assert set(cubin.resources) == {f"run_{s.name}" for s in taken}
    for atom in ATOMS.values():  # others may be calls, which have a stack
        if architecture in atom.architectures and (r := cubin.resources.get(f"run_{atom.name}")) is not None:
            assert (r.local, r.spill_stores) == (0, 0), atom.name
    assert list_refused(rest, architecture) == {s.name for s in rest}
