"""The kernels of a sparse def, and the steps of a call: check the operands, find the kernel, convert the results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...compiler.compiled_sparse_kernel import CompiledSparseKernel
from ...core.errors import ArgumentError, CannotLower
from ...core.lazy_import import lazy_module
from ...core.memory_layout import contiguous_strides
from ...core.single_flight import SingleFlightCache
from ...options import SparseOptions
from ...runtime.cpu.host import host
from ...sparse.call_plan import CallPlan
from ...sparse.sparse_problem import KernelRequest, fixed_sizes, row_extents, wide_results
from ...tc_lang.binding.match_arguments import TensorType, match_arguments
from ...tc_lang.formats import Format
from ...tc_lang.ir import Function, Role
from ...tc_lang.semantics.sparse_rules import is_dense_contraction, pattern_depends_on_values, with_formats
from ...tc_lang.size_polynomial import Value
from ..arguments import TORCH_TYPES, ParameterSpec, to_tensor
from ..call_steps import CallSignature, check_names
from .caller_kind import check_results_exist, is_sparse, results_in_caller_kind
from .fast_call import FastCall
from .interop import from_scipy, from_torch, is_scipy
from .sparse_cache import load_or_compile_sparse
from .sparse_run import INDEX_TYPES, SparseCall, SparseRun, StoredCounts
from .sparse_tensor import SparseTensor
from .structure import Structure, check_structure, list_index_arrays, structure_of

if TYPE_CHECKING:
    from ...compiler import sparse_passes
    from ...sparse import lower, shared_sparsity
    from ...tc_lang.transforms import split_dense
    from ...tc_lang.transforms.split_dense import DefPart
    from ..kernel_table import SparseOptionsProvider
    from . import sparse_kernel, split_run
    from .sparse_gpu_kernels import SparseGpuKernel, SparseGpuKernels
    from .split_run import RunSparse, SplitRun
else:
    lower, shared_sparsity = lazy_module("sparse.lower"), lazy_module("sparse.shared_sparsity")
    sparse_kernel, split_run = lazy_module("dispatch.sparse.sparse_kernel"), lazy_module("dispatch.sparse.split_run")
    sparse_passes, split_dense = lazy_module("compiler.sparse_passes"), lazy_module("tc_lang.transforms.split_dense")

LIMIT = 64
"""Maximum number of kernels of one def in memory."""


class SparseKernels:
    """The kernels of one def for sparse operands. They depend neither on sizes nor on the stored elements."""

    def __init__(
        self,
        call_signature: CallSignature,
        formats: Mapping[str, Format] | None = None,
        options: SparseOptions | None = None,
        choose: SparseOptionsProvider | None = None,
    ) -> None:
        """choose: returns options for calls without tuned options; if it is None or returns None, `options` apply."""
        self.call_signature = call_signature
        self.options = SparseOptions() if options is None else options
        self._choose = choose
        self._tuned: dict[Hashable, SparseOptions] = {}
        self._splits: SingleFlightCache[Hashable, SplitRun | None] = SingleFlightCache(LIMIT)
        self.function = with_formats(call_signature.function, formats or {})
        self._functions: SingleFlightCache[Hashable, Function] = SingleFlightCache(LIMIT)
        self._kernels: SingleFlightCache[Hashable, CompiledSparseKernel] = SingleFlightCache(LIMIT)
        self._row_extents: SingleFlightCache[Hashable, tuple[tuple[str, Value], ...]] = SingleFlightCache(LIMIT)
        self._gpu: SparseGpuKernels | None = None

    def run(
        self, call: SparseCall, counts: StoredCounts | None = None, options: SparseOptions | None = None
    ) -> dict[str, Tensor | SparseTensor]:
        """The results of the def, by name.

        Args:
            counts: the counts of a call with the same patterns; missing counts are computed and added to it.
            options: the options; None: those of all calls like this one.

        Raises:
            ArgumentError: the sizes of the operands do not fit the def.
        """
        function = self.function_for_call(call)
        chosen = self.options_for(function, call) if options is None else options
        split = self._split_run(function, chosen)
        if split is not None:
            return split.run(call, counts)
        if call.device is not None:
            return self.gpu.run(function, call, self.sizes(call), chosen)
        refills = counts is not None and bool(counts.levels)
        return SparseRun(*self._kernel_for(call, refills, chosen), counts).results()

    def _split_run(self, function: Function, chosen: SparseOptions) -> SplitRun | None:
        """Runs the dense contractions of a def as dense kernels; None if it has none."""

        def make_part(part: Function) -> RunSparse:
            return SparseKernels(CallSignature.of(part), None, chosen).run

        def make() -> SplitRun | None:
            parts = _split_dense(function)
            return split_run.SplitRun(function, parts, make_part) if parts else None

        return self._splits.get((_formats_of(function), chosen), make)

    def dense_contractions(self, function: Function) -> tuple[str, ...]:
        """The tensors of a def that dense kernels compute."""
        parts = _split_dense(function)
        return tuple(r for p in parts if p.is_dense for r in p.function.returns)

    def with_options(self, options: SparseOptions) -> SparseKernels:
        """The kernels of the same def with other options."""
        formats = {t.name: t.format for t in self.function.tensors if t.format is not None}
        return SparseKernels(
            self.call_signature, {n: f for n, f in formats.items() if self._is_argument_or_result(n)}, options
        )

    def _is_argument_or_result(self, name: str) -> bool:
        return self.function.tensor(name).role is not Role.TEMPORARY

    def set_tuned_options(self, call: SparseCall, options: SparseOptions) -> None:
        """Set the options of later calls with operands of these formats."""
        self._tuned[_formats_of(self.function_for_call(call))] = options

    def options_for(self, function: Function, call: SparseCall) -> SparseOptions:
        """The options of calls with operands of these formats; the first call looks for tuned options."""
        if call.device is not None:
            return self.options
        key = _formats_of(function)
        if key not in self._tuned and self._choose is not None:
            self._tuned[key] = self._choose(function, call, self.sizes(call)) or self.options
        return self._tuned.get(key, self.options)

    def compile(self, values: Sequence[object], initial: Mapping[str, object]) -> CompiledSparseKernel:
        """The kernel for a call like this. Raises ArgumentError as `accept` does."""
        kernel, _, _ = self._kernel_for(self.accept(values, initial))
        return kernel

    @property
    def gpu(self) -> SparseGpuKernels:
        """The kernels for GPUs."""
        if self._gpu is None:
            from .sparse_gpu_kernels import SparseGpuKernels

            self._gpu = SparseGpuKernels()
        return self._gpu

    def compile_for_gpu(
        self, call_op: Callable[..., Any], values: Sequence[object], initial: Mapping[str, object], wanted: Any
    ) -> SparseGpuKernel:
        """The kernel for a call like this on a GPU: the target `wanted`, or None for the device of its tensors.

        Raises:
            ArgumentError: as `accept` does, or the def cannot be lowered for GPUs.
        """
        from ..cuda.device_arguments import resolve_gpu_target
        from .sparse_gpu_kernels import SparseGpuKernel

        prepared = self._prepare(values, initial)
        device = prepared[1].device
        if wanted is None and device is not None:
            from ...runtime.cuda import launch

            target = launch.device_target(device.index)
        else:
            target = resolve_gpu_target(wanted)
        kernel = self.gpu.kernel(*prepared, self.options, target)
        return SparseGpuKernel(call_op, self._prepare, results_in_caller_kind, kernel)

    def _prepare(
        self, values: Sequence[object], initial: Mapping[str, object]
    ) -> tuple[Function, SparseCall, dict[str, int]]:
        """The def with the formats of a call, the call, and its sizes."""
        call = self.accept(sparse_kernel.without_gradients(values), initial)
        return self.function_for_call(call), call, self.sizes(call)

    def reference(self, values: Sequence[object], initial: Mapping[str, object]) -> Any:
        """The result of a call by the reference evaluator. Raises ArgumentError as `accept` does."""
        call = self.accept(sparse_kernel.without_gradients(values), initial)
        check_results_exist(self.function, values)
        return results_in_caller_kind(
            sparse_kernel.evaluate(self.function_for_call(call), call, self.sizes(call)), values
        )

    def make_fast_call(
        self, call: SparseCall, values: Sequence[object], results: Mapping[str, Tensor | SparseTensor]
    ) -> FastCall | None:
        """The fast path for calls like this one, with `values` and `results`; None if it cannot have one."""
        if call.device is not None or self.call_signature.initial or self.function.scalars:
            return None
        if call.unversioned or not all(map(_may_take_fast_path, values)):
            return None
        function = self.function_for_call(call)
        if self._split_run(function, self.options_for(function, call)) is not None:
            return None
        if pattern_depends_on_values(function):
            return None
        kernel, _, sizes = self._kernel_for(call)
        held = any(s.copies is not None for s in call.structures.values())
        if held or not _makes_results_of_known_sizes(kernel.plan, results):
            return None
        if not all(x.values.is_contiguous() for x in call.sparse.values()):
            return None
        return SparseRun(kernel, call, sizes, None).make_fast_call(values, results)

    # --- operands ------------------------------------------------------------------------------------------------

    def accept(self, values: Sequence[object], initial: Mapping[str, object]) -> SparseCall:
        """The operands of a call. Raises ArgumentError if one does not fit the def, or is malformed."""
        check_names(self.call_signature, values, initial)
        sparse: dict[str, SparseTensor] = {}
        dense: dict[str, Tensor] = {}
        structures: dict[str, Structure] = {}
        unversioned: set[str] = set()
        device = find_device((*values, *initial.values()))
        named = [*zip(self.call_signature.parameters, values, strict=True)]
        named += [(p, initial[p.name]) for p in self.call_signature.initial]
        for p, value in named:
            declared = self.function.tensor(p.name).format
            if is_sparse(value):
                sparse[p.name], structures[p.name] = self._sparse(p, value, device)
                if is_scipy(value) or any(x.is_inference() for x in list_index_arrays(sparse[p.name].levels)):
                    unversioned.add(p.name)
            elif declared is not None and not declared.is_dense:
                raise self.dense_error(p)
            else:
                in_text = self.function.tensor(p.name).is_compile_time
                dense[p.name] = _make_contiguous(p, value, None if in_text else device)
        return SparseCall(sparse, dense, structures, device, frozenset(unversioned))

    def dense_error(self, p: ParameterSpec) -> ArgumentError:
        """The error for a dense operand where the def declares a sparse one."""
        declared = self.function.tensor(p.name).format
        return p.error("is dense", found="a dense tensor", suggestion=f'pass tc.as_sparse({p.name}, "{declared}")')

    def _sparse(self, p: ParameterSpec, value: Any, device: torch.device | None) -> tuple[SparseTensor, Structure]:
        name = p.name
        try:
            t = _as_stored(value)
            structure = check_structure(t) if is_scipy(value) else structure_of(t)
        except ArgumentError as error:
            raise ArgumentError(
                f"argument '{name}' of {self.function.name}: {error.message}",
                expected=error.expected, found=error.found, suggestion=error.suggestion,
            ) from None  # fmt: skip
        symbol = self.function.tensor(name)
        self.check_format(p, t.format)
        if t.dtype is not TORCH_TYPES[symbol.dtype]:
            raise ArgumentError(
                f"argument '{name}' of {self.function.name} has another element type",
                expected=str(symbol.dtype), found=str(t.dtype).removeprefix("torch."),
            )  # fmt: skip
        plain = _plain_tensor(replace(p, dims=("",) * t.values.ndim), t.values.detach(), device)
        if any(x.device != plain.device for level in t.levels if level is not None for x in level if x is not None):
            raise p.error("has levels on another device than its values", suggestion="pass parts on one device")
        levels = t.levels if structure.copies is None else structure.copies
        values = t.values if t.values.requires_grad and torch.is_grad_enabled() else plain
        return SparseTensor.from_known(t.format, t.shape, levels, values), structure

    def check_format(self, p: ParameterSpec, format: Format) -> None:
        """Check that a sparse operand has the rank and the format that the def declares. Raises ArgumentError."""
        symbol = self.function.tensor(p.name)
        if symbol.role is Role.INOUT:
            raise p.error("is in/out, and sparse", found="a sparse tensor", suggestion="pass a dense initial value")
        if format.rank != symbol.rank:
            raise p.error(f"has {format.rank} dimensions instead of {symbol.rank}", found=f"the format '{format}'")
        if symbol.format is not None and format != symbol.format:
            raise ArgumentError(
                f"argument '{p.name}' of {self.function.name} has another format",
                expected=str(symbol.format), found=str(format),
                suggestion=f'pass tc.as_sparse({p.name}, "{symbol.format}")',
            )  # fmt: skip

    def stored_operands(self, values: Sequence[object]) -> dict[str, Any]:
        """The operands by name, with sparse ones as `SparseTensor`. Their arrays are not checked.

        Raises:
            ArgumentError: an operand has another format or rank than the def declares.
        """
        found: dict[str, Any] = {}
        for p, value in zip((*self.call_signature.parameters, *self.call_signature.initial), values, strict=True):
            symbol = self.function.tensor(p.name)
            if is_sparse(value):
                t = _as_stored(value)
                self.check_format(p, t.format)
                found[p.name] = t.as_strided() if t.format.is_dense else t
            elif symbol.is_sparse:
                raise self.dense_error(p)
            elif symbol.is_compile_time:
                found[p.name] = value if isinstance(value, torch.SymInt) else int(to_tensor(p, value).item())
            else:
                found[p.name] = value if isinstance(value, Tensor) else to_tensor(p, value)
        return found

    def function_for(self, formats: Mapping[str, Format]) -> Function:
        """The def with the given formats of operands."""
        return self._functions.get(tuple(formats.items()), lambda: with_formats(self.function, formats))

    def function_for_call(self, call: SparseCall) -> Function:
        """The def with the formats of the operands of a call."""
        return self.function_for({n: t.format for n, t in call.sparse.items()})

    def sizes(self, call: SparseCall) -> dict[str, int]:
        """The sizes of the def for the shapes of the operands, and its integer scalars. Raises ArgumentError."""
        types = [self._type(p.name, call) for p in self.call_signature.parameters]
        initial = {p.name: self._type(p.name, call) for p in self.call_signature.initial}
        scalars = {n: int(call.dense[n].item()) for n in self.function.scalars}
        binding = match_arguments(self.function, types, initial, scalars)
        return {**binding.sizes, **binding.scalars}

    def _type(self, name: str, call: SparseCall) -> TensorType:
        held = call.sparse.get(name)
        shape = tuple(call.dense[name].shape) if held is None else held.shape
        return TensorType(self.function.tensor(name).dtype, shape, contiguous_strides(shape))

    # --- kernels -------------------------------------------------------------------------------------------------

    def _kernel_for(
        self, call: SparseCall, refills: bool = False, options: SparseOptions | None = None
    ) -> tuple[CompiledSparseKernel, SparseCall, dict[str, int]]:
        """The kernel for a call, the call, and its sizes.

        Args:
            refills: whether the patterns of results are known.
            options: the options; None: those of all calls like this one.
        """
        sizes, function = self.sizes(call), self.function_for_call(call)
        chosen = self.options_for(function, call) if options is None else options
        return self._kernel(function, call, sizes, refills, chosen), call, sizes

    def _kernel(
        self, function: Function, call: SparseCall, sizes: Mapping[str, int], refills: bool, options: SparseOptions
    ) -> CompiledSparseKernel:
        types = tuple((n, INDEX_TYPES[t.index_dtype]) for n, t in call.sparse.items())
        fixed = fixed_sizes(function, {n: v for n, v in sizes.items() if n not in function.scalars})
        formats = _formats_of(function)
        extents = self._row_extents.get(formats, lambda: row_extents(function))

        def make(threads: int, refills: bool, wide: tuple[str, ...]) -> CompiledSparseKernel:
            request = KernelRequest(function, types, fixed, threads, refills, options, wide)
            try:
                return load_or_compile_sparse(request, host(), lambda: compile_now(request))
            except CannotLower as refusal:
                raise ArgumentError(f"{function.name} cannot be lowered for these formats: {refusal}") from refusal

        def compile_now(request: KernelRequest) -> CompiledSparseKernel:
            """The kernel for a request, or a simpler one that is as fast, which is then cached under both keys."""
            problem = shared_sparsity.make_cpu_problem(request)
            if request.refills and not lower.gains_from_refilling(problem):
                return kernel(request.threads, False, request.wide)
            if request.threads > 1 and not lower.gains_from_staging(problem):
                return kernel(1, request.refills, request.wide)
            if request.wide and not lower.needs_row_workspaces(problem):
                return kernel(request.threads, request.refills, ())
            return sparse_passes.compile_sparse(request, host())

        def kernel(threads: int, refills: bool, wide: tuple[str, ...]) -> CompiledSparseKernel:
            key = (formats, types, fixed, threads, refills, options, wide)
            return self._kernels.get(key, lambda: make(threads, refills, wide))

        threads = {"always": max(2, torch.get_num_threads()), "never": 1, "auto": torch.get_num_threads()}
        return kernel(threads[options.stage_rows], refills, wide_results(extents, sizes, options))


def _formats_of(function: Function) -> Hashable:
    return tuple((t.name, t.format) for t in function.tensors)


def _split_dense(function: Function) -> tuple[DefPart, ...]:
    """The parts of a def with dense contractions; () if it is not split."""
    if not any(is_dense_contraction(function, s) for s in function.statements):
        return ()
    return split_dense.split_dense_contractions(function, shared_sparsity.shared_patterns(function))


def _as_stored(value: Any) -> SparseTensor:
    """A sparse tensor of any kind as a `SparseTensor` that shares its arrays."""
    if isinstance(value, SparseTensor):
        return value
    return from_torch(value) if isinstance(value, Tensor) else from_scipy(value)


def _makes_results_of_known_sizes(plan: CallPlan, results: Mapping[str, Tensor | SparseTensor]) -> bool:
    """Whether a call with the same sizes needs only kernels and uninitialized memory to make its results.

    That is, no conversions, no intermediate sparse results, and no memory that must be zero.
    """
    parameters = {o.name for o in plan.operands if o.role is Role.INPUT}
    if plan.conversions or plan.versions or not {source for _, source in plan.problem.shared} <= parameters:
        return False
    if not {name for name, _ in plan.problem.shared} <= {*plan.unfilled}:
        return False
    names = [
        r.tensor for r in plan.results if r.levels is not None and r.levels.format.depth == len(r.levels.format.levels)
    ]
    own = [n for n, x in results.items() if isinstance(x, SparseTensor) and n not in dict(plan.problem.shared)]
    return sorted(names) == sorted(own) and len(names) == len(plan.results)


def _may_take_fast_path(value: object) -> bool:
    """Whether the fast path supports an operand of this kind."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.layout in (torch.strided, torch.sparse_csr, torch.sparse_csc)
    return type(value) is SparseTensor


def find_device(values: Sequence[object]) -> torch.device | None:
    """The GPU of the first tensor that is on one; None if all are on the CPU."""
    held = (v.values if isinstance(v, SparseTensor) else v for v in values)
    return next((v.device for v in held if isinstance(v, Tensor) and v.is_cuda), None)


def _plain_tensor(expected: ParameterSpec, value: object, device: torch.device | None) -> Tensor:
    """`value` as a plain tensor on the device of the call. Raises ArgumentError if it is not one."""
    if device is None:
        return to_tensor(expected, value)
    from ..cuda.device_arguments import to_device_tensor

    return to_device_tensor(device, expected, value)


def _make_contiguous(expected: ParameterSpec, value: object, device: torch.device | None) -> Tensor:
    """A dense operand as a contiguous tensor, which keeps its autograd graph."""
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        _plain_tensor(expected, value.detach(), device)
        return value.resolve_neg().contiguous()
    return _plain_tensor(expected, value, device).contiguous()
