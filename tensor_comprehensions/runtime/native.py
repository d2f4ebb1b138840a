"""Builtin functions made in this process from LLVM assembly, which see tensors through torch's DLPack exchange table.

That table trusts its caller, so what it cannot take is turned away first: subclasses, which may have no memory, and
tensors whose values differ from their memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import torch

from ..errors import InternalError
from ..once import OncePerKey
from . import process

ANY = -(1 << 63)
_FASTCALL = 0x80


def builtin(name: str, plan: bytes | tuple[object, ...]) -> Callable[..., Any]:
    """A builtin function: `match`, `run` or `call`, over what it keeps alive as its `self`.

    `match(*tensors) -> bool`: do the tensors fit the guards? Its plan is the guards: how many, then of each the DLPack
    type, the rank, the sizes and the strides, all int64; `ANY` is a stride that does not matter.

    `run(*tensors[, arena])` runs a kernel: None, or the pair that it fails with. Its plan: the entry, the number of
    arguments and of temporaries, for each argument the tensor it is, for each temporary its offset in the arena.

    `call(*tensors)` makes the output and runs: the output, or NotImplemented where the tensors do not fit, there is no
    memory, or the kernel fails. It is over a tuple of its plan, what makes the output, and anything else to keep. Its
    plan: the entry, the number of arguments, for each the tensor it is (the output comes last), the guards.
    """
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.POINTER(_MethodDefinition), ctypes.py_object, ctypes.c_void_p]
    function: Callable[..., Any] = new(ctypes.byref(_made.get("", _Code).definitions[name]), plan, None)
    return function


class _MethodDefinition(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
    )  # fmt: skip


class _Code:
    """The machine code of the builtins, which lives as long as the process."""

    def __init__(self) -> None:
        process.link()
        for name in _PYTHON:
            llvm.add_symbol(name, _python_address(name))
        llvm.add_symbol("tc_dltensor", _exchange()[5])
        for name, thing in _OBJECTS.items():
            llvm.add_symbol(name, id(thing))
        self.engine = process.loaded(process.builtin_code(_assembly()))
        self.definitions = {
            name: _MethodDefinition(name.encode(), self.engine.get_function_address(f"tc_{name}"), _FASTCALL, None)
            for name in ("match", "run", "call")
        }


_made: OncePerKey[str, _Code] = OncePerKey(1)


def _python_address(name: str) -> int:
    value = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
    assert value is not None
    return value


def _exchange() -> ctypes.Array[Any]:
    """torch's table of DLPack functions: version, previous, then five functions, of which [5] borrows a tensor."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = get(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    major = ctypes.c_uint32.from_address(address).value
    if major != 1:
        raise InternalError(f"torch {torch.__version__} has version {major} of the DLPack exchange table, not 1")
    return (ctypes.c_void_p * 7).from_address(address)


_PYTHON = (
    "PyBytes_AsString", "PyTuple_GetItem", "PyObject_CallFunctionObjArgs", "PyObject_CallNoArgs", "Py_IncRef",
    "Py_DecRef", "PyErr_Clear", "PyBool_FromLong", "PyEval_SaveThread", "PyEval_RestoreThread", "Py_BuildValue",
)  # fmt: skip


_OBJECTS = {
    "tc_tensor": torch.Tensor,
    "tc_parameter": torch.nn.Parameter,
    "tc_is_neg": torch._C.TensorBase.is_neg,
    "tc_is_zero": torch._C.TensorBase._is_zerotensor,
    "tc_true": True,
    "tc_none": None,
    "tc_not_implemented": NotImplemented,
}
"""What the functions compare with and return."""


def _assembly() -> str:
    """The functions. A `DLTensor` is 48 bytes."""
    type_slot = object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p)  # of the type in every object
    objects = "\n".join(f"@{name} = external global i8" for name in _OBJECTS)
    return objects + _ASSEMBLY.replace("{type}", str(type_slot))


_ASSEMBLY = r"""
declare ptr @PyBytes_AsString(ptr)
declare ptr @PyTuple_GetItem(ptr, i64)
declare ptr @PyObject_CallFunctionObjArgs(ptr, ...)
declare ptr @PyObject_CallNoArgs(ptr)
declare void @Py_DecRef(ptr)
declare void @Py_IncRef(ptr)
declare void @PyErr_Clear()
declare ptr @PyBool_FromLong(i64)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare ptr @Py_BuildValue(ptr, ...)
declare i32 @tc_dltensor(ptr, ptr)

%DLTensor = type { ptr, i32, i32, i32, i32, ptr, ptr, i64 }
@pair = private constant [5 x i8] c"(LL)\00"

; Whether a method without arguments says True of an object; any error counts as True.
define internal i1 @says(ptr %method, ptr %object) {
  %answer = call ptr (ptr, ...) @PyObject_CallFunctionObjArgs(ptr %method, ptr %object, ptr null)
  %none = icmp eq ptr %answer, null
  br i1 %none, label %error, label %answered
error:
  call void @PyErr_Clear()
  ret i1 true
answered:
  call void @Py_DecRef(ptr %answer)
  %number = ptrtoint ptr %answer to i64
  %yes = icmp eq i64 %number, ptrtoint (ptr @tc_true to i64)
  ret i1 %yes
}

; Whether an object is a plain tensor whose memory holds its values; if so, describe it.
define internal i1 @describe(ptr %object, ptr %tensor) {
  %type.slot = getelementptr i8, ptr %object, i64 {type}
  %type = load i64, ptr %type.slot
  %is.tensor = icmp eq i64 %type, ptrtoint (ptr @tc_tensor to i64)
  %is.parameter = icmp eq i64 %type, ptrtoint (ptr @tc_parameter to i64)
  %plain = or i1 %is.tensor, %is.parameter
  br i1 %plain, label %negative, label %no
negative:
  %is.negative = call i1 @says(ptr @tc_is_neg, ptr %object)
  br i1 %is.negative, label %no, label %zero
zero:
  %is.zero = call i1 @says(ptr @tc_is_zero, ptr %object)
  br i1 %is.zero, label %no, label %ask
ask:
  %error = call i32 @tc_dltensor(ptr %object, ptr %tensor)
  %fine = icmp eq i32 %error, 0
  br i1 %fine, label %device, label %failed
device:
  %device.slot = getelementptr %DLTensor, ptr %tensor, i32 0, i32 1
  %kind = load i32, ptr %device.slot
  %cpu = icmp eq i32 %kind, 1
  ret i1 %cpu
failed:
  call void @PyErr_Clear()
  ret i1 false
no:
  ret i1 false
}

; Whether `count` numbers agree, leaving out those expected as the smallest integer.
define internal i1 @agree(ptr %expected, ptr %found, i64 %count) {
  br label %test
test:
  %i = phi i64 [ 0, %0 ], [ %next, %same ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %compare, label %yes
compare:
  %expected.slot = getelementptr i64, ptr %expected, i64 %i
  %found.slot = getelementptr i64, ptr %found, i64 %i
  %e = load i64, ptr %expected.slot, align 1
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

; Whether the arguments fit the guards; if so, and `places` is not null, the addresses of their first elements.
define internal i1 @fit(ptr %guards, ptr %arguments, ptr %places) {
  %tensor = alloca %DLTensor
  %count = load i64, ptr %guards, align 1
  %first = getelementptr i64, ptr %guards, i64 1
  %keep = icmp ne ptr %places, null
  br label %test
test:
  %i = phi i64 [ 0, %0 ], [ %next, %following ]
  %guard = phi ptr [ %first, %0 ], [ %guard.next, %following ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %read, label %yes
read:
  %slot = getelementptr ptr, ptr %arguments, i64 %i
  %object = load ptr, ptr %slot
  %dense = call i1 @describe(ptr %object, ptr %tensor)
  br i1 %dense, label %types, label %no
types:
  %rank.slot = getelementptr i64, ptr %guard, i64 1
  %sizes = getelementptr i64, ptr %guard, i64 2
  %dtype = load i64, ptr %guard, align 1
  %rank = load i64, ptr %rank.slot, align 1
  %found.rank.slot = getelementptr %DLTensor, ptr %tensor, i32 0, i32 3
  %found.dtype.slot = getelementptr %DLTensor, ptr %tensor, i32 0, i32 4
  %found.rank = load i32, ptr %found.rank.slot
  %found.dtype = load i32, ptr %found.dtype.slot
  %wide.rank = zext i32 %found.rank to i64
  %wide.dtype = zext i32 %found.dtype to i64
  %same.rank = icmp eq i64 %rank, %wide.rank
  %same.dtype = icmp eq i64 %dtype, %wide.dtype
  %same.type = and i1 %same.rank, %same.dtype
  br i1 %same.type, label %shapes, label %no
shapes:
  %found.sizes.slot = getelementptr %DLTensor, ptr %tensor, i32 0, i32 5
  %found.sizes = load ptr, ptr %found.sizes.slot
  %same.sizes = call i1 @agree(ptr %sizes, ptr %found.sizes, i64 %rank)
  br i1 %same.sizes, label %layouts, label %no
layouts:
  %strides = getelementptr i64, ptr %sizes, i64 %rank
  %found.strides.slot = getelementptr %DLTensor, ptr %tensor, i32 0, i32 6
  %found.strides = load ptr, ptr %found.strides.slot
  %same.strides = call i1 @agree(ptr %strides, ptr %found.strides, i64 %rank)
  br i1 %same.strides, label %fits, label %no
fits:
  br i1 %keep, label %note, label %following
note:
  %place = getelementptr ptr, ptr %places, i64 %i
  %address = call ptr @address(ptr %tensor)
  store ptr %address, ptr %place
  br label %following
following:
  %next = add i64 %i, 1
  %guard.next = getelementptr i64, ptr %strides, i64 %rank
  br label %test
yes:
  ret i1 true
no:
  ret i1 false
}

define internal ptr @address(ptr %tensor) {
  %data = load ptr, ptr %tensor
  %offset.slot = getelementptr %DLTensor, ptr %tensor, i32 0, i32 7
  %offset = load i64, ptr %offset.slot
  %address = getelementptr i8, ptr %data, i64 %offset
  ret ptr %address
}

define ptr @tc_match(ptr %self, ptr %arguments, i64 %given) {
  %guards = call ptr @PyBytes_AsString(ptr %self)
  %count = load i64, ptr %guards, align 1
  %complete = icmp eq i64 %count, %given
  br i1 %complete, label %look, label %no
look:
  %fits = call i1 @fit(ptr %guards, ptr %arguments, ptr null)
  br i1 %fits, label %yes, label %no
yes:
  %true = call ptr @PyBool_FromLong(i64 1)
  ret ptr %true
no:
  %false = call ptr @PyBool_FromLong(i64 0)
  ret ptr %false
}

; The whole call: fit, make the output, run. NotImplemented where the arguments do not fit or the kernel fails.
define ptr @tc_call(ptr %self, ptr %arguments, i64 %given) {
  %status = alloca { i64, i64 }
  %bytes = call ptr @PyTuple_GetItem(ptr %self, i64 0)
  %allocate = call ptr @PyTuple_GetItem(ptr %self, i64 1)
  %plan = call ptr @PyBytes_AsString(ptr %bytes)
  %count.slot = getelementptr i64, ptr %plan, i64 1
  %order = getelementptr i64, ptr %plan, i64 2
  %entry = load ptr, ptr %plan, align 1
  %count = load i64, ptr %count.slot, align 1
  %guards = getelementptr i64, ptr %order, i64 %count
  %wanted = load i64, ptr %guards, align 1
  %complete = icmp eq i64 %wanted, %given
  br i1 %complete, label %look, label %no
look:
  %room = add i64 %wanted, 1
  %places = alloca ptr, i64 %room
  %slots = add i64 %count, 1
  %addresses = alloca ptr, i64 %slots
  %fits = call i1 @fit(ptr %guards, ptr %arguments, ptr %places)
  br i1 %fits, label %make, label %no
make:
  %output = call ptr @PyObject_CallNoArgs(ptr %allocate)
  %nothing = icmp eq ptr %output, null
  br i1 %nothing, label %unable, label %made
made:
  %output.place = getelementptr ptr, ptr %places, i64 %wanted
  %known = call i1 @place(ptr %output, ptr %output.place)
  br i1 %known, label %test, label %drop
test:
  %i = phi i64 [ 0, %made ], [ %next, %move ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %move, label %ready
move:
  %which.slot = getelementptr i64, ptr %order, i64 %i
  %which = load i64, ptr %which.slot, align 1
  %from = getelementptr ptr, ptr %places, i64 %which
  %to = getelementptr ptr, ptr %addresses, i64 %i
  %moved = load ptr, ptr %from
  store ptr %moved, ptr %to
  %next = add i64 %i, 1
  br label %test
ready:
  %status.slot = getelementptr ptr, ptr %addresses, i64 %count
  store ptr %status, ptr %status.slot
  %thread = call ptr @PyEval_SaveThread()
  %code = call i64 %entry(ptr %addresses)
  call void @PyEval_RestoreThread(ptr %thread)
  %success = icmp eq i64 %code, 0
  br i1 %success, label %done, label %failed
done:
  ret ptr %output
failed:
  call void @Py_DecRef(ptr %output)
  br label %no
unable:
  call void @PyErr_Clear()
  br label %no
drop:
  call void @PyErr_Clear()
  call void @Py_DecRef(ptr %output)
  br label %no
no:
  call void @Py_IncRef(ptr @tc_not_implemented)
  ret ptr @tc_not_implemented
}

; The address of the first element of a tensor; null, with an exception, when there is none to be had.
define internal i1 @place(ptr %object, ptr %slot) {
  %tensor = alloca %DLTensor
  %error = call i32 @tc_dltensor(ptr %object, ptr %tensor)
  %fine = icmp eq i32 %error, 0
  br i1 %fine, label %known, label %failed
known:
  %address = call ptr @address(ptr %tensor)
  store ptr %address, ptr %slot
  ret i1 true
failed:
  ret i1 false
}

define ptr @tc_run(ptr %self, ptr %arguments, i64 %given) {
  %status = alloca { i64, i64 }
  %arena.slot = alloca ptr
  %plan = call ptr @PyBytes_AsString(ptr %self)
  %count.slot = getelementptr i64, ptr %plan, i64 1
  %temporaries.slot = getelementptr i64, ptr %plan, i64 2
  %order = getelementptr i64, ptr %plan, i64 3
  %entry = load ptr, ptr %plan, align 1
  %count = load i64, ptr %count.slot, align 1
  %temporaries = load i64, ptr %temporaries.slot, align 1
  %offsets = getelementptr i64, ptr %order, i64 %count
  %total = add i64 %count, %temporaries
  %room = add i64 %total, 1
  %addresses = alloca ptr, i64 %room
  br label %test
test:
  %i = phi i64 [ 0, %0 ], [ %next, %placed ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %read, label %scratch
read:
  %which.slot = getelementptr i64, ptr %order, i64 %i
  %which = load i64, ptr %which.slot, align 1
  %argument = getelementptr ptr, ptr %arguments, i64 %which
  %object = load ptr, ptr %argument
  %slot = getelementptr ptr, ptr %addresses, i64 %i
  %ok = call i1 @place(ptr %object, ptr %slot)
  br i1 %ok, label %placed, label %failed
placed:
  %next = add i64 %i, 1
  br label %test
scratch:
  %some = icmp sgt i64 %temporaries, 0
  br i1 %some, label %arena, label %ready
arena:
  %last = sub i64 %given, 1
  %last.slot = getelementptr ptr, ptr %arguments, i64 %last
  %arena.object = load ptr, ptr %last.slot
  %got = call i1 @place(ptr %arena.object, ptr %arena.slot)
  br i1 %got, label %divide, label %failed
divide:
  %base = load ptr, ptr %arena.slot
  br label %part
part:
  %j = phi i64 [ 0, %divide ], [ %j.next, %part ]
  %offset.slot = getelementptr i64, ptr %offsets, i64 %j
  %offset = load i64, ptr %offset.slot, align 1
  %temporary = getelementptr i8, ptr %base, i64 %offset
  %at = add i64 %count, %j
  %temporary.slot = getelementptr ptr, ptr %addresses, i64 %at
  store ptr %temporary, ptr %temporary.slot
  %j.next = add i64 %j, 1
  %again = icmp slt i64 %j.next, %temporaries
  br i1 %again, label %part, label %ready
ready:
  %status.slot = getelementptr ptr, ptr %addresses, i64 %total
  store ptr %status, ptr %status.slot
  %thread = call ptr @PyEval_SaveThread()
  %code = call i64 %entry(ptr %addresses)
  call void @PyEval_RestoreThread(ptr %thread)
  %success = icmp eq i64 %code, 0
  br i1 %success, label %done, label %report
done:
  call void @Py_IncRef(ptr @tc_none)
  ret ptr @tc_none
report:
  %value.slot = getelementptr i64, ptr %status, i64 1
  %value = load i64, ptr %value.slot
  %tuple = call ptr (ptr, ...) @Py_BuildValue(ptr @pair, i64 %code, i64 %value)
  ret ptr %tuple
failed:
  ret ptr null
}
"""
