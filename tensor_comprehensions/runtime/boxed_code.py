"""The LLVM text of `boxed`: kernels that torch's dispatcher calls with a stack of arguments.

A lane is a block of words: entry, inputs, outputs, temporaries, bytes of the arena, and the places (in bytes from its
start) of the guards, the outputs and the offsets of temporaries. Guards are, for a number, its value, and for a tensor
its dtype, rank, sizes and strides. An output is its dtype, rank, source, bytes, sizes and strides.
"""

from __future__ import annotations

THUNKS = 32
"""How many cells one piece of code serves."""
CELL_WORDS = 4


CALLBACK, PAUSED = "tc_boxed_callback", "tc_boxed_paused"
"""Symbols: the way back to Python, and a word that is not 0 while no kernel is to be looked for."""


def cells_symbol(first: int) -> str:
    """The symbol of the words of cells, of which the callback knows the first as `first`."""
    return f"tc_boxed_cells_{first}"


def assembly(first: int, keys_offset: int, plain_keys: int) -> str:
    """The code for the cells at `cells_symbol(first)`. It is the same in every process.

    Args:
        keys_offset, plain_keys: where a tensor keeps its dispatch keys, and which those of an ordinary tensor are.
    """
    text = _CODE.replace("{keys_offset}", str(keys_offset)).replace("{plain_keys}", str(plain_keys))
    cells = cells_symbol(first)
    text += f"\n@{cells} = external global i64\n"
    thunks = [
        _THUNK.replace("{function}", function)
        .replace("{slot}", str(slot))
        .replace("{cell}", f"getelementptr (i64, ptr @{cells}, i64 {CELL_WORDS * slot})")
        .replace("{index}", str(first + slot))
        for slot in range(THUNKS)
        for function in ("compute", "record")
    ]
    return text + "".join(thunks)


_THUNK = """
define void @tc_{function}_{slot}(ptr %stack, i64 %count, i64 %outputs) uwtable {
  call void @{function}(i64 {index}, ptr {cell}, ptr %stack, i64 %count, i64 %outputs)
  ret void
}
"""

_CODE = r"""
declare i32 @aoti_torch_get_sizes(ptr, ptr)
declare i32 @aoti_torch_get_strides(ptr, ptr)
declare i32 @aoti_torch_get_dtype(ptr, ptr)
declare i32 @aoti_torch_get_dim(ptr, ptr)
declare i32 @aoti_torch_get_data_ptr(ptr, ptr)
declare i32 @aoti_torch_empty_strided(i64, ptr, ptr, i32, i32, i32, ptr)
declare i32 @aoti_torch_delete_tensor_object(ptr)
declare i32 @aoti_torch_is_defined(ptr, ptr)
declare zeroext i1 @aoti_torch_grad_mode_is_enabled()
declare zeroext i1 @_ZNK3c1010TensorImpl13requires_gradEv(ptr)
declare ptr @_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE(ptr, i64, ptr)
declare zeroext i1 @_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb(i1 zeroext)
declare ptr @__cxa_allocate_exception(i64)
declare void @__cxa_throw(ptr, ptr, ptr)
declare i32 @tc_boxed_callback(i64, i64, i64, i64, i64, ptr)
@tc_boxed_paused = external global i64
declare i32 @PyGILState_Ensure()
declare void @PyGILState_Release(i32)
declare void @Py_DecRef(ptr)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

; What torch's C++ code throws for an exception that Python has raised: the class `python_error`, known by its name.
@_ZTVN10__cxxabiv120__si_class_type_infoE = external global ptr
@_ZTISt9exception = external global ptr
@name = private constant [16 x i8] c"12python_error\00\00"
@what.text = private constant [14 x i8] c"python_error\00\00"
@type = private constant { ptr, ptr, ptr } {
  ptr getelementptr (ptr, ptr @_ZTVN10__cxxabiv120__si_class_type_infoE, i64 2), ptr @name, ptr @_ZTISt9exception
}
@table = private constant { ptr, ptr, ptr, ptr, ptr } { ptr null, ptr @type, ptr @destroy, ptr @destroy, ptr @what }

define internal ptr @what(ptr %error) {
  ret ptr @what.text
}

define internal void @release(ptr %error, i64 %slot) {
  %place = getelementptr ptr, ptr %error, i64 %slot
  %object = load ptr, ptr %place
  store ptr null, ptr %place
  %none = icmp eq ptr %object, null
  br i1 %none, label %done, label %some
some:
  call void @Py_DecRef(ptr %object)
  br label %done
done:
  ret void
}

define internal void @destroy(ptr %error) {
  %lock = call i32 @PyGILState_Ensure()
  call void @release(ptr %error, i64 1)
  call void @release(ptr %error, i64 2)
  call void @release(ptr %error, i64 3)
  call void @PyGILState_Release(i32 %lock)
  ret void
}

; Throw with the type, the value and the traceback at `parts`, and an empty message.
define internal void @throw(ptr %parts) uwtable noreturn {
  %error = call ptr @__cxa_allocate_exception(i64 64)
  store ptr getelementptr (ptr, ptr @table, i64 2), ptr %error
  %objects = getelementptr ptr, ptr %error, i64 1
  call void @llvm.memcpy.p0.p0.i64(ptr %objects, ptr %parts, i64 24, i1 false)
  %message = getelementptr ptr, ptr %error, i64 4
  %length = getelementptr ptr, ptr %error, i64 5
  %text = getelementptr ptr, ptr %error, i64 6
  store ptr %text, ptr %message
  store i64 0, ptr %length
  store i64 0, ptr %text
  call void @__cxa_throw(ptr %error, ptr @type, ptr @destroy)
  unreachable
}

; On in Python, which takes over the arguments.
define internal void @python(i64 %index, i64 %layer, ptr %stack, i64 %count, i64 %outputs) uwtable {
  %parts = alloca ptr, i64 3
  %address = ptrtoint ptr %stack to i64
  %failed = call i32 @tc_boxed_callback(
    i64 %index, i64 %layer, i64 %address, i64 %count, i64 %outputs, ptr %parts)
  %fine = icmp eq i32 %failed, 0
  br i1 %fine, label %done, label %raise
raise:
  call void @throw(ptr %parts)
  unreachable
done:
  ret void
}

; Whether `count` numbers agree, leaving out those expected as the smallest integer.
define internal i1 @agree(ptr %expected, ptr %found, i64 %count) alwaysinline {
  br label %test
test:
  %i = phi i64 [ 0, %0 ], [ %next, %same ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %compare, label %yes
compare:
  %expected.slot = getelementptr i64, ptr %expected, i64 %i
  %found.slot = getelementptr i64, ptr %found, i64 %i
  %e = load i64, ptr %expected.slot
  %f = load i64, ptr %found.slot
  %equal = icmp eq i64 %e, %f
  %any = icmp eq i64 %e, -9223372036854775808
  %ok = or i1 %equal, %any
  br i1 %ok, label %same, label %no
same:
  %next = add i64 %i, 1
  br label %test
yes:
  ret i1 true
no:
  ret i1 false
}

; Four words for each argument: sizes, strides, dtype, rank; of a number only its value.
define internal void @describe(ptr %kinds, ptr %stack, i64 %count, ptr %facts) {
  br label %test
test:
  %i = phi i64 [ 0, %0 ], [ %next, %following ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %done
look:
  %kind.slot = getelementptr i64, ptr %kinds, i64 %i
  %kind = load i64, ptr %kind.slot
  %slot = getelementptr ptr, ptr %stack, i64 %i
  %value = load ptr, ptr %slot
  %at = mul i64 %i, 4
  %sizes = getelementptr i64, ptr %facts, i64 %at
  %number = icmp ne i64 %kind, 0
  br i1 %number, label %keep, label %ask
keep:
  store ptr %value, ptr %sizes
  br label %following
ask:
  %strides = getelementptr i64, ptr %sizes, i64 1
  %dtype = getelementptr i64, ptr %sizes, i64 2
  %rank = getelementptr i64, ptr %sizes, i64 3
  store i64 0, ptr %dtype
  store i64 -1, ptr %rank
  %e0 = call i32 @aoti_torch_get_sizes(ptr %value, ptr %sizes)
  %e1 = call i32 @aoti_torch_get_strides(ptr %value, ptr %strides)
  %e2 = call i32 @aoti_torch_get_dtype(ptr %value, ptr %dtype)
  %e3 = call i32 @aoti_torch_get_dim(ptr %value, ptr %rank)
  %e01 = or i32 %e0, %e1
  %e012 = or i32 %e01, %e2
  %e = or i32 %e012, %e3
  %fine = icmp eq i32 %e, 0
  br i1 %fine, label %following, label %unknown
unknown:
  store i64 -1, ptr %rank
  br label %following
following:
  %next = add i64 %i, 1
  br label %test
done:
  ret void
}

define internal i1 @fits(ptr %lane, ptr %kinds, ptr %facts, i64 %count) {
  %guards.slot = getelementptr i64, ptr %lane, i64 5
  %guards.at = load i64, ptr %guards.slot
  %guards = getelementptr i8, ptr %lane, i64 %guards.at
  br label %test
test:
  %i = phi i64 [ 0, %0 ], [ %next, %following ]
  %guard = phi ptr [ %guards, %0 ], [ %guard.next, %following ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %yes
look:
  %kind.slot = getelementptr i64, ptr %kinds, i64 %i
  %kind = load i64, ptr %kind.slot
  %at = mul i64 %i, 4
  %fact = getelementptr i64, ptr %facts, i64 %at
  %found = load ptr, ptr %fact
  %expected = load i64, ptr %guard
  %number = icmp ne i64 %kind, 0
  br i1 %number, label %value, label %tensor
value:
  %found.number = ptrtoint ptr %found to i64
  %same.number = icmp eq i64 %found.number, %expected
  %after.number = getelementptr i64, ptr %guard, i64 1
  br i1 %same.number, label %following, label %no
tensor:
  %dtype.slot = getelementptr i64, ptr %fact, i64 2
  %rank.slot = getelementptr i64, ptr %fact, i64 3
  %guard.rank.slot = getelementptr i64, ptr %guard, i64 1
  %dtype = load i64, ptr %dtype.slot
  %rank = load i64, ptr %rank.slot
  %guard.rank = load i64, ptr %guard.rank.slot
  %same.dtype = icmp eq i64 %dtype, %expected
  %same.rank = icmp eq i64 %rank, %guard.rank
  %same.type = and i1 %same.dtype, %same.rank
  br i1 %same.type, label %sizes, label %no
sizes:
  %guard.sizes = getelementptr i64, ptr %guard, i64 2
  %same.sizes = call i1 @agree(ptr %guard.sizes, ptr %found, i64 %rank)
  br i1 %same.sizes, label %strides, label %no
strides:
  %strides.slot = getelementptr i64, ptr %fact, i64 1
  %found.strides = load ptr, ptr %strides.slot
  %guard.strides = getelementptr i64, ptr %guard.sizes, i64 %rank
  %after.tensor = getelementptr i64, ptr %guard.strides, i64 %rank
  %same.strides = call i1 @agree(ptr %guard.strides, ptr %found.strides, i64 %rank)
  br i1 %same.strides, label %following, label %no
following:
  %guard.next = phi ptr [ %after.number, %value ], [ %after.tensor, %strides ]
  %next = add i64 %i, 1
  br label %test
yes:
  ret i1 true
no:
  ret i1 false
}

define internal void @drop(ptr %handles, i64 %count, ptr %kinds) {
  br label %test
test:
  %i = phi i64 [ 0, %0 ], [ %next, %following ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %done
look:
  %known = icmp ne ptr %kinds, null
  br i1 %known, label %ask, label %delete
ask:
  %kind.slot = getelementptr i64, ptr %kinds, i64 %i
  %kind = load i64, ptr %kind.slot
  %number = icmp ne i64 %kind, 0
  br i1 %number, label %following, label %delete
delete:
  %slot = getelementptr ptr, ptr %handles, i64 %i
  %handle = load ptr, ptr %slot
  %ignored = call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  br label %following
following:
  %next = add i64 %i, 1
  br label %test
done:
  ret void
}

; A new tensor as `fact` (dtype, rank, then sizes and strides) says; false where there is no memory.
define internal i1 @new(i64 %dtype, i64 %rank, ptr %sizes, ptr %strides, ptr %handle, ptr %data) {
  %kind = trunc i64 %dtype to i32
  %error = call i32 @aoti_torch_empty_strided(i64 %rank, ptr %sizes, ptr %strides, i32 %kind, i32 0, i32 0, ptr %handle)
  %fine = icmp eq i32 %error, 0
  br i1 %fine, label %made, label %no
made:
  %tensor = load ptr, ptr %handle
  %ignored = call i32 @aoti_torch_get_data_ptr(ptr %tensor, ptr %data)
  ret i1 true
no:
  ret i1 false
}

; Run the kernel of a lane. True if all went well: then the results are on the stack, and the arguments are gone.
define internal i1 @run(ptr %lane, ptr %kinds, ptr %stack, i64 %count) {
  %status = alloca { i64, i64 }
  %arena.handle = alloca ptr
  %arena.data = alloca ptr
  %arena.size = alloca i64
  %one = alloca i64
  %from.data = alloca ptr
  store i64 1, ptr %one
  store ptr null, ptr %arena.handle
  store ptr null, ptr %arena.data
  %entry = load ptr, ptr %lane
  %inputs.slot = getelementptr i64, ptr %lane, i64 1
  %outputs.slot = getelementptr i64, ptr %lane, i64 2
  %temporaries.slot = getelementptr i64, ptr %lane, i64 3
  %arena.slot = getelementptr i64, ptr %lane, i64 4
  %guards.slot = getelementptr i64, ptr %lane, i64 5
  %made.slot = getelementptr i64, ptr %lane, i64 6
  %offsets.slot = getelementptr i64, ptr %lane, i64 7
  %inputs = load i64, ptr %inputs.slot
  %outputs = load i64, ptr %outputs.slot
  %temporaries = load i64, ptr %temporaries.slot
  %arena = load i64, ptr %arena.slot
  %guards.at = load i64, ptr %guards.slot
  %made.at = load i64, ptr %made.slot
  %offsets.at = load i64, ptr %offsets.slot
  %guards = getelementptr i8, ptr %lane, i64 %guards.at
  %made = getelementptr i8, ptr %lane, i64 %made.at
  %offsets = getelementptr i8, ptr %lane, i64 %offsets.at
  store i64 %arena, ptr %arena.size
  %operands = add i64 %inputs, %outputs
  %all = add i64 %operands, %temporaries
  %room = add i64 %all, 1
  %addresses = alloca ptr, i64 %room
  %handles.room = add i64 %outputs, 1
  %handles = alloca ptr, i64 %handles.room
  br label %input
input:
  %i = phi i64 [ 0, %0 ], [ %i.next, %input.known ]
  %guard = phi ptr [ %guards, %0 ], [ %guard.next, %input.known ]
  %more = icmp slt i64 %i, %inputs
  br i1 %more, label %input.look, label %output
input.look:
  %kind.slot = getelementptr i64, ptr %kinds, i64 %i
  %kind = load i64, ptr %kind.slot
  %address.slot = getelementptr ptr, ptr %addresses, i64 %i
  %number = icmp ne i64 %kind, 0
  br i1 %number, label %input.number, label %input.tensor
input.number:
  store ptr %guard, ptr %address.slot
  %after.number = getelementptr i64, ptr %guard, i64 1
  br label %input.known
input.tensor:
  %argument.slot = getelementptr ptr, ptr %stack, i64 %i
  %argument = load ptr, ptr %argument.slot
  %e.data = call i32 @aoti_torch_get_data_ptr(ptr %argument, ptr %address.slot)
  %rank.slot = getelementptr i64, ptr %guard, i64 1
  %rank = load i64, ptr %rank.slot
  %double.rank = shl i64 %rank, 1
  %words = add i64 %double.rank, 2
  %after.tensor = getelementptr i64, ptr %guard, i64 %words
  %has.data = icmp eq i32 %e.data, 0
  br i1 %has.data, label %input.known, label %fail.none
input.known:
  %guard.next = phi ptr [ %after.number, %input.number ], [ %after.tensor, %input.tensor ]
  %i.next = add i64 %i, 1
  br label %input
output:
  %o = phi i64 [ 0, %input ], [ %o.next, %output.known ]
  %fact = phi ptr [ %made, %input ], [ %fact.next, %output.known ]
  %o.more = icmp slt i64 %o, %outputs
  br i1 %o.more, label %output.make, label %scratch
output.make:
  %o.rank.slot = getelementptr i64, ptr %fact, i64 1
  %o.source.slot = getelementptr i64, ptr %fact, i64 2
  %o.bytes.slot = getelementptr i64, ptr %fact, i64 3
  %o.sizes = getelementptr i64, ptr %fact, i64 4
  %o.dtype = load i64, ptr %fact
  %o.rank = load i64, ptr %o.rank.slot
  %o.source = load i64, ptr %o.source.slot
  %o.bytes = load i64, ptr %o.bytes.slot
  %o.strides = getelementptr i64, ptr %o.sizes, i64 %o.rank
  %fact.next = getelementptr i64, ptr %o.strides, i64 %o.rank
  %o.place = add i64 %inputs, %o
  %o.slot = getelementptr ptr, ptr %addresses, i64 %o.place
  %o.handle = getelementptr ptr, ptr %handles, i64 %o
  %o.ok = call i1 @new(i64 %o.dtype, i64 %o.rank, ptr %o.sizes, ptr %o.strides, ptr %o.handle, ptr %o.slot)
  br i1 %o.ok, label %output.start, label %fail.some
output.start:
  %starts = icmp sge i64 %o.source, 0
  br i1 %starts, label %output.copy, label %output.known
output.copy:
  %from.slot = getelementptr ptr, ptr %stack, i64 %o.source
  %from = load ptr, ptr %from.slot
  %e.from = call i32 @aoti_torch_get_data_ptr(ptr %from, ptr %from.data)
  %source.data = load ptr, ptr %from.data
  %target.data = load ptr, ptr %o.slot
  call void @llvm.memcpy.p0.p0.i64(ptr %target.data, ptr %source.data, i64 %o.bytes, i1 false)
  br label %output.known
output.known:
  %o.next = add i64 %o, 1
  br label %output
scratch:
  %needs = icmp sgt i64 %temporaries, 0
  br i1 %needs, label %scratch.make, label %ready
scratch.make:
  %a.ok = call i1 @new(i64 0, i64 1, ptr %arena.size, ptr %one, ptr %arena.handle, ptr %arena.data)
  br i1 %a.ok, label %scratch.divide, label %fail.some
scratch.divide:
  %base = load ptr, ptr %arena.data
  br label %part
part:
  %t = phi i64 [ 0, %scratch.divide ], [ %t.next, %part ]
  %offset.slot = getelementptr i64, ptr %offsets, i64 %t
  %offset = load i64, ptr %offset.slot
  %temporary = getelementptr i8, ptr %base, i64 %offset
  %t.place = add i64 %operands, %t
  %t.slot = getelementptr ptr, ptr %addresses, i64 %t.place
  store ptr %temporary, ptr %t.slot
  %t.next = add i64 %t, 1
  %t.more = icmp slt i64 %t.next, %temporaries
  br i1 %t.more, label %part, label %ready
ready:
  %status.slot = getelementptr ptr, ptr %addresses, i64 %all
  store ptr %status, ptr %status.slot
  %code = call i64 %entry(ptr %addresses)
  %held = load ptr, ptr %arena.handle
  %has.arena = icmp ne ptr %held, null
  br i1 %has.arena, label %free, label %judge
free:
  %e.free = call i32 @aoti_torch_delete_tensor_object(ptr %held)
  br label %judge
judge:
  %success = icmp eq i64 %code, 0
  br i1 %success, label %done, label %fail.all
done:
  call void @drop(ptr %stack, i64 %count, ptr %kinds)
  %bytes = shl i64 %outputs, 3
  call void @llvm.memcpy.p0.p0.i64(ptr %stack, ptr %handles, i64 %bytes, i1 false)
  ret i1 true
fail.some:
  %so.far = phi i64 [ %o, %output.make ], [ %outputs, %scratch.make ]
  call void @drop(ptr %handles, i64 %so.far, ptr null)
  ret i1 false
fail.all:
  call void @drop(ptr %handles, i64 %outputs, ptr null)
  ret i1 false
fail.none:
  ret i1 false
}

; Find the kernel among the lanes of a cell and run it. A cell: table, kinds, how many calls look at a table.
define internal i1 @serve(ptr %cell, ptr %stack, i64 %count) {
  %kinds.slot = getelementptr ptr, ptr %cell, i64 1
  %readers = getelementptr i64, ptr %cell, i64 2
  %kinds = load ptr, ptr %kinds.slot
  %words = mul i64 %count, 4
  %facts.room = add i64 %words, 1
  %facts = alloca i64, i64 %facts.room
  call void @describe(ptr %kinds, ptr %stack, i64 %count, ptr %facts)
  %entered = atomicrmw add ptr %readers, i64 1 seq_cst
  %paused = load i64, ptr @tc_boxed_paused
  %closed = icmp ne i64 %paused, 0
  br i1 %closed, label %leave, label %open
open:
  %lanes = load atomic ptr, ptr %cell seq_cst, align 8
  %total = load i64, ptr %lanes
  br label %test
test:
  %n = phi i64 [ 1, %open ], [ %next, %following ]
  %more = icmp sle i64 %n, %total
  br i1 %more, label %look, label %leave
look:
  %slot = getelementptr ptr, ptr %lanes, i64 %n
  %lane = load ptr, ptr %slot
  %fit = call i1 @fits(ptr %lane, ptr %kinds, ptr %facts, i64 %count)
  br i1 %fit, label %go, label %following
following:
  %next = add i64 %n, 1
  br label %test
go:
  %ok = call i1 @run(ptr %lane, ptr %kinds, ptr %stack, i64 %count)
  br label %leave
leave:
  %done = phi i1 [ false, %0 ], [ false, %test ], [ %ok, %go ]
  %left = atomicrmw sub ptr %readers, i64 1 seq_cst
  ret i1 %done
}

define internal void @compute(i64 %index, ptr %cell, ptr %stack, i64 %count, i64 %outputs) uwtable {
  %done = call i1 @serve(ptr %cell, ptr %stack, i64 %count)
  br i1 %done, label %end, label %slow
slow:
  call void @python(i64 %index, i64 0, ptr %stack, i64 %count, i64 %outputs)
  br label %end
end:
  ret void
}

; Whether nobody but a kernel has to see a call: ordinary tensors, nothing to record, no mode.
define internal i1 @ordinary(ptr %kinds, ptr %stack, i64 %count) {
  %defined = alloca i8
  %modes = call zeroext i1 @_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb(i1 zeroext false)
  br i1 %modes, label %no, label %start
start:
  %grad = call zeroext i1 @aoti_torch_grad_mode_is_enabled()
  br label %test
test:
  %i = phi i64 [ 0, %start ], [ %next, %following ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %yes
look:
  %kind.slot = getelementptr i64, ptr %kinds, i64 %i
  %kind = load i64, ptr %kind.slot
  %number = icmp ne i64 %kind, 0
  br i1 %number, label %following, label %tensor
tensor:
  %slot = getelementptr ptr, ptr %stack, i64 %i
  %handle = load ptr, ptr %slot
  %inside = load ptr, ptr %handle
  %keys.slot = getelementptr i8, ptr %inside, i64 {keys_offset}
  %keys = load i64, ptr %keys.slot
  %plain = icmp eq i64 %keys, {plain_keys}
  br i1 %plain, label %tangent, label %no
tangent:
  %moves = call ptr @_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE(ptr %inside, i64 0, ptr %handle)
  %e = call i32 @aoti_torch_is_defined(ptr %moves, ptr %defined)
  %has.tangent = load i8, ptr %defined
  %still = icmp eq i8 %has.tangent, 0
  br i1 %still, label %gradient, label %no
gradient:
  br i1 %grad, label %asked, label %following
asked:
  %required = call zeroext i1 @_ZNK3c1010TensorImpl13requires_gradEv(ptr %inside)
  br i1 %required, label %no, label %following
following:
  %next = add i64 %i, 1
  br label %test
yes:
  ret i1 true
no:
  ret i1 false
}

define internal void @record(i64 %index, ptr %cell, ptr %stack, i64 %count, i64 %outputs) uwtable {
  %kinds.slot = getelementptr ptr, ptr %cell, i64 1
  %kinds = load ptr, ptr %kinds.slot
  %fine = call i1 @ordinary(ptr %kinds, ptr %stack, i64 %count)
  br i1 %fine, label %fast, label %slow
fast:
  call void @compute(i64 %index, ptr %cell, ptr %stack, i64 %count, i64 %outputs)
  ret void
slow:
  call void @python(i64 %index, i64 1, ptr %stack, i64 %count, i64 %outputs)
  ret void
}
"""
