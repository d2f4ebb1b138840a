"""LLVM assembly to object code, and object code to functions of this process."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm

from ...core.errors import InternalError
from ...target import CpuTarget
from . import host_symbols
from .host import unused_features

_ENTRY = "tc_entry"
_Entry = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class ObjectCode:
    """A module as machine code that is not loaded yet: the bytes, and the vector math functions that they call."""

    data: bytes
    symbols: tuple[str, ...]


class Executable:
    """A loaded module: callable on raw addresses from any thread; its code is freed with the last reference.

    Attributes:
        address: the address of `i64 tc_entry(ptr arguments)`, see `codegen.llvm.llvm_printer`.
        function: that entry as a ctypes function; releases the GIL while it runs.
    """

    def __init__(self, engine: llvm.ExecutionEngine) -> None:
        self._engine = engine
        self.address: int = engine.get_function_address(_ENTRY)
        self.function = _Entry(self.address)

    def __call__(self, addresses: Sequence[int]) -> tuple[int, int]:
        """Run on the addresses of arguments and temporaries; return (0, 0), or the failed site + 1 and its value."""
        status = (ctypes.c_int64 * 2)()
        slots = (ctypes.c_void_p * (len(addresses) + 1))(*addresses, ctypes.addressof(status))
        code = self.function(ctypes.addressof(slots))
        return (code, status[1]) if code else (0, 0)


def codegen_flags() -> dict[str, str]:
    """The facts that machine code depends on besides its text and its target."""
    return {"llvm": ".".join(map(str, llvm.llvm_version_info)), "system": llvm.get_default_triple()}


def assemble(text: str, target: CpuTarget) -> ObjectCode:
    """Compile LLVM assembly, as `codegen.llvm.emit` prints it for `target`."""
    host_symbols.link_host_symbols()
    module = _optimize_module(text, target)
    return ObjectCode(_make_target_machine(target).emit_object(module), _vector_symbols(module))


def _vector_symbols(module: llvm.ModuleRef) -> tuple[str, ...]:
    """The vector math functions that a module calls."""
    known = set(host_symbols.vector_functions().values())
    return tuple(sorted(f.name for f in module.functions if f.is_declaration and f.name in known))


def load_object(code: ObjectCode) -> Executable:
    """Load object code into this process. It is trusted: damaged bytes would end the process.

    Raises CannotLower if this process lacks a function that the code calls.
    """
    host_symbols.link_host_symbols()
    host_symbols.provide_symbols(code.symbols)
    return Executable(host_symbols.load_code(code.data))


def assemble_and_load(text: str, target: CpuTarget) -> Executable:
    """`assemble` and `load_object` in one."""
    return load_object(assemble(text, target))


def host_assembly(text: str, target: CpuTarget) -> str:
    """The machine code of LLVM assembly as text."""
    host_symbols.link_host_symbols()
    return str(_make_target_machine(target).emit_assembly(_optimize_module(text, target)))


def _make_target_machine(target: CpuTarget) -> llvm.TargetMachine:
    native = llvm.Target.from_default_triple()
    # Without it, LLVM takes a processor that it does not know for one of 32 bits, and ends the process.
    wide = "+64bit," if native.name == "x86-64" else ""
    features = wide + unused_features(target) + target.features
    return native.create_target_machine(
        cpu=target.name, features=features, opt=2, reloc="static", codemodel="jitdefault", jit=True
    )


def _optimize_module(text: str, target: CpuTarget) -> llvm.ModuleRef:
    """Parse, verify and run the passes."""
    try:
        module = llvm.parse_assembly(text)
        module.verify()
    except RuntimeError as error:
        raise InternalError(f"LLVM refuses our code: {error}") from error
    passes, builder = _make_pass_pipeline(target)
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    return module


@functools.cache
def _make_pass_pipeline(target: CpuTarget) -> tuple[llvm.FunctionPassManager, llvm.PassBuilder]:
    """The passes that pay: emitted code has no common or loop-invariant values left, and code generation does the rest.

    Cached, because llvmlite never frees a pass manager.
    """
    passes = llvm.create_new_function_pass_manager()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    return passes, llvm.create_pass_builder(_make_target_machine(target), options)


def assemble_and_print(text: str, target: CpuTarget) -> tuple[ObjectCode, str]:
    """`assemble` and `host_assembly` in one: the machine code, and the same as text, from which it is made."""
    host_symbols.link_host_symbols()
    module, machine = _optimize_module(text, target), _make_target_machine(target)
    printed = str(machine.emit_assembly(module))
    llvm.initialize_native_asmparser()
    escaped = printed.replace("\\", "\\5C").replace('"', "\\22").replace("\t", "\\09")
    quoted = "\n".join(f'module asm "{row}"' for row in escaped.split("\n"))
    return ObjectCode(machine.emit_object(llvm.parse_assembly(quoted)), _vector_symbols(module)), printed


def code_sections(data: bytes) -> dict[str, bytes]:
    """The sections of an object file that hold instructions and constants, by name."""
    # Other sections are not read: shared memory of a GPU has a size in the file, and no bytes.
    named = ((_section_name(s), s) for s in llvm.ObjectFileRef.from_data(data).sections())
    return {name: bytes(s.data()) for name, s in named if _is_code_or_constants(name)}


def _section_name(section: Any) -> str:
    name: bytes | str = section.name() or ""
    return name.decode() if isinstance(name, bytes) else name


def _is_code_or_constants(section: str) -> bool:
    return ("text" in section and not section.startswith(".rela")) or "rodata" in section
