"""Registration: one operator of torch's dispatcher for each def, with a kernel for each dispatch key."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import config

from ..cache.key import toolchain_versions
from ..cache.package_digest import SourceChanged, package_digest
from ..cache.store import current_store
from ..core.error_boundary import shorten_traceback, to_public_error
from ..core.errors import ArgumentError, InternalError, TCError
from ..core.interrupts import deferred_interrupts
from ..core.single_flight import SingleFlightCache
from ..dispatch.arguments import PLAIN, TORCH_TYPES, ParameterSpec, to_tensor
from ..dispatch.call_steps import check_names
from ..dispatch.inline_cache import MISS, InlineCache
from ..dispatch.kernel_table import CompileConfig, KernelTable
from ..runtime.fastpath.boxed import BoxedCallCache
from ..tc_lang.ir import Function
from . import autocast, autograd_kernel, vmap
from .autograd import Gradients, PythonGradient, run_without_gradients
from .boxed_kernels import make_boxed_call_cache
from .fake import fake_outputs
from .schema import NAMESPACE, Schema, schema_of

Overload = torch._ops.OpOverload
FOREVER = 1 << 62
LIMIT = 64
"""Maximum number of batched forms of an operator in memory."""
MAX_ARGUMENTS = 64
"""Most arguments of torch's operators, including the tensors of `out`."""


class DispatcherOp:
    """A def as an operator of torch's dispatcher.

    It runs the kernels of the op that was defined last with this content, or its own if that op no longer exists.

    Attributes:
        overload: `torch.ops.tc.<name>.default`, which takes inputs, then the initial values of in/out outputs.
        out: `torch.ops.tc.<name>.out`, which writes to the tensors that it takes by keyword.
        schema: its name and signature.
        names: the names of the initial values.
        count: the number of inputs, which come before the initial values.
        kinds: (type, is specialized, has dimensions) of each argument; the kernel contains the value of a specialized
            one.
        returned: (number of dimensions, type) of each result.
        batched: its batched forms, by the names of the batched arguments.
    """

    overload: Overload
    out: Overload

    def __init__(self, schema: Schema, kernels: KernelTable, gradients: Gradients, machine: CompileConfig) -> None:
        self.schema = schema
        self.function = kernels.function
        self.call_signature = kernels.call_signature
        self._given, self._make = gradients.given, gradients.make
        self.names = [p.name for p in self.call_signature.initial]
        self.count = len(self.call_signature.parameters)
        taken = (*self.function.parameters, *self.function.inouts)
        self.kinds = tuple((t.dtype, t.is_compile_time, bool(t.rank)) for t in taken)
        given = (self.function.tensor(r) for r in self.function.returns)
        self.returned = tuple((t.rank, TORCH_TYPES[t.dtype]) for t in given)
        self.call_cache: BoxedCallCache | None = None
        self.rebind(kernels, gradients, machine)

    def rebind(self, kernels: KernelTable, gradients: Gradients, machine: CompileConfig) -> None:
        """Use these kernels from now on, as long as another object references them."""
        self._kernels, self._gradients = weakref.ref(kernels), weakref.ref(gradients)
        self._machine = machine
        self._inline_cache = self._new_inline_cache()
        self._own: tuple[KernelTable, Gradients] | None = None
        self.batched: SingleFlightCache[tuple[str, ...], vmap.Batched] = SingleFlightCache(LIMIT)

    def forget(self) -> None:
        """Drop the cached calls, after the options of later calls have changed."""
        self._inline_cache = self._new_inline_cache()

    def _new_inline_cache(self) -> InlineCache:
        if self.call_cache is not None:
            self.call_cache.forget()
        return InlineCache(self.call_signature, self.call_cache)

    def parts(self) -> tuple[KernelTable, Gradients]:
        """The kernels to run and the gradients to record."""
        if self._own is not None:
            return self._own
        kernels, gradients = self._kernels(), self._gradients()
        if kernels is None or gradients is None:
            self._own = KernelTable(self.function), Gradients(self.function, self._given, self._make)
            return self._own
        return kernels, gradients

    @property
    def gradients(self) -> Gradients:
        return self.parts()[1]

    def run(self, *values: Any) -> Any:
        """The kernel for real tensors; returns fresh outputs. Raises ArgumentError or RangeError."""
        return self._call(values, None)

    def run_out(self, *values: Any, **destinations: Tensor) -> None:
        """The kernel of the overload `out`. It writes the destinations only if the call succeeds."""
        wanted = tuple(destinations[d] for d in self.schema.destinations)
        if wanted:
            self._call(values, wanted if len(wanted) > 1 else wanted[0])
        else:
            self._call(values, None)

    def _call(self, values: Sequence[Any], out: Any) -> Any:
        try:
            return run_without_gradients(self._compute, values, out)
        except TCError as error:
            shorten_traceback(error)
            raise

    def _compute(self, values: Sequence[Any], out: Any) -> Any:
        plain = [_unwrap_argument(x) for x in values]
        tensors, initial = plain[: self.count], dict(zip(self.names, plain[self.count :], strict=True))
        try:
            if (kernels := self.parts()[0]).any_cuda(plain):
                return kernels.gpu.call(tensors, out, initial, None)
            if self.call_cache is None or out is not None:  # otherwise the call cache has already missed
                result = self._inline_cache.call(tensors, out, initial)
                if result is not MISS:
                    return result
            return kernels.call(tensors, out, initial, self._machine, self._inline_cache)
        except (TCError, InternalError):
            raise
        except Exception as error:
            raise to_public_error(error) from error

    def by_position(self, tensors: Sequence[Any], initial: Mapping[str, Any]) -> list[Any]:
        """The arguments of a call as the operator takes them: numbers are tensors, except specialized ones.

        Raises ArgumentError for values that are neither tensors nor numbers that the def takes.
        """
        check_names(self.call_signature, tensors, initial)
        values = [*tensors, *(initial[name] for name in self.names)]
        expected = (*self.call_signature.parameters, *self.call_signature.initial)
        return [
            _convert_argument(e, x, special) for e, x, (_, special, _) in zip(expected, values, self.kinds, strict=True)
        ]

    def fake_kernel(self, *values: Any) -> Any:
        """The kernel for fake and meta tensors."""
        outputs = fake_outputs(self.call_signature, values)
        return outputs[0] if len(outputs) == 1 else outputs


def _convert_argument(expected: ParameterSpec, x: Any, special: bool) -> Any:
    if special:
        return int(to_tensor(expected, x).item()) if not isinstance(x, torch.SymInt) else x
    return x if isinstance(x, Tensor) else to_tensor(expected, x)


def _unwrap_argument(x: Any) -> Any:
    return x.as_subclass(Tensor) if isinstance(x, Tensor) and type(x) not in PLAIN else x


_operators: SingleFlightCache[str, DispatcherOp] = SingleFlightCache(FOREVER)
_begun: dict[str, DispatcherOp] = {}
"""Operators whose registration has begun. An interrupted one is resumed, since torch accepts no name twice."""
_library: SingleFlightCache[str, Any] = SingleFlightCache(1)


def operator_for_def(kernels: KernelTable, gradients: Gradients, machine: CompileConfig) -> DispatcherOp | None:
    """The operator of a def, the same for every def with the same content; None if it has too many arguments."""
    function = kernels.function
    if len(function.parameters) + len(function.inouts) + len(function.returns) > MAX_ARGUMENTS:
        return None
    schema = schema_of(function, gradient_name(gradients.given))
    found = _operators.get(schema.name, lambda: _register_operator(schema, kernels, gradients, machine))
    if found.parts()[0] is not kernels:
        found.rebind(kernels, gradients, machine)
    return found


def operator_named(name: str) -> DispatcherOp:
    """The operator with this name, whose registration has begun. Raises KeyError."""
    return _begun[name]


def _register_operator(
    schema: Schema, kernels: KernelTable, gradients: Gradients, machine: CompileConfig
) -> DispatcherOp:
    left = _begun.get(schema.name)
    op = left or _begun.setdefault(schema.name, DispatcherOp(schema, kernels, gradients, machine))
    _register_op(op, again=left is not None)
    return op


def no_operator_error(function: Function) -> ArgumentError:
    """The error for a def that has no operator."""
    return ArgumentError(
        f"{function.name} is too large: operators of torch have at most {MAX_ARGUMENTS} inputs and outputs",
        found=f"{len(function.parameters) + len(function.inouts)} inputs, {len(function.returns)} outputs",
        suggestion="call the def itself, or stack some: `float(4,N) x` holds four tensors",
    )


_python_gradients: dict[Any, int] = {}


def gradient_name(given: str | PythonGradient | None) -> str:
    """The text of a given gradient as a part of a def's content; Python functions are distinguished by identity."""
    if given is None or isinstance(given, str):
        return given or ""
    return f"python {_python_gradients.setdefault(given, len(_python_gradients))}"


def _new_library() -> Any:
    with deferred_interrupts():  # torch imports sympy here
        _add_digest_to_graph_cache_key()
        new: Callable[..., Any] = torch.library.Library
        return new(NAMESPACE, "FRAGMENT")


def _add_digest_to_graph_cache_key() -> None:
    """Keep torch from reusing compiled graphs on disk that another version of this package produced.

    Such a graph calls operators of gradients, which another version may derive differently, while its key contains only
    the forward operators.
    """
    try:
        text = package_digest(current_store())
    except SourceChanged:
        text = str(dict(toolchain_versions())["tensor-comprehensions"])
    mark = f"tensor_comprehensions:{text[:12]};"
    if mark not in config.cache_key_tag:
        config.cache_key_tag += mark


class Registration:
    """The registration of one operator with torch. again: parts of it may exist already, and are left unchanged."""

    def __init__(self, name: str, again: bool) -> None:
        self._library, self._again = _library.get("", _new_library), again
        self._name = f"{NAMESPACE}::{name}"

    def define(self, schema: str, tags: Sequence[torch.Tag], overload: str = "") -> None:
        if not self._again or not self._is_defined(overload):
            self._library.define(schema, tags=tags)

    def implement(self, kernel: Callable[..., Any], *keys: str, overload: str = "") -> None:
        for key in keys:
            if not self.has(key, overload):
                self._library.impl(self._name + overload, kernel, key)

    def register_fake_kernel(self, kernel: Callable[..., Any]) -> None:
        """Register the kernel for fake and meta tensors."""
        inspect.modulesbyfile.setdefault(__file__, __name__)  # or torch searches all modules for the caller's name
        if not self.has("Meta"):
            torch.library.register_fake(self._name, kernel, lib=self._library)

    def has(self, key: str, overload: str = "") -> bool:
        return self._again and torch._C._dispatch_has_kernel_for_dispatch_key(self._name + overload, key)

    def _is_defined(self, overload: str) -> bool:
        try:
            torch._C._dispatch_find_schema_or_throw(self._name, overload.lstrip("."))
        except RuntimeError:
            return False
        return True


def _register_op(op: DispatcherOp, again: bool) -> None:
    registration, out, tags = (
        Registration(op.schema.name, again),
        ".out",
        (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
    )
    registration.define(op.schema.functional, tags)
    packet = getattr(getattr(torch.ops, NAMESPACE), op.schema.name)
    op.overload = packet.default
    op.call_cache = op.call_cache or make_boxed_call_cache(op)
    if op.call_cache is None:
        registration.implement(op.run, "CPU")
    else:
        op.call_cache.register(NAMESPACE, op.schema.name, registration.has)
    registration.implement(op.run, "CUDA", "CompositeExplicitAutograd")  # the second for defs that take no tensor
    registration.register_fake_kernel(op.fake_kernel)
    registration.define(op.schema.out, tags[:1], out)
    if again:
        torch._ops._refresh_packet(packet)  # type: ignore[no-untyped-call]
    op.out = packet.out
    registration.implement(op.run_out, "CPU", "CUDA", overload=out)
    registration.implement(lambda *values, **destinations: None, "Meta", overload=out)
    registration.implement(partial(autograd_kernel.out_autograd_kernel, op), "Autograd", overload=out)
    registration.implement(partial(vmap.refuse_out_under_vmap, op), "FuncTorchBatched", overload=out)
    registration.implement(partial(autograd_kernel.autograd_kernel, op), "Autograd")
    registration.implement(partial(autocast.autocast_kernel, op), "AutocastCPU", "AutocastCUDA")
    registration.implement(partial(vmap.vmap_kernel, op), "FuncTorchBatched")
    op.forget()
