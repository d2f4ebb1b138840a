"""FRAGMENT buffers in AMX tile registers: eight of 16 rows of 64 bytes, configured while any is in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...core.errors import InternalError
from ...loop_ir import build
from ...loop_ir.intrinsics import FRAGMENT_DOT_BFLOAT16, FRAGMENT_LOAD, FRAGMENT_STORE, FRAGMENT_ZERO
from ...loop_ir.nodes import Buffer, Const, Invoke
from ...target import CpuTarget
from . import flat_address
from .hoisting_builder import HoistingBuilder

REGISTERS, ROWS, ROW_BYTES = 8, 16, 64
_CONFIGURATION = "@tc_tile_configuration"

_SPELLING = {FRAGMENT_ZERO: "tilezero", FRAGMENT_DOT_BFLOAT16: "tdpbf16ps"}
_MEMORY = {FRAGMENT_LOAD: "tileloadd64", FRAGMENT_STORE: "tilestored64"}


@dataclass(slots=True)
class TileRegisters:
    """Allocates tile registers to the FRAGMENT buffers in scope. first: the first register of each, by its name."""

    b: HoistingBuilder
    target: CpuTarget
    first: dict[str, int] = field(default_factory=dict)
    used: int = 0

    def allocate(self, buffer: Buffer) -> None:
        count, *matrix = buffer.shape
        if not self.target.has_amx_bf16:
            raise InternalError(f"LLVM: {self.target.name} has no registers for fragments")
        if matrix != [ROWS, ROW_BYTES // buffer.type.dtype.size] or self.used + count > REGISTERS:
            raise InternalError(f"LLVM: no registers for {buffer.name}{list(buffer.shape)} beside {self.used} others")
        if not self.used:
            self._configure()
        self.first[buffer.name] = self.used
        self.used += count

    def free(self, buffer: Buffer) -> None:
        """Free the registers of `buffer`. When none is in use, release the tiles, so that the OS need not save them."""
        del self.first[buffer.name]
        self.used -= buffer.shape[0]
        if not self.used:
            self.b.declare("void @llvm.x86.tilerelease()")
            self.b.emit_side_effect("call void @llvm.x86.tilerelease()")

    def invoke(self, values: flat_address.ValueContext, s: Invoke) -> None:
        """Emit the AMX instruction of an intrinsic on fragments."""
        if s.name in _MEMORY:
            self._move(values, s)
            return
        numbers = [f"i8 {self._number(view)}" for view in s.operands]
        symbol = f"void @llvm.x86.{_SPELLING[s.name]}"
        self.b.declare(f"{symbol}({', '.join(['i8'] * len(numbers))})")
        self.b.emit_side_effect(f"call {symbol}({', '.join(numbers)})")

    def _move(self, values: flat_address.ValueContext, s: Invoke) -> None:
        fragment, (memory, where) = s.operands if s.name == FRAGMENT_LOAD else s.operands[::-1]
        address = flat_address.emit_pointer(values, memory, flat_address.flatten_access(values, memory, where))
        step = values.value(build.mul(build.stride(memory, s.attributes[0]), memory.type.dtype.size))
        symbol = f"void @llvm.x86.{_MEMORY[s.name]}"
        self.b.declare(f"{symbol}(i8, ptr, i64)")
        self.b.emit_side_effect(f"call {symbol}(i8 {self._number(fragment)}, ptr {address}, i64 {step})")

    def _number(self, view: tuple[Buffer, Sequence[object]]) -> int:
        buffer, (index, *_) = view
        if not isinstance(index, Const):
            raise InternalError(f"LLVM: the number of a fragment of {buffer.name} is not constant")
        return self.first[buffer.name] + int(index.value)

    def _configure(self) -> None:
        content = bytearray(64)
        content[0] = 1  # palette 1, the only one defined
        content[16 : 16 + 2 * REGISTERS] = ROW_BYTES.to_bytes(2, "little") * REGISTERS
        content[48 : 48 + REGISTERS] = bytes([ROWS]) * REGISTERS
        text = "".join(f"\\{byte:02X}" for byte in content)
        self.b.declarations.setdefault(f'{_CONFIGURATION} = internal constant [64 x i8] c"{text}", align 64')
        self.b.declare("void @llvm.x86.ldtilecfg(ptr)")
        self.b.emit_side_effect(f"call void @llvm.x86.ldtilecfg(ptr {_CONFIGURATION})")
