"""The LLVM assembly of `boxed`: two functions per call cache, called by torch's dispatcher with a stack of arguments.

The stack owns its content: numbers and handles of tensors, which the results replace.
"""

from __future__ import annotations

from .launch_ir import CALL_CACHE_WORDS

THUNKS = 32
"""The number of call caches that one module of code serves."""

CALLBACK = "tc_boxed_callback"
"""The symbol of the Python function for calls that no kernel fits. It returns, or raises: no code between it and the
dispatcher could lose an interrupt.
"""


def call_caches_symbol(first: int) -> str:
    """The symbol of the words of the `THUNKS` call caches from index `first` on."""
    return f"tc_boxed_call_caches_{first}"


def dispatcher_assembly(first: int) -> str:
    """The functions of the call caches at `call_caches_symbol(first)`; they need the code of `launch_assembly`.

    The text is the same in every process.
    """
    caches = call_caches_symbol(first)
    thunks = [
        _THUNK.replace("{function}", function)
        .replace("{slot}", str(slot))
        .replace("{cache}", f"getelementptr (i64, ptr @{caches}, i64 {CALL_CACHE_WORDS * slot})")
        .replace("{index}", str(first + slot))
        for slot in range(THUNKS)
        for function in ("compute", "record")
    ]
    return _CODE + f"\n@{caches} = external global i64\n" + "".join(thunks)


_THUNK = """
define void @tc_{function}_{slot}(ptr %stack, i64 %count, i64 %outputs) uwtable {
  call void @{function}(i64 {index}, ptr {cache}, ptr %stack, i64 %count, i64 %outputs)
  ret void
}
"""

_CODE = r"""
declare ptr @__cxa_allocate_exception(i64)
declare void @__cxa_throw(ptr, ptr, ptr)
@tc_boxed_callback = external global i8
@five.numbers = private constant [6 x i8] c"LLLLL\00"
declare ptr @PyObject_CallFunction(ptr, ptr, ...)
declare void @PyErr_Fetch(ptr, ptr, ptr)
declare void @PyErr_NormalizeException(ptr, ptr, ptr)
declare i32 @PyGILState_Ensure()
declare void @PyGILState_Release(i32)
declare void @Py_DecRef(ptr)

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
  %value = getelementptr ptr, ptr %parts, i64 1
  %traceback = getelementptr ptr, ptr %parts, i64 2
  %address = ptrtoint ptr %stack to i64
  %lock = call i32 @PyGILState_Ensure()
  %result = call ptr (ptr, ptr, ...) @PyObject_CallFunction(
    ptr @tc_boxed_callback, ptr @five.numbers, i64 %index, i64 %layer, i64 %address, i64 %count, i64 %outputs)
  %failed = icmp eq ptr %result, null
  br i1 %failed, label %raise, label %done
raise:
  call void @PyErr_Fetch(ptr %parts, ptr %value, ptr %traceback)
  call void @PyErr_NormalizeException(ptr %parts, ptr %value, ptr %traceback)
  call void @PyGILState_Release(i32 %lock)
  call void @throw(ptr %parts)
  unreachable
done:
  call void @Py_DecRef(ptr %result)
  call void @PyGILState_Release(i32 %lock)
  ret void
}

; Give up the tensors among the arguments.
define internal void @release.arguments(ptr %kinds, ptr %stack, i64 %count) {
  br label %test
test:
  %i = phi i64 [ 0, %0 ], [ %next, %following ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %done
look:
  %kind = call i64 @word(ptr %kinds, i64 %i)
  %tensor = icmp eq i64 %kind, 0
  br i1 %tensor, label %delete, label %following
delete:
  %slot = getelementptr ptr, ptr %stack, i64 %i
  call void @drop(ptr %slot, i64 1)
  br label %following
following:
  %next = add i64 %i, 1
  br label %test
done:
  ret void
}

define internal void @compute(i64 %index, ptr %cache, ptr %stack, i64 %count, i64 %outputs) uwtable {
  %room = add i64 %outputs, 1
  %results = alloca ptr, i64 %room
  %done = call i1 @serve(ptr %cache, ptr %stack, ptr null, i64 %count, ptr %results)
  br i1 %done, label %fast, label %slow
fast:
  %kinds.slot = getelementptr ptr, ptr %cache, i64 1
  %kinds = load ptr, ptr %kinds.slot
  call void @release.arguments(ptr %kinds, ptr %stack, i64 %count)
  %bytes = shl i64 %outputs, 3
  call void @llvm.memcpy.p0.p0.i64(ptr %stack, ptr %results, i64 %bytes, i1 false)
  ret void
slow:
  call void @python(i64 %index, i64 0, ptr %stack, i64 %count, i64 %outputs)
  ret void
}

define internal void @record(i64 %index, ptr %cache, ptr %stack, i64 %count, i64 %outputs) uwtable {
  %kinds.slot = getelementptr ptr, ptr %cache, i64 1
  %kinds = load ptr, ptr %kinds.slot
  %who = call i64 @seen_by(ptr %kinds, ptr %stack, i64 %count)
  %fine = icmp eq i64 %who, 1
  br i1 %fine, label %fast, label %slow
fast:
  call void @compute(i64 %index, ptr %cache, ptr %stack, i64 %count, i64 %outputs)
  ret void
slow:
  call void @python(i64 %index, i64 1, ptr %stack, i64 %count, i64 %outputs)
  ret void
}
"""
