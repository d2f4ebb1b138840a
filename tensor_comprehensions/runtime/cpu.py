"""LLVM assembly to machine code in this process."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import llvmlite.binding as llvm

from ..errors import InternalError
from ..target import Target
from . import process

_ENTRY = "tc_entry"
_Entry = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)


class Executable:
    """A loaded module: callable on raw addresses from any thread; its code is freed with the last reference.

    Attributes:
        source: the LLVM assembly it was made from.
        address: of `i64 tc_entry(ptr arguments)`, see `codegen.llvm`.
        function: that entry as a ctypes function; releases the GIL while it runs.
    """

    def __init__(self, source: str, target: Target, engine: llvm.ExecutionEngine) -> None:
        self.source = source
        self._target = target
        self._engine = engine
        self.address: int = engine.get_function_address(_ENTRY)
        self.function = _Entry(self.address)

    def __call__(self, addresses: Sequence[int]) -> tuple[int, int]:
        """Run on the addresses of arguments and temporaries; (0, 0), or the failed site + 1 and its value."""
        status = (ctypes.c_int64 * 2)()
        slots = (ctypes.c_void_p * (len(addresses) + 1))(*addresses, ctypes.addressof(status))
        code = self.function(ctypes.addressof(slots))
        return (code, status[1]) if code else (0, 0)

    @functools.cached_property
    def assembly(self) -> str:
        """The machine code as text."""
        return str(_machine(self._target).emit_assembly(_optimised(self.source, self._target)))


def load(text: str, target: Target) -> Executable:
    """Compile LLVM assembly, as `codegen.llvm.emit` prints it for `target`, into this process."""
    process.link()
    process.mathematics()
    engine = llvm.create_mcjit_compiler(_optimised(text, target), _machine(target))
    engine.finalize_object()
    return Executable(text, target, engine)


def _machine(target: Target) -> llvm.TargetMachine:
    native = llvm.Target.from_default_triple()
    return native.create_target_machine(
        cpu=target.name, features=target.features, opt=2, reloc="static", codemodel="jitdefault", jit=True
    )


def _optimised(text: str, target: Target) -> llvm.ModuleRef:
    """Parse, verify and run the passes."""
    try:
        module = llvm.parse_assembly(text)
        module.verify()
    except RuntimeError as error:
        raise InternalError(f"LLVM refuses what we emitted: {error}") from error
    passes, builder = _pipeline(target)
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    return module


@functools.cache
def _pipeline(target: Target) -> tuple[llvm.FunctionPassManager, llvm.PassBuilder]:
    """The passes that pay: emitted code has no common or loop-invariant values left, and code generation does the rest.

    Kept, because llvmlite never frees a pass manager.
    """
    passes = llvm.create_new_function_pass_manager()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    return passes, llvm.create_pass_builder(_machine(target), options)
