"""Loads and stores. How the address of an access changes from lane to lane decides which instructions are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ...core.dtypes import BOOL, UINT8
from ...core.errors import InternalError
from ...loop_ir.nodes import Binary, Buffer, Cast, Const, Expr, Load, Ramp, Space, Type
from .arithmetic import emit_broadcast, emit_shuffle
from .flat_address import (
    FlatAddress,
    ValueContext,
    accumulate_value,
    emit_linear_sum,
    emit_pointer,
    flatten_access,
    memory_element,
)
from .hoisting_builder import HoistingBuilder
from .types import constant_vector, llvm_literal, mask_literal, splat_constant, vector_type

STREAMED = (16, 32, 64)
"""Sizes in bytes of non-temporal stores; the last is a cache line."""
MASKED_BYTES = (4, 8)
"""Sizes in bytes of elements for which every processor with AVX has masked vector loads."""


# --- loads -------------------------------------------------------------------------------------------------------


def emit_load(values: ValueContext, buffer: Buffer, indices: Sequence[Expr], mask: Expr | None) -> str:
    """The value of `buffer[indices]`; 0 in lanes where `mask` is false."""
    lanes = max((i.type.lanes for i in indices), default=1)
    place = flatten_access(values, buffer, indices)
    reader = _Access(values, buffer, place, lanes, *_emit_mask_operand(values, mask, lanes))
    raw = reader.load()
    return from_memory(values.b, raw, Type(buffer.type.dtype, max(lanes, buffer.type.lanes)))


def emit_store(
    values: ValueContext, buffer: Buffer, indices: Sequence[Expr], value: str, mask: Expr | None, streaming: bool
) -> None:
    """Emit `buffer[indices] = value` for the lanes where `mask` is true; bypass the caches if `streaming`."""
    lanes = max((i.type.lanes for i in indices), default=1)
    place = flatten_access(values, buffer, indices)
    writer = _Access(values, buffer, place, lanes, *_emit_mask_operand(values, mask, lanes))
    raw = to_memory(values.b, value, Type(buffer.type.dtype, max(lanes, buffer.type.lanes)))
    writer.store(raw, streaming)
    values.record_write(buffer.name)
    if mask is None and place.lane == int(lanes > 1) and not place.has_open_lanes:
        writer.remember(raw)


def _emit_mask_operand(values: ValueContext, mask: Expr | None, lanes: int) -> tuple[str | None, tuple[bool, ...]]:
    """The mask as an operand (None: all lanes are true), and its bits if they are compile-time constants, else ()."""
    if mask is None:
        return None, (True,) * lanes
    known = values.known_mask(mask)
    if known is not None and all(known):
        return None, known
    if known is not None:
        return (mask_literal(known) if lanes > 1 else "false"), known
    return values.value(mask), ()


def from_memory(b: HoistingBuilder, raw: str, type: Type) -> str:
    """Convert a loaded value to its type in registers: bytes of bools become single bits."""
    if type.dtype != BOOL:
        return raw
    return b.define(f"icmp ne {vector_type('i8', type.lanes)} {raw}, {splat_constant('0', 'i8', type.lanes)}", (raw,))


def to_memory(b: HoistingBuilder, value: str, type: Type) -> str:
    """Convert a value to its type in memory: bools become bytes, 0 or 1."""
    if type.dtype != BOOL:
        return value
    return b.define(f"zext {vector_type('i1', type.lanes)} {value} to {vector_type('i8', type.lanes)}", (value,))


class _Access:
    """One load or store of values in their memory representation (bool as i8)."""

    def __init__(
        self,
        values: ValueContext,
        buffer: Buffer,
        place: FlatAddress,
        lanes: int,
        mask: str | None,
        bits: tuple[bool, ...],
    ) -> None:
        self.values, self.b, self.buffer, self.place, self.lanes = values, values.b, buffer, place, lanes
        self.mask, self.bits = mask, bits
        self.element = memory_element(buffer)
        self.size = buffer.type.dtype.size
        self.vector = vector_type(self.element, lanes)

    @property
    def zero(self) -> str:
        """The zero of lanes that are masked off."""
        dtype = self.buffer.type.dtype
        plain = self.lanes == 1 and self.buffer.type.lanes == 1
        return llvm_literal(0, UINT8 if dtype == BOOL else dtype) if plain else "zeroinitializer"

    @property
    def suffix(self) -> str:
        """The suffix of intrinsics on vectors of this type."""
        kind = {"half": "f16", "float": "f32", "double": "f64"}.get(self.element, self.element)
        return f"v{self.lanes}{kind}"

    def _pointer(self, extra: int = 0) -> str:
        return emit_pointer(self.values, self.buffer, self.place, extra)

    # loads

    def load(self) -> str:
        if self.lanes == 1:
            return self._load_scalar()
        if self.bits and not any(self.bits):
            return "zeroinitializer"
        if self.place.has_open_lanes:
            return self._gather()
        step = self.place.lane
        if step == 1:
            return self._load_contiguous(self._pointer(), self.mask)
        if step == 0:
            return self._load_splat()
        if step == -1:
            last = self._pointer(1 - self.lanes)
            mask = None if self.mask is None else self._reverse(self.mask, "i1")
            return self._reverse(self._load_contiguous(last, mask), self.element)
        is_open = self.mask is not None and not self.bits and self.size in MASKED_BYTES
        if (self.mask is None or is_open) and 2 <= step <= 4 and self.lanes > step:
            return self._load_interleaved(step)
        return self._load_lanes() if self.bits else self._gather()

    def _read(self, type: str, address: str, align: int = 0) -> str:
        return self._memory(f"load {type}, ptr {address}, align {align or self.size}", (address,))

    def remember(self, value: str) -> None:
        """After an unmasked contiguous store, let a later load of the same vector return `value`."""
        address = self._pointer()
        version = self.values.version(self.buffer.name)
        self.b.remember(f"load {self.vector}, ptr {address}, align {self.size}", version, value)

    def _memory(self, text: str, operands: Sequence[str]) -> str:
        """The value of an operation that reads the buffer."""
        name = self.buffer.name
        return self.b.define(text, operands, reads=name, version=self.values.version(name))

    def _load_scalar(self) -> str:
        address = self._pointer()
        if self.mask is None:
            return self._read(self.element, address)
        if self.bits:
            return self.zero
        safe = self.b.define(f"select i1 {self.mask}, ptr {address}, ptr @tc_nowhere", (self.mask, address))
        return self._read(self.element, safe)  # @tc_nowhere holds zeros

    def _select(self, mask: str, mask_type: str, value: str, type: str) -> str:
        return self.b.define(f"select {mask_type} {mask}, {type} {value}, {type} {self.zero}", (mask, value))

    def _load_contiguous(self, address: str, mask: str | None) -> str:
        if mask is None:
            return self._read(self.vector, address)
        name = f"@llvm.masked.load.{self.suffix}.p0"
        bits = vector_type("i1", self.lanes)
        self.b.declare(f"{self.vector} {name}(ptr, {bits}, {self.vector})")
        arguments = f"ptr align {self.size} {address}, {bits} {mask}, {self.vector} zeroinitializer"
        return self._memory(f"call {self.vector} {name}({arguments})", (address, mask))

    def _load_splat(self) -> str:
        address, bits = self._pointer(), vector_type("i1", self.lanes)
        if self.mask is None:
            return emit_broadcast(self.b, self._read(self.element, address), self.element, self.lanes)
        some = "true"
        if not self.bits:
            name = f"@llvm.vector.reduce.or.v{self.lanes}i1"
            self.b.declare(f"i1 {name}({bits})")
            some = self.b.define(f"call i1 {name}({bits} {self.mask})", (self.mask,))
        safe = self.b.define(f"select i1 {some}, ptr {address}, ptr @tc_nowhere", (some, address))
        value = emit_broadcast(self.b, self._read(self.element, safe), self.element, self.lanes)
        return self._select(self.mask, bits, value, self.vector)

    def _reverse(self, value: str, element: str) -> str:
        return emit_shuffle(self.b, value, "poison", list(range(self.lanes))[::-1], element, self.lanes)

    def _load_interleaved(self, step: int) -> str:
        """Load whole vectors and pick every `step`-th element. The last vector ends at the last element picked, so that
        no load exceeds the buffer."""
        lanes, span = self.lanes, step * (self.lanes - 1) + 1
        starts = [min(part * lanes, span - lanes) for part in range(step)]
        parts = [self._load_contiguous(self._pointer(start), self._spread_mask(step, start)) for start in starts]
        result, done = parts[0], 0
        for number, (start, part) in enumerate(zip(starts, parts, strict=True)):
            inside = [i for i in range(done, lanes) if start <= i * step < start + lanes]
            lanes_of = list(range(lanes)) if number else [0] * lanes
            for lane in inside:
                lanes_of[lane] = lane * step - start + (lanes if number else 0)
            result = emit_shuffle(self.b, result, part if number else "poison", lanes_of, self.element, lanes)
            done = inside[-1] + 1 if inside else done
        return result

    def _spread_mask(self, step: int, start: int) -> str | None:
        """The mask of the vector from element `start` on, in which every `step`-th element is a lane."""
        if self.mask is None:
            return None
        elements = range(start, start + self.lanes)
        lanes_of = [self.lanes if at % step else at // step for at in elements]
        return emit_shuffle(self.b, self.mask, "zeroinitializer", lanes_of, "i1", self.lanes)

    def _load_lanes(self) -> str:
        result = "zeroinitializer" if self.mask else "poison"
        for lane, wanted in enumerate(self.bits):
            if wanted:
                value = self._read(self.element, self._pointer(lane * self.place.lane))
                text = f"insertelement {self.vector} {result}, {self.element} {value}, i64 {lane}"
                result = self.b.define(text, (result, value))
        return result

    def _addresses(self) -> str:
        """The vector of the lanes' addresses."""
        b, offsets = self.b, vector_type("i64", self.lanes)
        total = emit_linear_sum(b, self.place.vectors, offsets, self.lanes)
        if self.place.lane:
            steps = constant_vector([lane * self.place.lane for lane in range(self.lanes)], "i64")
            total = b.define(f"add {offsets} {total}, {steps}", (total,)) if total else steps
        for value, scale in self.place.lane_strides.items():
            steps = constant_vector([lane * scale for lane in range(self.lanes)], "i64")
            wide = emit_broadcast(b, value, "i64", self.lanes)
            apart = b.define(f"mul {offsets} {wide}, {steps}", (wide,))
            total = b.define(f"add {offsets} {total}, {apart}", (total, apart)) if total else apart
        address = self._pointer()
        text = f"getelementptr {self.element}, ptr {address}, {offsets} {total}"
        return b.define(text, (address, total))

    def _gather(self) -> str:
        """Gather, lane by lane unless the target has fast gathers. Masked-off lanes read zeros from @tc_nowhere."""
        if self.mask is None:
            return self._gather_lanes(self._lane_addresses())
        addresses = self._addresses()
        if self.values.has_fast_gather and self.size in (4, 8):
            return self._gather_at_once(addresses, self.mask)
        pointers, bits = vector_type("ptr", self.lanes), vector_type("i1", self.lanes)
        text = f"select {bits} {self.mask}, {pointers} {addresses}, {pointers} splat (ptr @tc_nowhere)"
        return self._gather_lanes(self._extract_all(self.b.define(text, (self.mask, addresses)), "ptr"))

    def _gather_at_once(self, addresses: str, mask: str) -> str:
        name = f"@llvm.masked.gather.{self.suffix}.v{self.lanes}p0"
        pointers, bits = vector_type("ptr", self.lanes), vector_type("i1", self.lanes)
        self.b.declare(f"{self.vector} {name}({pointers}, {bits}, {self.vector})")
        arguments = f"{pointers} align {self.size} {addresses}, {bits} {mask}, {self.vector} zeroinitializer"
        return self._memory(f"call {self.vector} {name}({arguments})", (addresses, mask))

    def _lane_addresses(self) -> list[str]:
        """The address of each lane; if possible, from index elements loaded one by one, which is fastest."""
        found = [self._lane_address(lane) for lane in range(self.lanes)]
        whole = [address for address in found if address is not None]
        return whole if len(whole) == self.lanes else self._extract_all(self._addresses(), "ptr")

    def _lane_address(self, lane: int) -> str | None:
        place = FlatAddress(self.place.constant + lane * self.place.lane, terms=dict(self.place.terms))
        for value, scale in self.place.lane_strides.items():
            place.add(value, lane * scale)
        for value, source in self.place.sources.items():
            item = _extract_lane_expr(source, lane)
            if item is None:
                return None
            accumulate_value(self.values, place, item, self.place.vectors[value])
        return emit_pointer(self.values, self.buffer, place)

    def _extract_all(self, value: str, element: str) -> list[str]:
        return [self._extract(value, element, lane) for lane in range(self.lanes)]

    def _gather_lanes(self, addresses: Sequence[str]) -> str:
        result = "poison"
        for lane, address in enumerate(addresses):
            value = self._read(self.element, address)
            text = f"insertelement {self.vector} {result}, {self.element} {value}, i64 {lane}"
            result = self.b.define(text, (result, value))
        return result

    def _extract(self, value: str, element: str, lane: int) -> str:
        text = f"extractelement {vector_type(element, self.lanes)} {value}, i64 {lane}"
        return self.b.define(text, (value,))

    # stores

    def store(self, value: str, streaming: bool) -> None:
        if self.bits and not any(self.bits):
            return
        if self.lanes == 1:
            self._store_scalar(value)
        elif self.bits.count(True) == 1 and not self.place.has_open_lanes:
            self._store_lane(value, self.bits.index(True))
        elif self.place.has_open_lanes or self.place.lane not in (-1, 1):
            self._scatter(value)
        elif self.place.lane == 1:
            self._store_contiguous(self._pointer(), value, self.mask, streaming)
        else:
            mask = None if self.mask is None else self._reverse(self.mask, "i1")
            self._store_contiguous(self._pointer(1 - self.lanes), self._reverse(value, self.element), mask, False)

    def _write(self, type: str, value: str, address: str, note: str = "", align: int = 0) -> None:
        self.b.emit_side_effect(f"store {type} {value}, ptr {address}, align {align or self.size}{note}")

    def _store_scalar(self, value: str) -> None:
        address = self._pointer()
        if self.mask is None:
            self._write(self.element, value, address)
        else:
            self.b.branch(self.mask, lambda: self._write(self.element, value, address))

    def _store_lane(self, value: str, lane: int) -> None:
        """Store a single lane. A masked store would be wrong: LLVM writes too many bytes of narrow integers."""
        one = self.b.define(f"extractelement {self.vector} {value}, i64 {lane}", (value,))
        self._write(self.element, one, self._pointer(lane * self.place.lane))

    def _store_contiguous(self, address: str, value: str, mask: str | None, streaming: bool) -> None:
        lanes = self.lanes if mask is None else self._leading
        if streaming and lanes * self.size in STREAMED:
            self._store_streaming(self._part(value, self.lanes, 0, lanes), lanes)
        elif mask is None:
            self._write(self.vector, value, address)
        elif self.bits and self.place.lane == 1 and not self.values.has_mask_registers:
            self._store_parts(value)
        else:
            name = f"@llvm.masked.store.{self.suffix}.p0"
            bits = vector_type("i1", self.lanes)
            self.b.declare(f"void {name}({self.vector}, ptr, {bits})")
            arguments = f"{self.vector} {value}, ptr align {self.size} {address}, {bits} {mask}"
            self.b.emit_side_effect(f"call void {name}({arguments})")

    def _store_parts(self, value: str) -> None:
        """Each run of stored lanes by whole vectors: a masked store can take a dozen cycles without mask registers."""
        for first, lanes in _split_runs(self.bits):
            one = lanes == 1
            part = self._extract(value, self.element, first) if one else self._part(value, self.lanes, first, lanes)
            self._write(vector_type(self.element, lanes), part, self._pointer(first))

    @property
    def _leading(self) -> int:
        """The number of lanes stored, if the mask is constant and selects the first ones, else 0."""
        count = self.bits.count(True)
        return count if all(self.bits[:count]) else 0

    def _part(self, value: str, width: int, first: int, lanes: int) -> str:
        """The `lanes` lanes from `first` on of a vector of `width` lanes."""
        if lanes == width:
            return value
        return emit_shuffle(self.b, value, "poison", range(first, first + lanes), self.element, width)

    def _store_streaming(self, value: str, lanes: int) -> None:
        """Store past the caches if the address is aligned at run time. A cache line may be stored as aligned halves,
        which the processor combines."""
        whole, half, constant = lanes * self.size, lanes // 2, self.place.constant
        # Addresses at constant distances share an alignment test. `freeze` stops strength reduction splitting them.
        start = self._pointer(-constant)
        start = self.b.define(f"freeze ptr {start}", (start,))
        number = self.b.define(f"ptrtoint ptr {start} to i64", (start,))
        rest = self.b.define(f"and i64 {number}, {whole - 1}", (number,))

        def element(further: int) -> str:
            text = f"getelementptr {self.element}, ptr {start}, i64 {constant + further}"
            return self.b.define(text, (start,)) if constant + further else start

        def stream_part(further: int, part: str, count: int) -> None:
            self._write(
                vector_type(self.element, count), part, element(further), ", !nontemporal !0", count * self.size
            )

        def stream_halves() -> None:
            for first in (0, half):
                stream_part(first, self._part(value, lanes, first, half), half)

        def store_unaligned() -> None:
            self._write(vector_type(self.element, lanes), value, element(0))

        def test_rest(distance: int) -> str:
            return self.b.define(f"icmp eq i64 {rest}, {(distance - constant * self.size) % whole}", (rest,))

        def try_halves() -> None:
            self.b.branch(test_rest(whole // 2), stream_halves, store_unaligned)

        self.b.branch(
            test_rest(0), lambda: stream_part(0, value, lanes), try_halves if whole == STREAMED[-1] else store_unaligned
        )

    def _scatter(self, value: str) -> None:
        """Store lane by lane, so that of two lanes with the same address the later one wins."""
        addresses = self._lane_addresses() if self.place.has_open_lanes else []
        for lane in range(self.lanes):
            if self.bits and not self.bits[lane]:
                continue
            address = addresses[lane] if addresses else self._pointer(lane * self.place.lane)
            item = self._extract(value, self.element, lane)
            if self.bits:
                self._write(self.element, item, address)
            else:
                assert self.mask is not None
                flag = self._extract(self.mask, "i1", lane)
                self.b.branch(flag, lambda a=address, i=item: self._write(self.element, i, a))  # type: ignore[misc]


def _split_runs(bits: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The runs of set bits in pieces of a power of two, the longest first: where each begins and how long it is."""
    first = 0
    for is_set, run in groupby(bits):
        end = first + len(list(run))
        while is_set and first < end:
            lanes = 1 << ((end - first).bit_length() - 1)
            yield first, lanes
            first += lanes
        first = end


def _extract_lane_expr(e: Expr, lane: int) -> Expr | None:
    """One lane of `e` as a scalar expression if `e` is a load (perhaps converted) that can be split, else None."""
    match e:
        case Cast(operand=operand, dtype=dtype):
            item = _extract_lane_expr(operand, lane)
            return None if item is None else Cast(item, dtype)
        case Load(buffer=buffer, indices=indices, mask=None) if buffer.space is not Space.REGISTER:
            items = [item for i in indices if (item := _index_at_lane(i, lane)) is not None]
            return Load(buffer, tuple(items)) if len(items) == len(indices) else None
    return None


def _index_at_lane(index: Expr, lane: int) -> Expr | None:
    """One lane of `index` if it is a ramp or a scalar, else None."""
    if isinstance(index, Ramp):
        return Binary("add", index.base, Const(lane * index.stride, index.base.type))
    return index if index.type.lanes == 1 else None


def register_key(buffer: Buffer, indices: Sequence[Expr]) -> tuple[int, ...]:
    """The indices, which must be constant, of an element that is kept in a register."""
    key = tuple([int(i.value) for i in indices if type(i) is Const])
    if len(key) != len(indices):
        raise InternalError(f"{buffer.name} is in registers but its subscripts are not constants")
    return key
