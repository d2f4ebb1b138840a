"""The LLVM assembly of the builtin that Python calls: it converts arguments to handles, and results to tensors."""

from __future__ import annotations


def pycall_assembly(type_offset: int, tensor_offset: int) -> str:
    """The function `@tc_call`, which needs the code of `launch_assembly`.

    Args:
        type_offset: the offset of the type in a Python object, in bytes.
        tensor_offset: the offset of the C++ tensor in a Python tensor, in bytes.
    """
    return _CODE.replace("{type_offset}", str(type_offset)).replace("{tensor_offset}", str(tensor_offset))


_CODE = r"""
declare ptr @PyTuple_GetItem(ptr, i64)
declare ptr @PyTuple_New(i64)
declare i32 @PyTuple_SetItem(ptr, i64, ptr)
declare ptr @PyBytes_AsString(ptr)
declare void @Py_IncRef(ptr)
declare void @PyErr_Clear()
declare ptr @PyErr_Occurred()
declare i64 @PyLong_AsLongLong(ptr)
declare double @PyFloat_AsDouble(ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare i64 @_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv()
declare ptr @_ZN5torch3jit6tracer15getTracingStateEv()
declare ptr @_Z16THPVariable_WrapON2at10TensorBaseE(ptr)
@PyLong_Type = external global i8
@PyFloat_Type = external global i8
@tc_tensor = external global i8
@tc_parameter = external global i8
@tc_none = external global i8
@tc_not_implemented = external global i8
@tc_recorded = external global i8

; The argument of one kind as what a stack holds; false where it is something else.
define internal i1 @take(ptr %object, i64 %kind, ptr %slot, ptr %number) {
  %type.slot = getelementptr i8, ptr %object, i64 {type_offset}
  %type = load ptr, ptr %type.slot
  %constant = icmp eq i64 %kind, 1
  br i1 %constant, label %integer, label %tensor
tensor:
  %is.tensor = icmp eq ptr %type, @tc_tensor
  %is.parameter = icmp eq ptr %type, @tc_parameter
  %plain = or i1 %is.tensor, %is.parameter
  br i1 %plain, label %known, label %other
known:
  %inside = getelementptr i8, ptr %object, i64 {tensor_offset}
  store ptr %inside, ptr %slot
  ret i1 true
other:
  %is.float = icmp eq ptr %type, @PyFloat_Type
  br i1 %is.float, label %float, label %no
float:
  %value = call double @PyFloat_AsDouble(ptr %object)
  store ptr null, ptr %slot
  switch i64 %kind, label %no [
    i64 8, label %single
    i64 9, label %double
  ]
single:
  %narrow = fptrunc double %value to float
  store float %narrow, ptr %number
  ret i1 true
double:
  store double %value, ptr %number
  ret i1 true
integer:
  %is.integer = icmp eq ptr %type, @PyLong_Type
  br i1 %is.integer, label %read, label %no
read:
  %whole = call i64 @PyLong_AsLongLong(ptr %object)
  store i64 %whole, ptr %slot
  %doubtful = icmp eq i64 %whole, -1
  br i1 %doubtful, label %ask, label %yes
ask:
  %raised = call ptr @PyErr_Occurred()
  %large = icmp ne ptr %raised, null
  br i1 %large, label %clear, label %yes
clear:
  call void @PyErr_Clear()
  ret i1 false
yes:
  ret i1 true
no:
  ret i1 false
}

; The Python tensor of an owned handle.
define internal ptr @wrap(ptr %results, i64 %i) {
  %slot = getelementptr ptr, ptr %results, i64 %i
  %handle = load ptr, ptr %slot
  %object = call ptr @_Z16THPVariable_WrapON2at10TensorBaseE(ptr %handle)
  %ignored = call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  ret ptr %object
}

; `self` is a tuple: as bytes the address of a call cache, the numbers of its arguments and of its new outputs, and
; whether it has none; and the cache.
define ptr @tc_call(ptr %self, ptr %arguments, i64 %given) {
  %bytes = call ptr @PyTuple_GetItem(ptr %self, i64 0)
  %plan = call ptr @PyBytes_AsString(ptr %bytes)
  %count.slot = getelementptr i64, ptr %plan, i64 1
  %outputs.slot = getelementptr i64, ptr %plan, i64 2
  %silent.slot = getelementptr i64, ptr %plan, i64 3
  %cache = load ptr, ptr %plan, align 1
  %count = load i64, ptr %count.slot, align 1
  %outputs = load i64, ptr %outputs.slot, align 1
  %silent = load i64, ptr %silent.slot, align 1
  %kinds.slot = getelementptr ptr, ptr %cache, i64 1
  %kinds = load ptr, ptr %kinds.slot
  %complete = icmp eq i64 %count, %given
  br i1 %complete, label %modes, label %no
modes:
  %watched = call i64 @_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv()
  %free = icmp eq i64 %watched, 0
  br i1 %free, label %trace, label %no
trace:
  %state = call ptr @_ZN5torch3jit6tracer15getTracingStateEv()
  %record = load ptr, ptr %state
  %untraced = icmp eq ptr %record, null
  br i1 %untraced, label %room, label %no
room:
  %slots = add i64 %count, 1
  %stack = alloca ptr, i64 %slots
  %numbers = alloca i64, i64 %slots
  %more.outputs = add i64 %outputs, 1
  %results = alloca ptr, i64 %more.outputs
  br label %test
test:
  %i = phi i64 [ 0, %room ], [ %next, %following ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %taken
look:
  %argument.slot = getelementptr ptr, ptr %arguments, i64 %i
  %argument = load ptr, ptr %argument.slot
  %kind.slot = getelementptr i64, ptr %kinds, i64 %i
  %kind = load i64, ptr %kind.slot
  %slot = getelementptr ptr, ptr %stack, i64 %i
  %number = getelementptr i64, ptr %numbers, i64 %i
  store i64 0, ptr %number
  %fine = call i1 @take(ptr %argument, i64 %kind, ptr %slot, ptr %number)
  br i1 %fine, label %following, label %no
following:
  %next = add i64 %i, 1
  br label %test
taken:
  %who = call i64 @seen_by(ptr %kinds, ptr %stack, i64 %count)
  switch i64 %who, label %no [
    i64 1, label %go
    i64 2, label %recorded
  ]
recorded:
  %paused = load i64, ptr @tc_paused
  %closed = icmp ne i64 %paused, 0
  br i1 %closed, label %no, label %tell
tell:
  call void @Py_IncRef(ptr @tc_recorded)
  ret ptr @tc_recorded
go:
  %thread = call ptr @PyEval_SaveThread()
  %done = call i1 @serve(ptr %cache, ptr %stack, ptr %numbers, i64 %count, ptr %results)
  call void @PyEval_RestoreThread(ptr %thread)
  br i1 %done, label %give, label %no
give:
  %quiet = icmp ne i64 %silent, 0
  br i1 %quiet, label %nothing, label %some
nothing:
  call void @Py_IncRef(ptr @tc_none)
  ret ptr @tc_none
some:
  %single = icmp eq i64 %outputs, 1
  br i1 %single, label %only, label %several
only:
  %object = call ptr @wrap(ptr %results, i64 0)
  ret ptr %object
several:
  %tuple = call ptr @PyTuple_New(i64 %outputs)
  br label %fill
fill:
  %o = phi i64 [ 0, %several ], [ %o.next, %put ]
  %o.more = icmp slt i64 %o, %outputs
  br i1 %o.more, label %put, label %filled
put:
  %member = call ptr @wrap(ptr %results, i64 %o)
  %ignored = call i32 @PyTuple_SetItem(ptr %tuple, i64 %o, ptr %member)
  %o.next = add i64 %o, 1
  br label %fill
filled:
  ret ptr %tuple
no:
  call void @Py_IncRef(ptr @tc_not_implemented)
  ret ptr @tc_not_implemented
}
"""
