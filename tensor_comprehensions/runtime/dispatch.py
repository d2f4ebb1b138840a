"""Calls of loaded kernels on torch tensors for a microsecond or less.

Two builtin functions are made in this process from LLVM assembly. `match` tells whether tensors have the types, sizes
and strides that a kernel was compiled for; `run` passes their addresses to the kernel, without the GIL while it runs.
Both read tensors through the DLPack exchange table of torch. That table trusts its caller, so `match` first turns away
what it cannot take: subclasses, which may have no memory, and tensors whose values differ from their memory.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import torch

from ..dtypes import DType, Kind
from ..errors import InternalError
from . import process
from .cpu import Executable

_ALIGNMENT = 64
_ANY = -(1 << 63)  # a stride that does not matter
_DLPACK_KINDS = {Kind.SIGNED: 0, Kind.UNSIGNED: 1, Kind.FLOAT: 2, Kind.BOOL: 6}
_BFLOAT = 4
_FASTCALL = 0x80


@dataclass(frozen=True, slots=True)
class Operand:
    """The tensors a kernel takes in one place: exactly these sizes and strides, in elements, on the CPU.

    Strides of dimensions of size 1 and of tensors without elements are ignored.
    """

    dtype: DType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Launcher:
    """A loaded kernel with the tensors that it takes.

    Usage: `if launcher.accepts(*inputs): outputs = launcher(*inputs)`.

    Attributes:
        accepts: builtin `(*tensors) -> bool`: whether the positional arguments, of any Python types, are ordinary
            dense CPU tensors that fit `inputs` one by one. It never raises.
    """

    __slots__ = ("_allocate", "_arena", "_fail", "_run", "_single", "accepts", "executable")

    def __init__(
        self,
        executable: Executable,
        inputs: Sequence[Operand],
        outputs: Sequence[Operand],
        order: Sequence[int],
        temporaries: Sequence[int],
        fail: Callable[[int, int], BaseException],
    ) -> None:
        """Prepare calls.

        Args:
            inputs: the tensors of a call, in order.
            outputs: new tensors that a call makes and returns.
            order: for each of `Module.arguments`, its place among the inputs followed by the outputs.
            temporaries: bytes of each of `Module.temporaries`.
            fail: makes the exception for a failure that the kernel reports, from site + 1 and its value.
        """
        native = _native()
        self.executable = executable
        self.accepts: Callable[..., bool] = native.builtin("match", _guards(inputs))
        offsets, self._arena = _offsets(temporaries)
        self._run = native.builtin("run", _plan(executable, order, offsets))
        self._allocate = [_allocator(o) for o in outputs]
        self._single = len(outputs) == 1
        self._fail = fail

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The output, or a tuple when there are several or none. The inputs must have been accepted."""
        if self._single and not self._arena:  # the common case, without another Python call
            output = self._allocate[0]()
            failure = self._run(*inputs, output)
            if failure is not None:
                raise self._fail(*failure)
            return output
        outputs = [allocate() for allocate in self._allocate]
        self.run(*inputs, *outputs)
        return outputs[0] if self._single else tuple(outputs)

    def run(self, *tensors: torch.Tensor) -> None:
        """Run on the inputs followed by the outputs, which must fit the operands and not overlap."""
        if self._arena:
            failure = self._run(*tensors, torch.empty(self._arena, dtype=torch.uint8, device="cpu"))
        else:
            failure = self._run(*tensors)
        if failure is not None:
            raise self._fail(*failure)


def _allocator(o: Operand) -> Callable[[], torch.Tensor]:
    """What makes a new tensor, by the quickest way there is: like one of these sizes whose memory is one element."""
    dtype, cpu = getattr(torch, o.dtype.name), torch.device("cpu")
    if (
        math.prod(o.sizes) > 1
        and torch.empty_like(torch.empty((), device="meta").expand(o.sizes)).stride() == o.strides
    ):
        return functools.partial(torch.empty_like, torch.empty((), dtype=dtype, device=cpu).expand(o.sizes))
    return functools.partial(torch.empty_strided, o.sizes, o.strides, dtype=dtype, device=cpu)


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each temporary starts in one aligned arena, and the bytes of the arena."""
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, total if not sizes else max(total, 1)


def _guards(inputs: Sequence[Operand]) -> bytes:
    """What `match` compares with: the count; then dtype, rank, sizes, strides of each."""
    words = [len(inputs)]
    for o in inputs:
        kind = _BFLOAT if o.dtype.name == "bfloat16" else _DLPACK_KINDS[o.dtype.kind]
        words += [kind | o.dtype.bits << 8 | 1 << 16, len(o.sizes), *o.sizes]
        empty = 0 in o.sizes
        words += [_ANY if empty or n == 1 else s for n, s in zip(o.sizes, o.strides, strict=True)]
    return struct.pack(f"={len(words)}q", *words)


def _plan(executable: Executable, order: Sequence[int], offsets: Sequence[int]) -> bytes:
    """What `run` does: entry, number of arguments, number of temporaries; the argument at each slot; the offsets."""
    words = [executable.address, len(order), len(offsets), *order, *offsets]
    return struct.pack(f"={len(words)}q", *words)


class _MethodDefinition(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
    )  # fmt: skip


class _Native:
    """The machine code of `match` and `run`, which lives as long as the process."""

    def __init__(self) -> None:
        process.link()
        for name in _PYTHON:
            llvm.add_symbol(name, _python_address(name))
        llvm.add_symbol("tc_dltensor", _exchange()[5])
        machine = llvm.Target.from_default_triple().create_target_machine(opt=2, jit=True)
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_assembly()), machine)
        self.engine.finalize_object()
        self.definitions = {
            name: _MethodDefinition(name.encode(), self.engine.get_function_address(f"tc_{name}"), _FASTCALL, None)
            for name in ("match", "run")
        }

    def builtin(self, name: str, plan: bytes) -> Callable[..., Any]:
        """A builtin function over `plan`, which it keeps alive as its `self`."""
        new = ctypes.pythonapi.PyCFunction_NewEx
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.POINTER(_MethodDefinition), ctypes.py_object, ctypes.c_void_p]
        function: Callable[..., Any] = new(ctypes.byref(self.definitions[name]), plan, None)
        return function


@functools.cache
def _native() -> _Native:
    return _Native()


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
    "PyBytes_AsString", "PyObject_CallOneArg", "Py_DecRef", "PyErr_Clear", "PyBool_FromLong", "PyEval_SaveThread",
    "PyEval_RestoreThread", "Py_BuildValue", "Py_IncRef",
)  # fmt: skip


def _assembly() -> str:
    """The functions, with the addresses of the objects they compare with. A `DLTensor` is 48 bytes."""
    places = {
        "type": object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p),  # of the type in every object
        "tensor": id(torch.Tensor),
        "parameter": id(torch.nn.Parameter),
        "is_neg": id(torch._C.TensorBase.is_neg),
        "is_zero": id(torch._C.TensorBase._is_zerotensor),
        "true": id(True),
        "none": id(None),
    }
    text = _ASSEMBLY
    for name, number in places.items():
        text = text.replace(f"{{{name}}}", str(number))
    return text


_ASSEMBLY = r"""
declare ptr @PyBytes_AsString(ptr)
declare ptr @PyObject_CallOneArg(ptr, ptr)
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
  %answer = call ptr @PyObject_CallOneArg(ptr %method, ptr %object)
  %none = icmp eq ptr %answer, null
  br i1 %none, label %error, label %answered
error:
  call void @PyErr_Clear()
  ret i1 true
answered:
  call void @Py_DecRef(ptr %answer)
  %number = ptrtoint ptr %answer to i64
  %yes = icmp eq i64 %number, {true}
  ret i1 %yes
}

; Whether an object is a plain tensor whose memory holds its values; if so, describe it.
define internal i1 @describe(ptr %object, ptr %tensor) {
  %type.slot = getelementptr i8, ptr %object, i64 {type}
  %type = load i64, ptr %type.slot
  %is.tensor = icmp eq i64 %type, {tensor}
  %is.parameter = icmp eq i64 %type, {parameter}
  %plain = or i1 %is.tensor, %is.parameter
  br i1 %plain, label %negative, label %no
negative:
  %is.negative = call i1 @says(ptr inttoptr (i64 {is_neg} to ptr), ptr %object)
  br i1 %is.negative, label %no, label %zero
zero:
  %is.zero = call i1 @says(ptr inttoptr (i64 {is_zero} to ptr), ptr %object)
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

define ptr @tc_match(ptr %self, ptr %arguments, i64 %given) {
  %tensor = alloca %DLTensor
  %plan = call ptr @PyBytes_AsString(ptr %self)
  %count = load i64, ptr %plan, align 1
  %first = getelementptr i64, ptr %plan, i64 1
  %complete = icmp eq i64 %count, %given
  br i1 %complete, label %test, label %no
test:
  %i = phi i64 [ 0, %0 ], [ %next, %fits ]
  %guard = phi ptr [ %first, %0 ], [ %following, %fits ]
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
  %next = add i64 %i, 1
  %following = getelementptr i64, ptr %strides, i64 %rank
  br label %test
yes:
  %true = call ptr @PyBool_FromLong(i64 1)
  ret ptr %true
no:
  %false = call ptr @PyBool_FromLong(i64 0)
  ret ptr %false
}

; The address of the first element of a tensor; null, with an exception, when there is none to be had.
define internal i1 @place(ptr %object, ptr %slot) {
  %tensor = alloca %DLTensor
  %error = call i32 @tc_dltensor(ptr %object, ptr %tensor)
  %fine = icmp eq i32 %error, 0
  br i1 %fine, label %known, label %failed
known:
  %data = load ptr, ptr %tensor
  %offset.slot = getelementptr %DLTensor, ptr %tensor, i32 0, i32 7
  %offset = load i64, ptr %offset.slot
  %address = getelementptr i8, ptr %data, i64 %offset
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
  call void @Py_IncRef(ptr inttoptr (i64 {none} to ptr))
  ret ptr inttoptr (i64 {none} to ptr)
report:
  %value.slot = getelementptr i64, ptr %status, i64 1
  %value = load i64, ptr %value.slot
  %tuple = call ptr (ptr, ...) @Py_BuildValue(ptr @pair, i64 %code, i64 %value)
  ret ptr %tuple
failed:
  ret ptr null
}
"""
