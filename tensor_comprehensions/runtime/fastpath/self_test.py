"""A test of the machine code of calls, for a torch or a processor that no release was tested with.

It makes one call for each kind of argument and of mode, directly and through torch's dispatcher, and compares the
answer with the right one. A wrong guess about torch's memory may crash, so it runs in a forked child; the result is
cached.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...cache.key import Uncacheable, make_installation_key
from ...cache.store import RUNTIME, current_store
from ..cpu import host_symbols
from ..cpu.host import host
from . import call_cache
from .boxed import BoxedCallCache
from .call_cache import RECORDED, TENSOR, CachedCall, CallCache, NewOutput, TensorGuard
from .forked_check import run_forked
from .torch_layout import TensorLayout

PASSED, FAILED = b"passed", b"failed: "
NAMESPACE = "tc_self_test"
"""The namespace of the operator, which exists only in the child."""
_N = 4
_ADD = f"""
define i64 @tc_self_test_add(ptr %addresses) {{
  %b.slot = getelementptr ptr, ptr %addresses, i64 1
  %c.slot = getelementptr ptr, ptr %addresses, i64 2
  %a = load ptr, ptr %addresses
  %b = load ptr, ptr %b.slot
  %c = load ptr, ptr %c.slot
  %x = load <{_N} x float>, ptr %a, align 4
  %y = load <{_N} x float>, ptr %b, align 4
  %sum = fadd <{_N} x float> %x, %y
  store <{_N} x float> %sum, ptr %c, align 4
  ret i64 0
}}
"""

Case = tuple[str, Callable[[], Any], Any]
"""The special property of a call, the call, and its right answer."""


def run_self_test(layout: TensorLayout) -> str:
    """The first fault of calls on this installation, from the cache or by a test now; "" if there is none.

    Raises NoAnswer.
    """
    store = current_store()
    name = None if store.mode == "off" else _entry_name(layout)
    known = None if name is None else store.read(name)
    if known == PASSED:
        return ""
    if known is not None and known.startswith(FAILED):
        return known[len(FAILED) :].decode("utf-8", "replace")
    wrong = run_forked(SelfTest().find_wrong_answer)
    if name is not None:
        store.write(name, FAILED + wrong.encode() if wrong else PASSED)
    return wrong


def _entry_name(layout: TensorLayout) -> tuple[str, str] | None:
    """The name of the result in the cache, made of all that can change how calls work; None: it cannot be cached."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.glob("lib*.so"))]
        facts = {"python": sys.version, "torch": repr((torch.version.git_version, files)), "layout": repr(layout)}
        return RUNTIME, make_installation_key("self-test of calls", facts, host()).digest
    except (OSError, Uncacheable):
        return None


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees every operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _FunctionWatch(TorchFunctionMode):
    """A mode that sees every function of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Subclass(torch.Tensor):
    """A tensor of another class."""


class _Fake(torch.Tensor):
    """A tensor without values that says it is on the CPU, made as torch makes a FakeTensor, whose import is slow."""

    def __new__(cls, x: torch.Tensor) -> _Fake:
        made: _Fake = torch.Tensor._make_subclass(
            cls, x.to("meta"), False, dispatch_device=True, device_for_backend_keys=x.device
        )
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("it has no values")


class SelfTest:
    """The test, with all code loaded and all symbols resolved: a forked child may not ask LLVM for anything."""

    def __init__(self) -> None:
        host_symbols.link_host_symbols()
        self._engine = host_symbols.load_code(host_symbols.builtin_code(_ADD))
        self._entry = self._engine.get_function_address("tc_self_test_add")
        self._calls = self._function("float32", 1), self._function("complex64", 2)
        self._layers: list[str] = []
        self._error: Exception | None = None
        self._boxed = BoxedCallCache(
            [TENSOR] * 2, 1, partial(self._take_slow_path, "compute"), partial(self._take_slow_path, "record")
        )
        self._boxed.add(self._kernel("float32", 1))

    def _kernel(self, dtype: str, floats: int) -> CachedCall:
        """C(i) = A(i) + B(i) over 16 bytes; an element is `floats` floats."""
        number = int(getattr(host_symbols.torch_library(), f"aoti_torch_dtype_{dtype}")())
        guard, span = TensorGuard(number, (_N // floats,), (1,)), 4 * _N
        output = NewOutput(guard, span)
        return CachedCall(self._entry, self._engine, (guard,) * 2, (span,) * 2, (0, 1), (output,), (), ((), 0))

    def _function(self, dtype: str, floats: int) -> Callable[..., Any]:
        cache = CallCache([TENSOR] * 2, 1)
        cache.add(self._kernel(dtype, floats))
        return cache.function()

    def find_wrong_answer(self) -> str:
        """The first wrong answer, "" if all are right. For the child only: it changes the process."""
        call_cache.resume_calls()
        warnings.simplefilter("ignore")
        for name, call, expected in chain(self._direct_cases(), self._operator_cases()):
            found = call()
            if not _is_same(found, expected):
                return f"the answer to {name} is {_describe(found)} instead of {_describe(expected)}"
        return ""

    # --- calls from Python ---------------------------------------------------------------------------------------

    def _direct_cases(self) -> Iterator[Case]:
        call, call_complex = self._calls
        a, b = torch.arange(_N, dtype=torch.float32), torch.full((_N,), 0.5, dtype=torch.float32)
        total = torch.tensor([n + 0.5 for n in range(_N)], dtype=torch.float32)
        leaf = a.clone().requires_grad_()

        def both(name: str, x: Any, expected: Any, mode: Callable[[], AbstractContextManager[Any]]) -> Iterator[Case]:
            yield f"{name}, first", partial(_call_within, mode, call, x, b), expected
            if expected is NotImplemented:
                yield f"{name}, second", partial(_call_within, mode, call, b, x), expected

        yield from both("an ordinary tensor", a, total, nullcontext)
        yield from both("a parameter without gradient", torch.nn.Parameter(a, requires_grad=False), total, nullcontext)
        yield from both("a slice", torch.arange(-_N, 2 * _N, dtype=torch.float32)[_N : 2 * _N], total, nullcontext)
        yield from both("a tensor that requires gradients", leaf, RECORDED, nullcontext)
        yield from both("a tensor that requires gradients, which are off", leaf, total, torch.no_grad)
        for name, x in self._list_refused_values(a).items():
            yield from both(name, x, NotImplemented, nullcontext)
        for mode in (_Watch, _FunctionWatch):
            yield from both(f"a tensor in {mode.__name__}", a, NotImplemented, mode)
        yield from self._transformed_cases(a)
        with torch.inference_mode():
            inside, result = a.clone(), total.clone()
        yield from both("a tensor of inference mode", inside, total, nullcontext)
        yield from both("a tensor of inference mode, inside", inside, result, torch.inference_mode)
        c = torch.complex(a[:2], a[:2])
        yield "complex tensors", partial(call_complex, c, c), 2 * c
        yield "a conjugated tensor", partial(call_complex, c.conj(), c), NotImplemented
        yield "too few arguments", partial(call, a), NotImplemented
        yield "references to its argument", partial(_count_new_references, call, a, b), 0

    def _list_refused_values(self, a: torch.Tensor) -> dict[str, Any]:
        """Values similar to `a` that a call must refuse, by their special property."""
        found: dict[str, Any] = {
            "a longer tensor": torch.zeros(_N + 1, dtype=torch.float32),
            "a strided tensor": torch.zeros(2 * _N, dtype=torch.float32)[::2],
            "a tensor of another type": a.double(),
            "an integer tensor": a.int(),
            "a tensor of another rank": a.reshape(1, _N),
            "a scalar": a[0],
            "a negated view": torch.complex(a, a).conj().imag,
            "a tensor of zeros without memory": torch._efficientzerotensor((_N,), dtype=torch.float32),
            "a subclass": a.as_subclass(_Subclass),
            "a fake tensor": _Fake(a),
            "a meta tensor": a.to("meta"),
            "a sparse tensor": a.to_sparse(),
            "a list": a.tolist(),
            "a number": 1.0,
            "nothing": None,
        }
        return found

    def _transformed_cases(self, a: torch.Tensor) -> Iterator[Case]:
        """Calls on tensors that torch transforms, traces or differentiates forward."""
        call, _ = self._calls

        def note(x: torch.Tensor) -> torch.Tensor:
            answers.append(call(x, a))
            return x + 1

        answers: list[Any] = []

        def transform(way: Callable[[], Any]) -> Any:
            answers.clear()
            way()
            return answers[-1]

        batch = torch.stack((a, a))
        yield "a tensor below vmap", partial(transform, lambda: torch.func.vmap(note)(batch)), NotImplemented
        if hasattr(torch.jit, "trace"):
            trace = partial(torch.jit.trace, note, (a,), check_trace=False)
            yield "a tensor that is traced", partial(transform, trace), NotImplemented

        def dual() -> Any:
            with forward_ad.dual_level():
                return call(torch._make_dual(a, a, level=0), a)

        yield "a dual tensor", dual, NotImplemented

    # --- calls of an operator ------------------------------------------------------------------------------------

    def _take_slow_path(self, layer: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The slow path of the operator, which notes that it was taken."""
        self._layers.append(layer)
        if self._error is not None:
            raise self._error
        return a.detach() - b.detach()

    def _operator_cases(self) -> Iterator[Case]:
        library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
        library.define("add(Tensor a, Tensor b) -> Tensor")  # type: ignore[no-untyped-call]
        self._boxed.register(NAMESPACE, "add", lambda key: False)
        op = getattr(torch.ops, NAMESPACE).add.default
        a, b = torch.arange(_N, dtype=torch.float32), torch.full((_N,), 0.5, dtype=torch.float32)

        def run(x: torch.Tensor, error: Exception | None = None) -> Any:
            self._layers, self._error = [], error
            try:
                return op(x, b), tuple(self._layers)
            except ValueError as caught:
                return caught is error, tuple(self._layers)

        yield "an operator", partial(run, a), (a + b, ())
        yield "an operator that no kernel fits", partial(run, a.double()), (a.double() - b, ("compute",))
        yield "an operator that autograd records", partial(run, a.clone().requires_grad_()), (a - b, ("record",))
        yield "an error through the dispatcher", partial(run, a.double(), ValueError("no")), (True, ("compute",))
        yield "an operator after an error", partial(run, a), (a + b, ())


def _call_within(mode: Callable[[], AbstractContextManager[Any]], call: Callable[..., Any], x: Any, y: Any) -> Any:
    with mode():
        return call(x, y)


def _count_new_references(call: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> int:
    before = sys.getrefcount(a)
    for _ in range(64):
        call(a, b)
        call(a, None)
    return sys.getrefcount(a) - before


def _is_same(found: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return isinstance(found, tuple) and all(map(_is_same, found, expected))
    if not isinstance(expected, torch.Tensor):
        return found is expected or (isinstance(expected, int | str) and found == expected)
    return (
        type(found) is torch.Tensor
        and (found.dtype, found.requires_grad, found.is_inference()) == (expected.dtype, False, expected.is_inference())
        and found.tolist() == expected.tolist()
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value.tolist()}"
    return repr(value)
