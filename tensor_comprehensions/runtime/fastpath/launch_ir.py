"""The LLVM assembly of calls that need no Python: finding a cached call for the arguments, and launching its kernel.

A call cache is three words: the address of a table of cached calls (their count, then their addresses), the address of
the kinds of the arguments, and the number of calls that are reading the table. For an argument the stack has a borrowed
handle, which is the address of a C++ tensor, or a number, depending on its kind:

    0  a tensor
    1  an integer that is part of the kernel: its value
    n  a number of torch's type n - 2: a tensor; or 0, with the bits of the number in `numbers`

A cached call is a block of words, the first `HEADER` of which are named by `CachedCallWord`. Its guards are, for a
number that is part of the kernel, its value, and for a tensor its dtype, rank, sizes and strides. A new output is its
dtype, rank, source (whose elements are copied to it first; -1 for none), bytes, sizes and strides. An argument that is
written to is its index on the stack, its source and the bytes to copy from another source, -1 if not contiguous.

A cached call for any number of rows has parameters, which stand for sizes and strides: `FIRST_PARAMETER + n` is the
parameter n wherever it occurs. A stride may be `PACKED`: the extent times the stride of the next dimension. The bytes
of a new output with open sizes are those of a row, and the kernel takes the address of the parameters after that of
the temporaries. An extent of a new output may also be the number of windows in a parameter; see `open_extent`.
"""

from __future__ import annotations

from enum import IntEnum

from ..cpu.huge_pages import ADVICE, HUGE, LARGE

CALL_CACHE_WORDS = 3
MAX_PARAMETERS = 8
"""The maximum number of sizes that a cached call may leave open."""
ANY = -(1 << 63)
"""A stride that does not matter."""
PACKED = ANY + 1
"""A stride as in a contiguous tensor: the extent times the stride of the next dimension."""
FIRST_PARAMETER = ANY + 2
PAUSED = "tc_paused"
"""The symbol of a word that is not 0 while all calls must take the slow path."""


def open_extent(parameter: int, step: int = 1, reach: int = 1) -> int:
    """The word of an extent: the number of windows of `reach` elements, `step` apart, in the size `parameter`."""
    return FIRST_PARAMETER + parameter + (step - 1 << 8) + (reach - 1 << 32)


class CachedCallWord(IntEnum):
    """The words at the start of a cached call; offsets are in bytes from there."""

    ENTRY = 0
    OPERANDS = 1
    MADE = 2
    TEMPORARIES = 3
    ARENA = 4
    WRITTEN = 5
    GUARDS_AT = 6
    ORDER_AT = 7
    MADE_AT = 8
    OFFSETS_AT = 9
    WRITTEN_AT = 10
    SPANS_AT = 11
    PARAMETERS = 12
    TOTAL = 13


HEADER = len(CachedCallWord)


def launch_assembly() -> str:
    """`@serve` and everything that it needs except the guards."""
    return _DECLARATIONS + _PAGES + _LAUNCH + _fill_in_numbers(_SERVE)


def _fill_in_numbers(text: str) -> str:
    numbers = {"FIRST_PARAMETER": FIRST_PARAMETER, "PACKED": PACKED, "MAX_PARAMETERS": MAX_PARAMETERS}
    numbers["8 * MAX_PARAMETERS"] = 8 * MAX_PARAMETERS
    for name, value in numbers.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


_DECLARATIONS = r"""
declare i32 @aoti_torch_get_data_ptr(ptr, ptr)
declare i32 @aoti_torch_empty_strided(i64, ptr, ptr, i32, i32, i32, ptr)
declare i32 @aoti_torch_delete_tensor_object(ptr)
declare i32 @madvise(ptr, i64, i32)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
@tc_paused = external global i64
"""

_PAGES = rf"""
; Ask for huge pages for a new tensor of so many bytes if it is large: `huge_pages.advise_huge_pages`.
define internal void @widen(ptr %data, i64 %bytes) {{
  %large = icmp sge i64 %bytes, {LARGE}
  br i1 %large, label %ask, label %done
ask:
  %address = ptrtoint ptr %data to i64
  %end = add i64 %address, %bytes
  %past = add i64 %address, {HUGE - 1}
  %start = and i64 %past, {-HUGE}
  %stop = and i64 %end, {-HUGE}
  %size = sub i64 %stop, %start
  %place = inttoptr i64 %start to ptr
  %refused = call i32 @madvise(ptr %place, i64 %size, i32 {ADVICE or 0})
  br label %done
done:
  ret void
}}
"""

_LAUNCH = r"""
define internal i64 @word(ptr %call, i64 %index) alwaysinline {
  %slot = getelementptr i64, ptr %call, i64 %index
  %value = load i64, ptr %slot
  ret i64 %value
}

define internal ptr @part(ptr %call, i64 %index) alwaysinline {
  %at = call i64 @word(ptr %call, i64 %index)
  %place = getelementptr i8, ptr %call, i64 %at
  ret ptr %place
}

define internal void @drop(ptr %handles, i64 %count) {
  br label %test
test:
  %i = phi i64 [ 0, %0 ], [ %next, %delete ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %delete, label %done
delete:
  %slot = getelementptr ptr, ptr %handles, i64 %i
  %handle = load ptr, ptr %slot
  %ignored = call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  %next = add i64 %i, 1
  br label %test
done:
  ret void
}

; A new tensor of so many bytes; false where there is no memory.
define internal i1 @new(i64 %dtype, i64 %rank, ptr %sizes, ptr %strides, i64 %bytes, ptr %handle, ptr %data) {
  %kind = trunc i64 %dtype to i32
  %error = call i32 @aoti_torch_empty_strided(i64 %rank, ptr %sizes, ptr %strides, i32 %kind, i32 0, i32 0, ptr %handle)
  %fine = icmp eq i32 %error, 0
  br i1 %fine, label %made, label %no
made:
  %tensor = load ptr, ptr %handle
  %ignored = call i32 @aoti_torch_get_data_ptr(ptr %tensor, ptr %data)
  %start = load ptr, ptr %data
  call void @widen(ptr %start, i64 %bytes)
  ret i1 true
no:
  ret i1 false
}

; Where the first element of each argument is; of a number, among the facts.
define internal i1 @locate(ptr %kinds, ptr %stack, ptr %facts, i64 %count, ptr %places) {
  br label %test
test:
  %i = phi i64 [ 0, %0 ], [ %next, %following ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %yes
look:
  %kind.slot = getelementptr i64, ptr %kinds, i64 %i
  %kind = load i64, ptr %kind.slot
  %slot = getelementptr ptr, ptr %stack, i64 %i
  %value = load ptr, ptr %slot
  %place = getelementptr ptr, ptr %places, i64 %i
  %number = call i1 @numeric(i64 %kind, ptr %value)
  br i1 %number, label %inside, label %ask
inside:
  %at = mul i64 %i, 4
  %fact = getelementptr i64, ptr %facts, i64 %at
  store ptr %fact, ptr %place
  br label %following
ask:
  %e = call i32 @aoti_torch_get_data_ptr(ptr %value, ptr %place)
  %fine = icmp eq i32 %e, 0
  br i1 %fine, label %following, label %no
following:
  %next = add i64 %i, 1
  br label %test
yes:
  ret i1 true
no:
  ret i1 false
}

; Make the tensors at `fact`, which may start with elements of arguments. How many were made.
define internal i64 @make(ptr %made, i64 %count, ptr %places, ptr %handles, ptr %addresses) {
  br label %test
test:
  %i = phi i64 [ 0, %0 ], [ %next, %known ]
  %fact = phi ptr [ %made, %0 ], [ %fact.next, %known ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %one, label %done
one:
  %dtype = call i64 @word(ptr %fact, i64 0)
  %rank = call i64 @word(ptr %fact, i64 1)
  %source = call i64 @word(ptr %fact, i64 2)
  %bytes = call i64 @word(ptr %fact, i64 3)
  %sizes = getelementptr i64, ptr %fact, i64 4
  %strides = getelementptr i64, ptr %sizes, i64 %rank
  %fact.next = getelementptr i64, ptr %strides, i64 %rank
  %handle = getelementptr ptr, ptr %handles, i64 %i
  %slot = getelementptr ptr, ptr %addresses, i64 %i
  %ok = call i1 @new(i64 %dtype, i64 %rank, ptr %sizes, ptr %strides, i64 %bytes, ptr %handle, ptr %slot)
  br i1 %ok, label %start, label %done
start:
  %starts = icmp sge i64 %source, 0
  br i1 %starts, label %copy, label %known
copy:
  %from.slot = getelementptr ptr, ptr %places, i64 %source
  %from = load ptr, ptr %from.slot
  %to = load ptr, ptr %slot
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %bytes, i1 false)
  br label %known
known:
  %next = add i64 %i, 1
  br label %test
done:
  ret i64 %i
}

; Whether no tensor that is written to comes near the memory of one before it, but for its source, which then is itself.
define internal i1 @apart(ptr %written, i64 %count, ptr %spans, ptr %places) {
  br label %outer
outer:
  %w = phi i64 [ 0, %0 ], [ %w.next, %inner ]
  %fact = phi ptr [ %written, %0 ], [ %fact.next, %inner ]
  %w.more = icmp slt i64 %w, %count
  br i1 %w.more, label %one, label %yes
one:
  %n = call i64 @word(ptr %fact, i64 0)
  %source = call i64 @word(ptr %fact, i64 1)
  %bytes = call i64 @word(ptr %fact, i64 2)
  %span = call i64 @word(ptr %spans, i64 %n)
  %start = call i64 @word(ptr %places, i64 %n)
  %stop = add i64 %start, %span
  %fact.next = getelementptr i64, ptr %fact, i64 3
  %w.next = add i64 %w, 1
  br label %inner
inner:
  %m = phi i64 [ 0, %one ], [ %m.next, %following ]
  %m.more = icmp slt i64 %m, %n
  br i1 %m.more, label %other, label %outer
other:
  %m.next = add i64 %m, 1
  %m.span = call i64 @word(ptr %spans, i64 %m)
  %m.start = call i64 @word(ptr %places, i64 %m)
  %m.stop = add i64 %m.start, %m.span
  %below = icmp ult i64 %m.start, %stop
  %above = icmp ult i64 %start, %m.stop
  %meet = and i1 %below, %above
  %is.source = icmp eq i64 %m, %source
  %same = icmp eq i64 %m.start, %start
  %itself = and i1 %is.source, %same
  %apart = xor i1 %meet, true
  %fine = or i1 %apart, %itself
  %pieces = icmp slt i64 %bytes, 0
  %elsewhere = xor i1 %same, true
  %copied = and i1 %is.source, %elsewhere
  %hard = and i1 %copied, %pieces
  %easy = xor i1 %hard, true
  %ok = and i1 %fine, %easy
  br i1 %ok, label %following, label %no
following:
  br label %inner
yes:
  ret i1 true
no:
  ret i1 false
}

; Start what is written to with the elements of its source.
define internal void @start(ptr %written, i64 %count, ptr %places) {
  br label %test
test:
  %i = phi i64 [ 0, %0 ], [ %next, %following ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %done
look:
  %at = mul i64 %i, 3
  %fact = getelementptr i64, ptr %written, i64 %at
  %n = call i64 @word(ptr %fact, i64 0)
  %source = call i64 @word(ptr %fact, i64 1)
  %bytes = call i64 @word(ptr %fact, i64 2)
  %starts = icmp sge i64 %source, 0
  br i1 %starts, label %compare, label %following
compare:
  %to.slot = getelementptr ptr, ptr %places, i64 %n
  %from.slot = getelementptr ptr, ptr %places, i64 %source
  %to = load ptr, ptr %to.slot
  %from = load ptr, ptr %from.slot
  %same = icmp eq ptr %to, %from
  br i1 %same, label %following, label %copy
copy:
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %bytes, i1 false)
  br label %following
following:
  %next = add i64 %i, 1
  br label %test
done:
  ret void
}
"""

_SERVE = r"""
; Run the kernel of a cached call; rows: the address of their number, for a kernel that takes any.
; True if all went well: then the handles of the new outputs are at `results`.
define internal i1 @run(ptr %call, ptr %kinds, ptr %stack, ptr %facts, i64 %count, ptr %results, ptr %rows) {
  %status = alloca { i64, i64 }
  %arena.handle = alloca ptr
  %arena.data = alloca ptr
  %arena.size = alloca i64
  %one = alloca i64
  store i64 1, ptr %one
  store ptr null, ptr %arena.handle
  %entry = load ptr, ptr %call
  %operands = call i64 @word(ptr %call, i64 1)
  %made = call i64 @word(ptr %call, i64 2)
  %temporaries = call i64 @word(ptr %call, i64 3)
  %arena = call i64 @word(ptr %call, i64 4)
  %written = call i64 @word(ptr %call, i64 5)
  %order = call ptr @part(ptr %call, i64 7)
  %made.facts = call ptr @part(ptr %call, i64 8)
  %offsets = call ptr @part(ptr %call, i64 9)
  %written.facts = call ptr @part(ptr %call, i64 10)
  %spans = call ptr @part(ptr %call, i64 11)
  store i64 %arena, ptr %arena.size
  %places.room = add i64 %count, 1
  %places = alloca ptr, i64 %places.room
  %taken = add i64 %operands, %made
  %all = add i64 %taken, %temporaries
  %room = add i64 %all, 2
  %addresses = alloca ptr, i64 %room
  %located = call i1 @locate(ptr %kinds, ptr %stack, ptr %facts, i64 %count, ptr %places)
  br i1 %located, label %check, label %no
check:
  %free = call i1 @apart(ptr %written.facts, i64 %written, ptr %spans, ptr %places)
  br i1 %free, label %test, label %no
test:
  %i = phi i64 [ 0, %check ], [ %next, %move ]
  %more = icmp slt i64 %i, %operands
  br i1 %more, label %move, label %outputs
move:
  %which = call i64 @word(ptr %order, i64 %i)
  %from = getelementptr ptr, ptr %places, i64 %which
  %to = getelementptr ptr, ptr %addresses, i64 %i
  %moved = load ptr, ptr %from
  store ptr %moved, ptr %to
  %next = add i64 %i, 1
  br label %test
outputs:
  %first = getelementptr ptr, ptr %addresses, i64 %operands
  %there = call i64 @make(ptr %made.facts, i64 %made, ptr %places, ptr %results, ptr %first)
  %complete = icmp eq i64 %there, %made
  br i1 %complete, label %scratch, label %fail
scratch:
  %needs = icmp sgt i64 %temporaries, 0
  br i1 %needs, label %scratch.make, label %ready
scratch.make:
  %a.ok = call i1 @new(i64 0, i64 1, ptr %arena.size, ptr %one, i64 %arena, ptr %arena.handle, ptr %arena.data)
  br i1 %a.ok, label %scratch.divide, label %fail
scratch.divide:
  %base = load ptr, ptr %arena.data
  br label %piece
piece:
  %t = phi i64 [ 0, %scratch.divide ], [ %t.next, %piece ]
  %offset = call i64 @word(ptr %offsets, i64 %t)
  %temporary = getelementptr i8, ptr %base, i64 %offset
  %t.place = add i64 %taken, %t
  %t.slot = getelementptr ptr, ptr %addresses, i64 %t.place
  store ptr %temporary, ptr %t.slot
  %t.next = add i64 %t, 1
  %t.more = icmp slt i64 %t.next, %temporaries
  br i1 %t.more, label %piece, label %ready
ready:
  call void @start(ptr %written.facts, i64 %written, ptr %places)
  %rows.slot = getelementptr ptr, ptr %addresses, i64 %all
  store ptr %rows, ptr %rows.slot
  %ranged = icmp ne ptr %rows, null
  %extra = zext i1 %ranged to i64
  %status.place = add i64 %all, %extra
  %status.slot = getelementptr ptr, ptr %addresses, i64 %status.place
  store ptr %status, ptr %status.slot
  %code = call i64 %entry(ptr %addresses)
  %held = load ptr, ptr %arena.handle
  %has.arena = icmp ne ptr %held, null
  br i1 %has.arena, label %release, label %judge
release:
  %e.free = call i32 @aoti_torch_delete_tensor_object(ptr %held)
  br label %judge
judge:
  %success = icmp eq i64 %code, 0
  br i1 %success, label %yes, label %fail
yes:
  ret i1 true
fail:
  call void @drop(ptr %results, i64 %there)
  br label %no
no:
  ret i1 false
}

; The sizes, strides and bytes of new outputs for these values of the parameters of a cached call. False if a size is
; negative.
define internal i1 @resolve(ptr %made, i64 %count, ptr %parameters) {
  br label %test
test:
  %i = phi i64 [ 0, %0 ], [ %i.next, %done ]
  %fact = phi ptr [ %made, %0 ], [ %fact.next, %done ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %one, label %end
one:
  %rank = call i64 @word(ptr %fact, i64 1)
  %bytes.slot = getelementptr i64, ptr %fact, i64 3
  %sizes = getelementptr i64, ptr %fact, i64 4
  %strides = getelementptr i64, ptr %sizes, i64 %rank
  %fact.next = getelementptr i64, ptr %strides, i64 %rank
  %i.next = add i64 %i, 1
  br label %dimension
dimension:
  %left = phi i64 [ %rank, %one ], [ %d, %next ]
  %packed = phi i64 [ 1, %one ], [ %packed.next, %next ]
  %some = icmp sgt i64 %left, 0
  br i1 %some, label %look, label %done
look:
  %d = sub i64 %left, 1
  %size.slot = getelementptr i64, ptr %sizes, i64 %d
  %stride.slot = getelementptr i64, ptr %strides, i64 %d
  %size = load i64, ptr %size.slot
  %open = icmp slt i64 %size, 0
  br i1 %open, label %parameter, label %known
parameter:
  %word = sub i64 %size, {FIRST_PARAMETER}
  %number = and i64 %word, 255
  %parameter.slot = getelementptr i64, ptr %parameters, i64 %number
  %elements = load i64, ptr %parameter.slot
  %reached = lshr i64 %word, 32
  %further = lshr i64 %word, 8
  %stepped = and i64 %further, 16777215
  %more.than.reached = sub i64 %elements, %reached
  %room = add i64 %more.than.reached, %stepped
  %fails = icmp slt i64 %room, 0
  br i1 %fails, label %negative, label %divide
negative:
  ret i1 false
divide:
  %divisor = add i64 %stepped, 1
  %value = udiv i64 %room, %divisor
  store i64 %value, ptr %size.slot
  %some.bytes = load i64, ptr %bytes.slot
  %bytes = mul i64 %some.bytes, %value
  store i64 %bytes, ptr %bytes.slot
  br label %known
known:
  %extent = phi i64 [ %size, %look ], [ %value, %divide ]
  %stride = load i64, ptr %stride.slot
  %follows = icmp eq i64 %stride, {PACKED}
  %step = select i1 %follows, i64 %packed, i64 %stride
  store i64 %step, ptr %stride.slot
  br label %next
next:
  %nothing = icmp eq i64 %extent, 0
  %filled = select i1 %nothing, i64 1, i64 %extent
  %packed.next = mul i64 %step, %filled
  br label %dimension
done:
  br label %test
end:
  ret i1 true
}

; As `run`, for a cached call with parameters, on a copy of it for these values of them.
define internal i1 @run_range(
    ptr %call, ptr %kinds, ptr %stack, ptr %facts, i64 %count, ptr %results, ptr %parameters) {
  %total = call i64 @word(ptr %call, i64 13)
  %bytes = shl i64 %total, 3
  %copy = alloca i64, i64 %total, align 8
  call void @llvm.memcpy.p0.p0.i64(ptr %copy, ptr %call, i64 %bytes, i1 false)
  %made = call i64 @word(ptr %copy, i64 2)
  %made.facts = call ptr @part(ptr %copy, i64 8)
  %resolved = call i1 @resolve(ptr %made.facts, i64 %made, ptr %parameters)
  br i1 %resolved, label %launch, label %no
no:
  ret i1 false
launch:
  %ok = call i1 @run(ptr %copy, ptr %kinds, ptr %stack, ptr %facts, i64 %count, ptr %results, ptr %parameters)
  ret i1 %ok
}

; Find the kernel among the calls of a cache and run it.
define internal i1 @serve(ptr %cache, ptr %stack, ptr %numbers, i64 %count, ptr %results) {
  %kinds.slot = getelementptr ptr, ptr %cache, i64 1
  %readers = getelementptr i64, ptr %cache, i64 2
  %kinds = load ptr, ptr %kinds.slot
  %words = mul i64 %count, 4
  %facts.room = add i64 %words, 1
  %facts = alloca i64, i64 %facts.room
  %parameters = alloca [{MAX_PARAMETERS} x i64], align 64
  call void @describe(ptr %kinds, ptr %stack, ptr %numbers, i64 %count, ptr %facts)
  %entered = atomicrmw add ptr %readers, i64 1 seq_cst
  %paused = load i64, ptr @tc_paused
  %closed = icmp ne i64 %paused, 0
  br i1 %closed, label %leave, label %open
open:
  %calls = load atomic ptr, ptr %cache seq_cst, align 8
  %total = load i64, ptr %calls
  br label %test
test:
  %n = phi i64 [ 1, %open ], [ %next, %following ]
  %more = icmp sle i64 %n, %total
  br i1 %more, label %look, label %leave
look:
  %slot = getelementptr ptr, ptr %calls, i64 %n
  %call = load ptr, ptr %slot
  %guards = call ptr @part(ptr %call, i64 6)
  %open.sizes = call i64 @word(ptr %call, i64 12)
  %ranged = icmp sgt i64 %open.sizes, 0
  br i1 %ranged, label %clear, label %compare
clear:
  call void @llvm.memset.p0.i64(ptr align 64 %parameters, i8 -1, i64 {8 * MAX_PARAMETERS}, i1 false)
  br label %compare
compare:
  %fit = call i1 @fits(ptr %guards, ptr %kinds, ptr %facts, i64 %count, ptr %parameters)
  br i1 %fit, label %choose, label %following
following:
  %next = add i64 %n, 1
  br label %test
choose:
  br i1 %ranged, label %go.range, label %go
go:
  %ok = call i1 @run(ptr %call, ptr %kinds, ptr %stack, ptr %facts, i64 %count, ptr %results, ptr null)
  br label %leave
go.range:
  %range.ok = call i1 @run_range(
    ptr %call, ptr %kinds, ptr %stack, ptr %facts, i64 %count, ptr %results, ptr %parameters)
  br label %leave
leave:
  %done = phi i1 [ false, %0 ], [ false, %test ], [ %ok, %go ], [ %range.ok, %go.range ]
  %left = atomicrmw sub ptr %readers, i64 1 seq_cst
  ret i1 %done
}
"""
