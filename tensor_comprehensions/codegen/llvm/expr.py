"""Expressions of loop programs as LLVM instructions: each becomes an operand in the function being written."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ...core.errors import InternalError
from ...loop_ir.nodes import (  # fmt: skip
    COMPARISONS,
    Binary,
    Broadcast,
    Buffer,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Ramp,
    ReduceLanes,
    Select,
    Shuffle,
    Space,
    Type,
    Unary,
    Var,
)
from ...target import CpuTarget
from . import arithmetic as arithmetic
from . import memory_access, vector_math
from .casts import emit_cast
from .hoisting_builder import HoistingBuilder
from .types import constant_vector, llvm_constant, register_type, scalar_type, vector_type
from .value_ranges import Interval, value_interval

_COMPARE = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}


@dataclass(slots=True)
class Printer:
    """Prints expressions at one point of a function, from values and ranges of variables and addresses of buffers."""

    b: HoistingBuilder
    target: CpuTarget
    symbols: Mapping[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    types: dict[str, Type] = field(default_factory=dict)
    ranges: dict[str, Interval] = field(default_factory=dict)
    pointers: dict[str, str] = field(default_factory=dict)
    registers: dict[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)

    # --- what `memory_access` asks for

    @property
    def has_fast_gather(self) -> bool:
        return self.target.has_fast_gather

    @property
    def has_mask_registers(self) -> bool:
        return self.target.has_mask_registers

    def base(self, buffer: Buffer) -> str:
        return self.pointers[buffer.name]

    def version(self, name: str) -> int:
        """How many writes to a buffer, or to a register slot, the text contains so far."""
        return self.versions.get(name, 0)

    def record_write(self, name: str) -> None:
        self.versions[name] = self.version(name) + 1

    def known_mask(self, e: Expr) -> tuple[bool, ...] | None:
        """The lanes of a mask that is a compile-time constant, else None."""
        match e:
            case Const(value=value, type=type):
                return (bool(value),) * type.lanes
            case Broadcast(operand=Const(value=value), lanes=lanes):
                return (bool(value),) * lanes
            case Binary(op="and", left=left, right=right):
                a, b = self.known_mask(left), self.known_mask(right)
                return None if a is None or b is None else tuple(map(operator.and_, a, b))
            case Binary(op=op) if (form := arithmetic.lane_comparison(e)) and op in _COMPARE:
                test, ramp, bound = form
                limit = bound.operand if isinstance(bound, Broadcast) else bound
                if isinstance(ramp.base, Const) and isinstance(limit, Const):
                    values = [int(ramp.base.value) + ramp.stride * lane for lane in range(ramp.lanes)]
                    return tuple(_COMPARE[test](value, int(limit.value)) for value in values)
        return None

    # --- expressions

    def value(self, e: Expr) -> str:
        """The LLVM operand with the value of `e`; emits the instructions that compute it."""
        match e:
            case Const(value=value, type=type):
                return llvm_constant(value, type)
            case Var(name=name):
                return self.variables[name]
            case Load():
                return self._load(e)
            case Unary(op=op, operand=operand):
                return arithmetic.emit_unary(self.b, op, self.value(operand), e.type)
            case Binary():
                return self._binary(e)
            case Select(condition=condition, then=then, otherwise=otherwise):
                parts = self.value(condition), self.value(then), self.value(otherwise)
                if e.type.lanes > 1 and condition.type.lanes == 1:
                    parts = (arithmetic.emit_broadcast(self.b, parts[0], "i1", e.type.lanes), *parts[1:])
                return arithmetic.emit_select(self.b, *parts, e.type)
            case Cast(operand=operand, dtype=dtype):
                return emit_cast(self.b, self.value(operand), operand.type, dtype, f16c=self._f16c)
            case Call(function=function, arguments=arguments):
                values = [self.value(a) for a in arguments]
                widest, dots = self.target.vector_bits, self.target.has_bf16_dot
                return vector_math.emit_call(self.b, function, values, e.type, self.symbols, widest, dots=dots)
            case Ramp(base=base, stride=stride):
                return arithmetic.emit_ramp(self.b, self.value(base), stride, e.type)
            case Broadcast(operand=operand, lanes=lanes):
                return arithmetic.emit_broadcast(self.b, self.value(operand), scalar_type(operand.type.dtype), lanes)
            case Shuffle(left=left, right=right, lanes=order):
                first, second = self.value(left), self.value(right)
                return arithmetic.emit_shuffle(self.b, first, second, order, scalar_type(e.type.dtype), left.type.lanes)
            case ReduceLanes(op=op, operand=operand):
                return arithmetic.emit_reduce_lanes(self.b, op, self.value(operand), operand.type)
            case _:
                raise arithmetic.unreachable_node(e)

    @property
    def _f16c(self) -> bool:
        """Whether the target converts float16 in hardware: F16C, which every processor with AVX2 has."""
        return self.target.vector_bits >= 256

    def _load(self, e: Load) -> str:
        if e.buffer.space is Space.REGISTER and e.buffer.name not in self.pointers:
            slot = self.registers[(e.buffer.name, memory_access.register_key(e.buffer, e.indices))]
            value = self.load_register(slot, e.buffer)
            if e.mask is None:
                return value
            zero = llvm_constant(0, e.type)
            return arithmetic.emit_select(self.b, self.full_mask(e.mask, e.type.lanes), value, zero, e.type)
        return memory_access.emit_load(self, e.buffer, e.indices, e.mask)

    def load_register(self, slot: str, buffer: Buffer) -> str:
        """The value of a register element."""
        text, version = self._reading_register(slot, buffer)
        return self.b.define(text, (), reads=buffer.name, version=version)

    def store_register(self, slot: str, buffer: Buffer, value: str) -> None:
        """Store `value` to a register element."""
        self.b.emit_side_effect(f"store {register_type(buffer.type)} {value}, ptr {slot}")
        self.record_write(slot)
        text, version = self._reading_register(slot, buffer)
        self.b.remember(text, version, value)

    def _reading_register(self, slot: str, buffer: Buffer) -> tuple[str, int]:
        version = self.version(buffer.name) + self.version(slot)
        return f"load {register_type(buffer.type)}, ptr {slot}", version

    def full_mask(self, mask: Expr, lanes: int) -> str:
        value = self.value(mask)
        return value if mask.type.lanes == lanes else arithmetic.emit_broadcast(self.b, value, "i1", lanes)

    def _binary(self, e: Binary) -> str:
        type = e.left.type
        if type.dtype in (FLOAT16, BFLOAT16) and e.op not in COMPARISONS:
            raise InternalError(f"{e.op} on {type}: 16-bit floats only store")
        if type.dtype in (FLOAT16, BFLOAT16):
            return self._binary(Binary(e.op, Cast(e.left, FLOAT32), Cast(e.right, FLOAT32)))
        if e.op in _COMPARE and (form := arithmetic.lane_comparison(e)):
            value = self._compare_lanes(*form)
            if value is not None:
                return value
        if e.op == "div" and (inverse := arithmetic.exact_inverse(e.right)) is not None:
            return self._binary(Binary("mul", e.left, inverse))
        left, right = self.value(e.left), self.value(e.right)
        if e.op in ("div", "mod") and type.dtype.is_integer:
            known = (value_interval(e.left, self.ranges), value_interval(e.right, self.ranges))
            return arithmetic.emit_divide(self.b, e.op, left, right, type, known)
        if e.op in ("min", "max") and type.dtype.is_float and arithmetic.is_non_nan_literal(e.right):
            left, right = right, left
            return arithmetic.emit_binary(self.b, e.op, left, right, type, keep_nan=False)
        keep_nan = not arithmetic.is_non_nan_literal(e.left)
        return arithmetic.emit_binary(self.b, e.op, left, right, type, keep_nan=keep_nan)

    def _compare_lanes(self, op: str, ramp: Ramp, bound: Expr) -> str | None:
        """`base + lane op bound` as `lane op bound - base`, clamped to fit 32-bit lanes; None for another form."""
        if isinstance(bound, Broadcast):
            limit = self.value(bound.operand)
        elif isinstance(bound, Const):
            limit = llvm_constant(bound.value, Type(bound.type.dtype))
        else:
            return None
        if ramp.stride != 1:
            return None
        b, lanes = self.b, ramp.lanes
        base = self.value(ramp.base)
        room = b.define(f"sub i64 {limit}, {base}", (limit, base))
        if 64 * lanes <= self.target.vector_bits:  # 64-bit lanes fit one register: no clamp needed
            wide = arithmetic.emit_broadcast(b, room, "i64", lanes)
            numbers = constant_vector(range(lanes), "i64")
            return b.define(f"icmp s{op} {vector_type('i64', lanes)} {numbers}, {wide}", (wide,))
        for name, end in (("smax", "-1"), ("smin", str(lanes))):
            b.declare(f"i64 @llvm.{name}.i64(i64, i64)")
            room = b.define(f"call i64 @llvm.{name}.i64(i64 {room}, i64 {end})", (room,))
        short = b.define(f"trunc i64 {room} to i32", (room,))
        wide = arithmetic.emit_broadcast(b, short, "i32", lanes)
        numbers = constant_vector(range(lanes), "i32")
        return b.define(f"icmp s{op} {vector_type('i32', lanes)} {numbers}, {wide}", (wide,))
