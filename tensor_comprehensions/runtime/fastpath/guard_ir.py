"""The LLVM assembly of guards, which decide from its arguments whether a cached call serves a call (`launch_ir`)."""

from __future__ import annotations

from .launch_ir import ANY, FIRST_PARAMETER, MAX_PARAMETERS, PACKED


def guard_assembly(keys_offset: int, plain_keys: int, inference_keys: int) -> str:
    """The functions `@numeric`, `@seen_by`, `@describe` and `@fits`.

    Args:
        keys_offset: the offset of the dispatch keys in a C++ tensor, in bytes.
        plain_keys, inference_keys: the keys of an ordinary tensor, and of one made in inference mode.
    """
    text = _DECLARATIONS + _GUARDS
    facts = {"keys_offset": keys_offset, "plain_keys": plain_keys, "inference_keys": inference_keys}
    facts |= {"ANY": ANY, "PACKED": PACKED, "FIRST_PARAMETER": FIRST_PARAMETER, "MAX_PARAMETERS": MAX_PARAMETERS}
    for name, value in facts.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


_DECLARATIONS = r"""
declare i32 @aoti_torch_get_sizes(ptr, ptr)
declare i32 @aoti_torch_get_strides(ptr, ptr)
declare i32 @aoti_torch_get_dtype(ptr, ptr)
declare i32 @aoti_torch_get_dim(ptr, ptr)
declare i32 @aoti_torch_is_defined(ptr, ptr)
declare zeroext i1 @aoti_torch_grad_mode_is_enabled()
declare zeroext i1 @_ZNK3c1010TensorImpl13requires_gradEv(ptr)
declare ptr @_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE(ptr, i64, ptr)
declare zeroext i1 @_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb(i1 zeroext)
"""

_GUARDS = r"""
; Whether an argument is given as a number.
define internal i1 @numeric(i64 %kind, ptr %value) alwaysinline {
  %constant = icmp eq i64 %kind, 1
  %either = icmp ne i64 %kind, 0
  %null = icmp eq ptr %value, null
  %free = and i1 %either, %null
  %number = or i1 %constant, %free
  ret i1 %number
}

; Who has to see a call: 1, nobody but a kernel: ordinary tensors, nothing to record, no mode; 2, autograd besides,
; which is to record it; 0, others.
define internal i64 @seen_by(ptr %kinds, ptr %stack, i64 %count) {
  %defined = alloca i8
  %modes = call zeroext i1 @_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb(i1 zeroext false)
  br i1 %modes, label %no, label %start
start:
  %grad = call zeroext i1 @aoti_torch_grad_mode_is_enabled()
  br label %test
test:
  %i = phi i64 [ 0, %start ], [ %next, %following ]
  %who = phi i64 [ 1, %start ], [ %who.next, %following ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %done
look:
  %kind.slot = getelementptr i64, ptr %kinds, i64 %i
  %kind = load i64, ptr %kind.slot
  %slot = getelementptr ptr, ptr %stack, i64 %i
  %handle = load ptr, ptr %slot
  %number = call i1 @numeric(i64 %kind, ptr %handle)
  br i1 %number, label %following, label %tensor
tensor:
  %inside = load ptr, ptr %handle
  %keys.slot = getelementptr i8, ptr %inside, i64 {keys_offset}
  %keys = load i64, ptr %keys.slot
  %inference = icmp eq i64 %keys, {inference_keys}
  br i1 %inference, label %following, label %normal
normal:
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
  %who.asked = select i1 %required, i64 2, i64 %who
  br label %following
following:
  %who.next = phi i64 [ %who, %look ], [ %who, %tensor ], [ %who, %gradient ], [ %who.asked, %asked ]
  %next = add i64 %i, 1
  br label %test
done:
  ret i64 %who
no:
  ret i64 0
}

; Whether `count` sizes are as expected. A parameter stands for what it meets first.
define internal i1 @same_sizes(ptr %expected, ptr %found, i64 %count, ptr %parameters) alwaysinline {
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
  br i1 %equal, label %same, label %open
open:
  %number = sub i64 %e, {FIRST_PARAMETER}
  %is.parameter = icmp ult i64 %number, {MAX_PARAMETERS}
  br i1 %is.parameter, label %parameter, label %no
parameter:
  %slot = getelementptr i64, ptr %parameters, i64 %number
  %known = load i64, ptr %slot
  %first = icmp eq i64 %known, -1
  br i1 %first, label %set, label %again
set:
  store i64 %f, ptr %slot
  br label %same
again:
  %as.before = icmp eq i64 %known, %f
  br i1 %as.before, label %same, label %no
same:
  %next = add i64 %i, 1
  br label %test
yes:
  ret i1 true
no:
  ret i1 false
}

; Whether `count` strides are as expected, where that matters. One that is packed follows from the next as it is
; expected: the stride of a single element means nothing.
define internal i1 @same_strides(ptr %expected, ptr %found, ptr %sizes, i64 %count, ptr %parameters) alwaysinline {
  br label %test
test:
  %left = phi i64 [ %count, %0 ], [ %i, %same ]
  %packed = phi i64 [ 1, %0 ], [ %packed.next, %same ]
  %more = icmp sgt i64 %left, 0
  br i1 %more, label %compare, label %yes
compare:
  %i = sub i64 %left, 1
  %expected.slot = getelementptr i64, ptr %expected, i64 %i
  %found.slot = getelementptr i64, ptr %found, i64 %i
  %size.slot = getelementptr i64, ptr %sizes, i64 %i
  %e = load i64, ptr %expected.slot
  %f = load i64, ptr %found.slot
  %size = load i64, ptr %size.slot
  %equal = icmp eq i64 %e, %f
  br i1 %equal, label %same, label %otherwise
otherwise:
  %single = icmp eq i64 %size, 1
  %any = icmp eq i64 %e, {ANY}
  %is.packed = icmp eq i64 %e, {PACKED}
  %step = select i1 %is.packed, i64 %packed, i64 %e
  %follows = icmp eq i64 %f, %step
  %number = sub i64 %e, {FIRST_PARAMETER}
  %is.parameter = icmp ult i64 %number, {MAX_PARAMETERS}
  br i1 %is.parameter, label %parameter, label %decide
parameter:
  %slot = getelementptr i64, ptr %parameters, i64 %number
  store i64 %f, ptr %slot
  br label %same
decide:
  %fits.once = or i1 %single, %any
  %fits = or i1 %fits.once, %follows
  br i1 %fits, label %same, label %no
same:
  %kept = phi i64 [ %e, %compare ], [ %f, %parameter ], [ %step, %decide ]
  %packed.next = mul i64 %kept, %size
  br label %test
yes:
  ret i1 true
no:
  ret i1 false
}

; Four words for each argument: sizes, strides, dtype, rank; of a number, its value or its bits come first.
define internal void @describe(ptr %kinds, ptr %stack, ptr %numbers, i64 %count, ptr %facts) {
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
  %strides = getelementptr i64, ptr %sizes, i64 1
  %dtype = getelementptr i64, ptr %sizes, i64 2
  %rank = getelementptr i64, ptr %sizes, i64 3
  store i64 0, ptr %dtype
  store i64 -1, ptr %rank
  %number = call i1 @numeric(i64 %kind, ptr %value)
  br i1 %number, label %keep, label %ask
keep:
  %constant = icmp eq i64 %kind, 1
  br i1 %constant, label %integer, label %free
integer:
  store ptr %value, ptr %sizes
  br label %following
free:
  %bits.slot = getelementptr i64, ptr %numbers, i64 %i
  %bits = load i64, ptr %bits.slot
  %type = sub i64 %kind, 2
  store i64 %bits, ptr %sizes
  store i64 %type, ptr %dtype
  store i64 0, ptr %rank
  br label %following
ask:
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

define internal i1 @fits(ptr %guards, ptr %kinds, ptr %facts, i64 %count, ptr %parameters) {
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
  %constant = icmp eq i64 %kind, 1
  br i1 %constant, label %value, label %tensor
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
  %same.sizes = call i1 @same_sizes(ptr %guard.sizes, ptr %found, i64 %rank, ptr %parameters)
  br i1 %same.sizes, label %strides, label %no
strides:
  %strides.slot = getelementptr i64, ptr %fact, i64 1
  %found.strides = load ptr, ptr %strides.slot
  %guard.strides = getelementptr i64, ptr %guard.sizes, i64 %rank
  %after.tensor = getelementptr i64, ptr %guard.strides, i64 %rank
  %same.strides = call i1 @same_strides(ptr %guard.strides, ptr %found.strides, ptr %found, i64 %rank, ptr %parameters)
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
"""
