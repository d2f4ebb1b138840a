"""Loop programs as LLVM assembly: explicit vectors, one function per kernel and per parallel loop.

The module exports `i64 tc_entry(ptr arguments)`. `arguments` points at the addresses of `Module.arguments`, then of
`Module.temporaries`, then of a status `{i64, i64}`. It runs the kernels in order and returns 0. If a kernel fails, it
returns at once, with the failure in the status: (site + 1, value) for a `Check`, (-1, bytes) if memory ran out, (-2, 0)
if the thread pool failed.
Written buffers overlap no other buffer. The process must provide `tc_parallel_for`, `tc_allocate`, `tc_free` and the
mathematical functions named in `symbols`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from ...core.decisions import Decision, is_recording, note_decision
from ...core.errors import InternalError
from ...core.internal_names import SEPARATOR
from ...loop_ir import build
from ...loop_ir.intrinsics import INTRINSICS, PREFETCH, PREFETCH_LATER
from ...loop_ir.nodes import (  # fmt: skip
    Allocate,
    Block,
    Buffer,
    Check,
    Expr,
    If,
    Invoke,
    Kernel,
    Let,
    Load,
    Loop,
    LoopKind,
    Module,
    Space,
    Stmt,
    Store,
    Type,
    Var,
    While,
    Window,
)
from ...loop_ir.passes.hoist_packing import hoist_packing
from ...target import CpuTarget
from . import arithmetic as arithmetic
from . import flat_address, memory_access
from .captures import Usage, loop_writes, usage_of
from .expr import Printer
from .hoisting_builder import HoistingBuilder
from .tile_registers import TileRegisters
from .types import register_type
from .value_ranges import Interval, loop_interval, trip_count, value_interval

_STACK_BYTES = 16384  # scratch beyond this, per function, is allocated from the heap
_ALIGNMENT = 64
OUT_OF_MEMORY, NO_THREADS = -1, -2

# For each intrinsic, its declaration and the format of its call: addresses of the operands, then the attributes.
_INTRINSICS = {
    name: (
        "void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        f"void @llvm.prefetch.p0(ptr {{}}, i32 {{}}, i32 {near}, i32 1)",
    )
    for name, near in ((PREFETCH, 3), (PREFETCH_LATER, 2))
}


def emit_llvm(module: Module, target: CpuTarget, symbols: Mapping[str, str]) -> str:
    """The LLVM assembly of `module` for `target`; the same arguments give the same text.

    `symbols` maps each `vector_math.function_key`, such as `exp.float32x16`, to the C function on that vector type.
    The module must not contain VECTOR or UNROLLED loops.
    """
    return ModuleWriter(module, target, symbols).write()


class ModuleWriter:
    """Collects the functions and declarations of a module."""

    def __init__(self, module: Module, target: CpuTarget, symbols: Mapping[str, str]) -> None:
        self.module, self.target, self.symbols = module, target, symbols
        self.declarations: dict[str, None] = {}
        self.functions: list[list[str]] = []
        self.calls: list[tuple[str, list[Buffer], bool]] = []  # kernel, parameters, whether it may fail
        self.usages: dict[int, Usage] = {}  # of parallel loops, by their id
        self.outlined = 0
        self.may_fail = False

    def write(self) -> str:
        """The whole text."""
        for number, kernel in enumerate(self.module.kernels):
            self.kernel(kernel, number)
        return "\n".join(self.text()) + "\n"

    def new_function(self, name: str, used: Usage, writes: Mapping[int, frozenset[str]]) -> FunctionWriter:
        """A writer for the function `name`; subclasses override it."""
        return FunctionWriter(self, name, used, writes)

    def kernel(self, kernel: Kernel, number: int) -> None:
        used = usage_of(kernel.body, self.usages)
        buffers = [b for b in self.module.arguments + self.module.temporaries if b.name in used.buffers]
        self.may_fail = False
        function = self.new_function(f"kernel_{number}", used, loop_writes(kernel.body))
        function.parameters(buffers, [])
        function.body(kernel.body)
        self.functions.append(function.text())
        self.calls.append((f"kernel_{number}", buffers, self.may_fail))

    def text(self) -> Iterator[str]:
        yield f"; {self.module.name}"
        yield "@tc_nowhere = internal constant [64 x i8] zeroinitializer, align 64"
        yield from sorted(self.declarations)
        for lines in self.functions:
            yield ""
            yield from lines
        yield ""
        yield from self._entry()
        width = self.target.vector_bits
        # Without "stackrealign", vectors that registers have no room for may cross cache lines on the stack.
        text = f'"stackrealign" "prefer-vector-width"="{width}" "min-legal-vector-width"="{width}"'
        yield f"attributes #0 = {{ nounwind {text} }}"
        yield "!0 = !{i32 1}"

    def _entry(self) -> Iterator[str]:
        """The function `tc_entry`: it loads the addresses that kernels use and calls the kernels in order."""
        order = {b.name: i for i, b in enumerate(self.module.arguments + self.module.temporaries)}
        loaded = sorted({b.name for _, buffers, _ in self.calls for b in buffers}, key=order.__getitem__)
        yield "define i64 @tc_entry(ptr %arguments) #0 {"
        for name in loaded:
            yield f"  %slot{order[name]} = getelementptr ptr, ptr %arguments, i64 {order[name]}"
            yield f"  %address{order[name]} = load ptr, ptr %slot{order[name]}"
        yield f"  %status.slot = getelementptr ptr, ptr %arguments, i64 {len(order)}"
        yield "  %status = load ptr, ptr %status.slot"
        if any(may_fail for _, _, may_fail in self.calls):
            yield "  store i64 0, ptr %status"
        for number, (name, buffers, may_fail) in enumerate(self.calls):
            operands = [f"ptr %address{order[b.name]}" for b in buffers]
            yield f"  call void @{name}({', '.join([*operands, 'ptr %status'])})"
            if may_fail:
                yield f"  %failed{number} = load i64, ptr %status"
                yield f"  %stop{number} = icmp ne i64 %failed{number}, 0"
                yield f"  br i1 %stop{number}, label %failure{number}, label %next{number}"
                yield f"failure{number}:"
                yield f"  ret i64 %failed{number}"
                yield f"next{number}:"
        yield "  ret i64 0"
        yield "}"


class FunctionWriter:
    """Writes one function: a kernel, or the body of a parallel loop for a range of its iterations."""

    def __init__(self, module: ModuleWriter, name: str, used: Usage, writes: Mapping[int, frozenset[str]]) -> None:
        self.module, self.name, self.used, self.writes = module, name, used, writes
        self.p = Printer(self.new_builder(), module.target, module.symbols)
        self.b = self.p.b
        self.fragments = TileRegisters(self.b, module.target)
        self.signature: list[str] = []
        self.buffers: dict[str, Buffer] = {}
        self.heap: list[str] = []
        self.stack_bytes = 0

    # --- frame

    def new_builder(self) -> HoistingBuilder:
        """A builder for the instructions; subclasses override it."""
        return HoistingBuilder(self.module.declarations)

    @property
    def annotation(self) -> str:
        """The text after the attributes of the function, such as debug metadata."""
        return ""

    def parameters(self, buffers: list[Buffer], variables: list[tuple[str, Type, Printer]]) -> None:
        for buffer in buffers:
            name = f"%{_to_identifier(buffer.name)}.arg{len(self.signature)}"
            self.signature.append(f"ptr noalias {'' if buffer.name in self.used.written else 'readonly '}{name}")
            self.p.pointers[buffer.name] = name
            self.buffers[buffer.name] = buffer
        for variable, type, outer in variables:
            name = f"%{_to_identifier(variable)}.var{len(self.signature)}"
            self.signature.append(f"{register_type(type)} {name}")
            self.p.variables[variable], self.p.types[variable] = name, type
            if variable in outer.ranges:
                self.p.ranges[variable] = outer.ranges[variable]
        self.signature.append("ptr %status")

    def body(self, body: Stmt) -> None:
        """Print the whole function."""
        self.statement(body)
        self.finish()

    def finish(self) -> None:
        for address in reversed(self.heap):
            self.b.emit_side_effect(f"call void @tc_free(ptr {address})")
        if self.used.streams:
            self.b.emit_side_effect("fence seq_cst")  # no weaker fence orders non-temporal stores
        self.b.emit_side_effect("ret void")

    def text(self) -> list[str]:
        head = f"define internal void @{self.name}({', '.join(self.signature)}) #0{self.annotation} {{"
        return [head, *self.b.text(), "}"]

    # --- statements

    def statement(self, s: Stmt) -> None:
        match s:
            case Store():
                self._store(s)
            case Block(body=body):
                for child in body:
                    self.statement(child)
            case Loop(kind=LoopKind.SERIAL):
                self._loop(s)
            case Loop(kind=LoopKind.PARALLEL):
                self._parallel(s)
            case If(condition=condition, then=then, otherwise=otherwise):
                other = None if otherwise is None else lambda: self.statement(otherwise)
                self.b.branch(self.p.value(condition), lambda: self.statement(then), other)
            case Let(name=name, value=value, body=body):
                with self._bound(name, self.p.value(value), value.type, value_interval(value, self.p.ranges)):
                    self.statement(body)
            case While(condition=condition, body=body):
                written = self.writes[id(s)]
                with self._forget_buffers(written), self.b.repeat(partial(self.p.value, condition), written):
                    self.statement(body)
            case Allocate(buffers=(buffer,), body=body, lengths=lengths) if lengths:
                self._allocate_dynamic(buffer, lengths, body)
            case Allocate(buffers=buffers, body=body):
                for buffer in buffers:
                    self._allocate(buffer)
                self.statement(body)
                for buffer in reversed(buffers):
                    if buffer.space is Space.FRAGMENT:
                        self.fragments.free(buffer)
            case Window():
                self._window(s)
            case Check():
                self._check(s)
            case Loop(kind=kind):
                raise InternalError(f"LLVM: a {kind.name} loop was not lowered")
            case Invoke():
                self._invoke(s)
            case _:
                raise arithmetic.unreachable_node(s)

    @contextmanager
    def _bound(self, name: str, value: str, type: Type, known: Interval) -> Iterator[None]:
        """Bind `name` to `value` inside the `with` block, and restore the earlier binding afterwards."""
        p = self.p
        before = p.variables.get(name), p.types.get(name), p.ranges.get(name)
        p.variables[name], p.types[name], p.ranges[name] = value, type, known
        yield
        del p.variables[name], p.types[name], p.ranges[name]
        if before[0] is not None and before[1] is not None:
            p.variables[name], p.types[name] = before[0], before[1]
        if before[2] is not None:
            p.ranges[name] = before[2]

    def _store(self, s: Store) -> None:
        value = self.p.value(s.value)
        lanes = max((i.type.lanes for i in s.indices), default=1)
        if s.op is not None:
            if s.buffer.type.lanes == 1 and lanes > 1 and not self._has_distinct_lanes(s):
                self._update_lanes(s, value, lanes)
                return
            value = self._combine(s, value)
        if s.buffer.space is Space.REGISTER and s.buffer.name not in self.p.pointers:
            self._store_register(s, value)
        else:
            memory_access.emit_store(self.p, s.buffer, s.indices, value, s.mask, s.nontemporal)

    def _combine(self, s: Store, value: str) -> str:
        """The new value of the element that an updating store writes."""
        assert s.op is not None
        old = self.p.value(Load(s.buffer, s.indices, s.mask))
        keep_nan = not arithmetic.is_non_nan_literal(s.value)
        return arithmetic.emit_binary(self.b, arithmetic.UPDATES[s.op], value, old, s.value.type, keep_nan=keep_nan)

    def _has_distinct_lanes(self, s: Store) -> bool:
        place = flat_address.flatten_access(self.p, s.buffer, s.indices)
        return bool(place.lane or place.lane_strides) and not place.vectors

    def _update_lanes(self, s: Store, value: str, lanes: int) -> None:
        """Update lane by lane, because several lanes may update the same element."""
        assert s.op is not None
        one = Type(s.value.type.dtype)
        for lane in range(lanes):
            indices = tuple(self._lane(i, lane) for i in s.indices)
            mask = None if s.mask is None else self._lane(s.mask, lane)
            text = f"extractelement {register_type(s.value.type)} {value}, i64 {lane}"
            item = self._bind_value(self.b.define(text, (value,)), one)
            self._store(Store(s.buffer, indices, item, s.op, mask))

    def _lane(self, e: Expr, lane: int) -> Expr:
        if e.type.lanes == 1:
            return e
        value = self.p.value(e)
        text = f"extractelement {register_type(e.type)} {value}, i64 {lane}"
        return self._bind_value(self.b.define(text, (value,)), Type(e.type.dtype))

    def _bind_value(self, value: str, type: Type) -> Var:
        """A variable that stands for an LLVM operand that was emitted already."""
        name = f"{value} "  # no variable of a program has a space in its name
        self.p.variables[name], self.p.types[name] = value, type
        return Var(name, type)

    def _store_register(self, s: Store, value: str) -> None:
        slot = self.p.registers[(s.buffer.name, memory_access.register_key(s.buffer, s.indices))]
        type = s.value.type
        if s.mask is not None:
            old = self.p.load_register(slot, s.buffer)
            mask = self.p.full_mask(s.mask, type.lanes)
            value = arithmetic.emit_select(self.b, mask, value, old, type)
        self.p.store_register(slot, s.buffer, value)

    def _check(self, s: Check) -> None:
        """Record the failure of a check, unless another came first."""
        self.module.may_fail = True
        holds, value = self.p.value(s.condition), self.p.value(s.value)
        failed = self.b.define(f"xor i1 {holds}, true", (holds,))
        self.b.branch(failed, lambda: self._record_failure(s.site + 1, value))

    def _record_failure(self, code: int, value: str) -> None:
        """Store (code, value) to the status, unless it already holds a failure."""
        pair = self.b.define_local(f"cmpxchg ptr %status, i64 0, i64 {code} monotonic monotonic")
        first = self.b.define_local(f"extractvalue {{ i64, i1 }} {pair}, 1")
        slot = self.b.define("getelementptr i64, ptr %status, i64 1", ())
        self.b.branch(first, lambda: self.b.emit_side_effect(f"store i64 {value}, ptr {slot}"))

    def _invoke(self, s: Invoke) -> None:
        known = INTRINSICS[s.name]
        for buffer in (s.operands[number][0] for number in known.written):
            self.p.record_write(buffer.name)
        if known.fragments:
            self.fragments.invoke(self.p, s)
            return
        spelling = _INTRINSICS.get(s.name)
        if spelling is None:
            raise InternalError(f"LLVM: no spelling of the intrinsic {s.name}")
        declaration, call = spelling
        self.b.declare(declaration)
        views = [
            flat_address.emit_pointer(self.p, b, flat_address.flatten_access(self.p, b, where))
            for b, where in s.operands
        ]
        self.b.emit_side_effect(f"call {call.format(*views, *s.attributes)}")

    # --- loops

    def _loop(self, s: Loop) -> None:
        count = trip_count(s)
        if count == 0:
            return
        type, known = s.start.type, loop_interval(s, self.p.ranges)
        start, stop = self.p.value(s.start), self.p.value(s.stop)
        if count == 1:
            with self._bound(s.var, start, type, known):
                self.statement(s.body)
            return
        certain = count is not None or self._runs_at_least_once(s)
        iterations = self._iterations(s, _to_identifier(s.var), start, stop, s.step, certain)
        with iterations as variable, self._bound(s.var, variable, type, known):
            self.statement(s.body)

    @contextmanager
    def _iterations(self, s: Loop, hint: str, start: str, stop: str, step: int, certain: bool) -> Iterator[str]:
        """Emit the loop of `s` around the `with` block; yields its variable."""
        written = self.writes[id(s)]
        with self._forget_buffers(written), self.b.loop(hint, start, stop, step, certain, written) as variable:
            yield variable

    @contextmanager
    def _forget_buffers(self, written: frozenset[str]) -> Iterator[None]:
        """Forget the known contents of buffers that a loop writes, before its body is printed."""
        for name in sorted(written):
            self.p.record_write(name)
        yield

    def _runs_at_least_once(self, s: Loop) -> bool:
        """Whether the loop is known to run once at least."""
        return value_interval(s.start, self.p.ranges)[1] < value_interval(s.stop, self.p.ranges)[0]

    def _parallel(self, s: Loop) -> None:
        """Call the outlined body directly if all iterations fit in one chunk, else through the thread pool."""
        count = trip_count(s)
        if count == 0:
            return
        name, captured, variables = self._outline(s)
        context = self._store_captures(captured, variables)
        number = self._trips(s) if count is None else str(count)
        for written in sorted(self.writes[id(s)]):
            self.p.record_write(written)
        if count is not None and count <= s.grain:
            self.b.emit_side_effect(f"call void @{name}(i64 0, i64 {number}, ptr {context})")
            return
        self.b.declare("i32 @tc_parallel_for(i64, i64, i64, ptr, ptr)")
        arguments = f"i64 0, i64 {number}, i64 {max(1, s.grain)}, ptr @{name}, ptr {context}"
        self.module.may_fail = True
        error = self.b.define_local(f"call i32 @tc_parallel_for({arguments})")
        failed = self.b.define_local(f"icmp ne i32 {error}, 0")
        self.b.branch(failed, lambda: self._record_failure(NO_THREADS, "0"))

    def _trips(self, s: Loop) -> str:
        start, stop = self.p.value(s.start), self.p.value(s.stop)
        span = self.b.define(f"sub i64 {stop}, {start}", (stop, start))
        more = self.b.define(f"add i64 {span}, {s.step - 1}", (span,))
        count = self.b.define(f"sdiv i64 {more}, {s.step}", (more,))
        self.b.declare("i64 @llvm.smax.i64(i64, i64)")
        return self.b.define(f"call i64 @llvm.smax.i64(i64 {count}, i64 0)", (count,))

    def _outline(self, s: Loop) -> tuple[str, list[Buffer], list[str]]:
        """Print the loop as `void name(i64 low, i64 high, ptr context)`; returns the name and the captures."""
        name = f"{self.name}.parallel_{self.module.outlined}"
        self.module.outlined += 1
        used = usage_of(s, self.module.usages)
        buffers = [b for n, b in self.buffers.items() if n in used.buffers]
        for buffer in buffers:
            if buffer.name not in self.p.pointers:
                raise InternalError(f"{buffer.name} is in registers: a parallel loop cannot use it")
        variables = [v for v in self.p.variables if v in used.variables]
        inner = self.module.new_function(f"{name}.body", used, self.writes)
        inner.parameters(buffers, [(v, self.p.types[v], self.p) for v in variables])
        inner.signature += ["i64 %low", "i64 %high"]
        inner.trips(s)
        self.module.functions.append(inner.text())
        types = ["ptr"] * len(buffers) + [register_type(self.p.types[v]) for v in variables] + ["ptr"]
        self.module.functions.append(list(_emit_trampoline(name, types)))
        return name, buffers, variables

    def trips(self, s: Loop) -> None:
        """Print a function that runs iterations %low to %high of a parallel loop; there is at least one."""
        filled, rest = hoist_packing(s)
        for buffer, fill in filled:
            self._allocate(buffer)
            self.statement(fill)
        with self._iterations(s, "trip", "%low", "%high", 1, True) as trip:
            start = self.p.value(s.start)
            value = trip if s.step == 1 else self.b.define(f"mul nsw i64 {trip}, {s.step}", (trip,))
            if start != "0":
                value = self.b.define(f"add nsw i64 {value}, {start}", (value, start))
            with self._bound(s.var, value, Type(s.start.type.dtype), loop_interval(s, self.p.ranges)):
                self.statement(rest.body)
        self.finish()

    def _store_captures(self, buffers: list[Buffer], variables: list[str]) -> str:
        """Store the captures of an outlined loop in a structure on the stack; returns its address."""
        values = [self.p.pointers[b.name] for b in buffers] + [self.p.variables[v] for v in variables] + ["%status"]
        types = ["ptr"] * len(buffers) + [register_type(self.p.types[v]) for v in variables] + ["ptr"]
        layout = "{ " + ", ".join(types) + " }"
        context = f"%{self.b.fresh_name('context')}"
        self.b.allocas.append(f"  {context} = alloca {layout}")
        for number, (type, value) in enumerate(zip(types, values, strict=True)):
            slot = self.b.define(f"getelementptr {layout}, ptr {context}, i32 0, i32 {number}", ())
            self.b.emit_side_effect(f"store {type} {value}, ptr {slot}")
        return context

    # --- memory of the function

    def _allocate(self, buffer: Buffer) -> None:
        if buffer.space is Space.FRAGMENT:
            self.fragments.allocate(buffer)
            return
        self.buffers[buffer.name] = buffer
        if buffer.space is Space.REGISTER and buffer.name not in self.used.indexed:
            self._allocate_registers(buffer)
            return
        address = f"%{self.b.fresh_name(_to_identifier(buffer.name))}"
        on_stack = self.stack_bytes + buffer.bytes <= _STACK_BYTES
        if is_recording():
            _record_memory(buffer, on_stack)
        if on_stack:
            self.stack_bytes += buffer.bytes
            element = flat_address.memory_element(buffer)
            self.b.allocas.append(f"  {address} = alloca [{max(1, buffer.span)} x {element}], align {_ALIGNMENT}")
        else:
            self._allocate_heap(address, buffer.bytes)
        self.p.pointers[buffer.name] = address

    def _allocate_registers(self, buffer: Buffer) -> None:
        for number in range(math.prod(buffer.shape)):
            key: list[int] = []
            for extent in reversed(buffer.shape):
                number, index = divmod(number, extent)
                key.insert(0, index)
            slot = f"%{self.b.fresh_name(_to_identifier(buffer.name))}"
            self.b.allocas.append(f"  {slot} = alloca {register_type(buffer.type)}")
            self.p.registers[(buffer.name, tuple(key))] = slot

    def _allocate_heap(self, address: str, size: int) -> None:
        """Allocate a temporary in the function's prologue; if that fails, free earlier ones, record it and return."""
        self.module.may_fail = True
        self.b.declare("noalias ptr @tc_allocate(i64)")
        self.b.declare("void @tc_free(ptr)")
        name = self.b.fresh_name("memory")
        self.b.prologue += [
            f"  {address} = call ptr @tc_allocate(i64 {size})",
            f"  %{name} = icmp eq ptr {address}, null",
            f"  br i1 %{name}, label %none.{name}, label %some.{name}",
            f"none.{name}:",
            f"  %old.{name} = cmpxchg ptr %status, i64 0, i64 {OUT_OF_MEMORY} monotonic monotonic",
            f"  %first.{name} = extractvalue {{ i64, i1 }} %old.{name}, 1",
            f"  br i1 %first.{name}, label %record.{name}, label %free.{name}",
            f"record.{name}:",
            f"  %slot.{name} = getelementptr i64, ptr %status, i64 1",
            f"  store i64 {size}, ptr %slot.{name}",
            f"  br label %free.{name}",
            f"free.{name}:",
            *(f"  call void @tc_free(ptr {other})" for other in reversed(self.heap)),
            "  ret void",
            f"some.{name}:",
        ]
        self.heap.append(address)

    def _allocate_dynamic(self, buffer: Buffer, lengths: Sequence[Expr], body: Stmt) -> None:
        """Allocate a temporary where it is used and free it after `body`, which is skipped if the allocation fails."""
        self.module.may_fail = True
        self.b.declare("noalias ptr @tc_allocate(i64)")
        self.b.declare("void @tc_free(ptr)")
        size = self.p.value(build.mul(build.count_elements(buffer, lengths), buffer.type.dtype.size))
        address = self.b.define_local(f"call ptr @tc_allocate(i64 {size})")
        missing = self.b.define_local(f"icmp eq ptr {address}, null")
        self.buffers[buffer.name], self.p.pointers[buffer.name] = buffer, address

        def use() -> None:
            self.statement(body)
            self.b.emit_side_effect(f"call void @tc_free(ptr {address})")

        self.b.branch(missing, lambda: self._record_failure(OUT_OF_MEMORY, size), use)

    def _window(self, s: Window) -> None:
        start = self.p.value(build.mul(s.start, build.stride(s.source, s.dimension)))
        source, element = self.p.pointers[s.source.name], flat_address.memory_element(s.source)
        address = self.b.define(f"getelementptr {element}, ptr {source}, i64 {start}", (source, start))
        self.buffers[s.buffer.name], self.p.pointers[s.buffer.name] = s.buffer, address
        self.statement(s.body)


def _record_memory(buffer: Buffer, on_stack: bool) -> None:
    where, than = ("the stack", "fits into") if on_stack else ("the heap", "exceeds")
    why = f"with what is there already it {than} {_STACK_BYTES} bytes of the function's stack"
    note_decision(Decision("memory", (), f"{buffer.name} on {where}", why, (("bytes", buffer.bytes),)))


def _emit_trampoline(name: str, types: list[str]) -> Iterator[str]:
    layout = "{ " + ", ".join(types) + " }"
    yield f"define internal void @{name}(i64 %low, i64 %high, ptr %context) #0 {{"
    for number, type in enumerate(types):
        yield f"  %slot{number} = getelementptr {layout}, ptr %context, i32 0, i32 {number}"
        yield f"  %value{number} = load {type}, ptr %slot{number}"
    operands = [f"{type} %value{number}" for number, type in enumerate(types)] + ["i64 %low", "i64 %high"]
    yield f"  call void @{name}.body({', '.join(operands)})"
    yield "  ret void"
    yield "}"


def _to_identifier(name: str) -> str:
    """`name` with only the characters that LLVM identifiers may have without quotes."""
    return "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name.lstrip(SEPARATOR))
