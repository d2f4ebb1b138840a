"""Callables that run kernels: `KernelDispatcher`, with the fast paths of a call, and `Kernel`.

Invariant: a call raises only a `TCError` (the caller's mistake) or an `InternalError` (our bug), and a failed call
changes none of the caller's tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import profiler

from .compiler.compiled_kernel import CompiledCpuKernel
from .core.error_boundary import only_tc_errors, shorten_traceback, to_public_error
from .core.errors import ArgumentError, InternalError, TCError
from .dispatch.compiled_callable import CompiledCallable
from .dispatch.graph_breaks import run_outside_graphs
from .dispatch.inline_cache import MISS, InlineCache
from .dispatch.kernel_table import CompileConfig, KernelTable
from .dispatch.signatures import format_signature
from .runtime.fastpath.call_cache import RECORDED
from .torch_ext.autograd import Gradients, call_with_autograd, is_recorded, record_call
from .torch_ext.dynamo_calls import call_in_graph, call_overload, needs_dispatcher
from .torch_ext.registration import DispatcherOp

if TYPE_CHECKING:
    from pathlib import Path

    from .explain.kernel_report import Report
    from .torch_ext.sparse_op import SparseOp

Value = Any
"""A tensor, an array or a number."""
Out = Tensor | tuple[Tensor, ...] | None
_is_traced, _casts = torch.compiler.is_dynamo_compiling, torch.is_autocast_enabled
_is_transformed = torch._C._are_functorch_transforms_active


class KernelDispatcher:
    """A callable on tensors that runs kernels for one machine.

    A call first tries the kernel of the last call, then those of earlier calls, then the slow path: checking the
    arguments and loading or compiling a kernel.
    """

    def __init__(self, kernels: KernelTable, machine: CompileConfig, gradients: Gradients) -> None:
        self.function = kernels.function
        self._kernels, self._machine, self._gradients = kernels, machine, gradients
        self._inline_cache = InlineCache(kernels.call_signature)
        self._direct: Callable[..., Any] | None = None
        self._operator: DispatcherOp | None = None
        self._sparse: SparseOp | None = None
        self._out_is_inout = any(p.name == "out" for p in kernels.function.inouts)

    def __call__(self, /, *tensors: Value, out: Out = None, **initial: Value) -> Any:
        operator = self._operator
        if _is_traced() and self._kernels.has_sparse((*tensors, *initial.values())):
            return self._call_sparse_traced(tensors, out, initial)
        if _is_traced() and operator is not None:
            if self._out_is_inout and out is not None:
                out, initial = None, {"out": out, **initial}
            return call_in_graph(operator, tensors, out, initial)
        try:
            plain = special = recording = False
            try:
                direct = self._direct
                watched = profiler._is_profiler_enabled and operator is not None
                if direct is not None and out is None and not (initial or watched):
                    result = direct(*tensors)
                    if result is RECORDED:
                        plain = self._gradients.possible and not (_is_transformed() or _casts("cpu"))
                    elif result is not NotImplemented:
                        return result
                if not plain:
                    if self._out_is_inout and out is not None:
                        out, initial = None, {"out": out, **initial}
                    result = MISS if watched else self._inline_cache.call(tensors, out, initial)
                    values = (*tensors, *initial.values())
                    sparse = result is MISS and self._kernels.has_sparse(values)
                    special = result is MISS and not sparse and operator is not None and needs_dispatcher(values)
                    recording = result is MISS and not (sparse or special) and is_recorded(values)
                    if result is MISS and not (special or recording):
                        if sparse:
                            return self._call_sparse(tensors, out, initial)
                        if self._kernels.any_cuda(values):
                            result = self._kernels.gpu.call(tensors, out, initial, None)
                            self._direct = self._kernels.gpu.direct_function()
                            return result
                        result = self._kernels.call(tensors, out, initial, self._machine, self._inline_cache)
                    self._direct = self._inline_cache.direct_function()
            except (TCError, InternalError):
                raise
            except Exception as error:
                raise to_public_error(error) from error
            if plain:  # outside the error boundary: errors of torch's hooks pass unchanged
                return record_call(self, self._gradients, tensors)
            if recording:
                return call_with_autograd(self, self._kernels.call_signature, self._gradients, tensors, out, initial)
            if special and operator is not None:
                return call_overload(operator, tensors, out, initial)
            return result
        except TCError as error:
            shorten_traceback(error)
            raise

    @run_outside_graphs("Dynamo traces no sparse tensors of torch or SciPy: pass tc.as_sparse(x) into the graph")
    def _call_sparse(self, tensors: tuple[Value, ...], out: Out, initial: dict[str, Value]) -> Any:
        """A call with sparse operands, or of a def with formats."""
        if out is not None:
            raise self.sparse_out_error()
        op = self.sparse_op
        result = op(*tensors, **initial)
        self._direct = op.direct
        return result

    def _call_sparse_traced(self, tensors: tuple[Value, ...], out: Out, initial: dict[str, Value]) -> Any:
        """A call with sparse operands that Dynamo traces."""
        from .torch_ext.sparse_dynamo import call_sparse_in_graph, is_traceable

        if is_traceable((*tensors, *initial.values())):
            return call_sparse_in_graph(self, tensors, out, initial)
        return self._call_sparse(tensors, out, initial)

    def sparse_out_error(self) -> ArgumentError:
        """The error for a call with sparse operands and `out=`."""
        return ArgumentError(
            f"{self.function.name} has sparse operands, with which a call takes no 'out'",
            suggestion="copy the result of the call",
        )

    @property
    def sparse_op(self) -> SparseOp:
        """The operator that runs calls with sparse operands."""
        if self._sparse is None:
            from .torch_ext.sparse_op import SparseOp

            self._sparse = SparseOp(self._kernels.sparse, self._gradients.make, self._gradients.given)
        return self._sparse


class Kernel(KernelDispatcher, CompiledCallable[CompiledCpuKernel]):
    """A kernel of an operator, compiled with given options. Call it like the operator.

    Called with other sizes, it compiles another kernel with the same options.

    Attributes:
        compiled: the compiled kernel with its source texts and metadata.
        compile_seconds: the compilation time.
        resources: kernels launched, bytes of temporaries, bytes of machine code.
    """

    def __init__(
        self, kernels: KernelTable, machine: CompileConfig, gradients: Gradients, compiled: CompiledCpuKernel
    ) -> None:
        super().__init__(kernels, machine, gradients.without_saved)
        self.compiled = compiled

    def __repr__(self) -> str:
        return f"<kernel of {format_signature(self.function)}, compiled in {self.compile_seconds * 1e3:.0f} ms>"

    @only_tc_errors
    def source(self, kind: str = "llvm") -> str:
        """The kernel as text; `kind` is "tc", "schedule", "loops", "c", "llvm" or "asm"."""
        return self.compiled.source(kind)

    @only_tc_errors
    def explain(self) -> Report:
        """Explain the kernel's code: `print` the report for the short form, `save("x.html")` it for the page."""
        return self._make_report(asked=False)

    def _make_report(self, *, asked: bool, journal: Path | None = None) -> Report:
        """The report.

        asked: whether the operator takes its options from tuned records.
        journal: the journal of a search to show, if any.
        """
        from .autotuner.recorded_options import explain_record
        from .autotuner.search_history import find_search
        from .cache.key import make_key
        from .dispatch.persistent_kernel_cache import describe_origin
        from .explain.cpu import explain_cpu_kernel

        c = self.compiled
        record = explain_record(self.function, c.bound, c.options, c.target, asked=asked)
        search = find_search(make_key(self.function, c.bound, c.target, threads=torch.get_num_threads()), journal)
        report = explain_cpu_kernel(c, (record,), (("cache", describe_origin(self.function, c)),))
        return replace(report, search=search)
