"""Facts about the calls of an operator, for reports: the guards of the fast path, and the kernels so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ..compiler.compiled_kernel import CompiledCpuKernel, CompiledRangeKernel
from ..compiler.row_strides import GIVEN, PACKED
from ..explain.kernel_report import CallFacts
from ..runtime.fastpath import availability
from ..tc_lang.ir import Role
from .inline_cache import InlineCache, is_plain_call
from .kernel_table import KernelTable
from .persistent_kernel_cache import was_cache_hit
from .signatures import declared_dims

SHOWN_VALUES = 8
"""Maximum number of values of a size that a report lists."""


def collect_call_facts(
    kernels: KernelTable, inline_cache: InlineCache, compiled: CompiledCpuKernel, values: Sequence[Any]
) -> CallFacts:
    """The facts about calls like one with `values`, which `compiled` serves."""
    known = kernels.loaded_kernels()
    loaded = sum(map(was_cache_hit, known))
    return CallFacts(
        tuple(_list_guards(compiled)),
        _find_hindrance(values),
        inline_cache.count(),
        len(known) - loaded,
        loaded,
        sum(k.compile_seconds for k in known),
        tuple(_list_varying_sizes(kernels, known)),
    )


STRIDE_WORDS = {PACKED: "packed", GIVEN: "any"}
"""Words for stride classes."""


def _list_guards(compiled: CompiledCpuKernel) -> Iterator[str]:
    """The type, sizes and strides that each tensor of a call must have."""
    ranged = compiled if isinstance(compiled, CompiledRangeKernel) else None
    for t in compiled.bound.tensors:
        if t.role is Role.INPUT:
            sizes, strides = list(map(str, t.shape)), list(map(str, t.strides))
            if ranged is not None and t.name in ranged.strides:
                strides = [STRIDE_WORDS.get(n, str(n)) for n in ranged.strides[t.name]]
                for d, number in ranged.dynamic_dimensions(t.name).items():
                    sizes[d] = ranged.dynamic_sizes[number]
            layout = f" of {' x '.join(sizes)}, strides {', '.join(strides)}" if sizes else ""
            yield f"{t.name}: {t.dtype}{layout}"


def _find_hindrance(values: Sequence[Any]) -> str:
    """Why a call with `values` does not take the fast path; "" if it does."""
    decision = availability.decide_fast_path()
    if not decision.available:
        return f"calls are recognized in Python: {decision.reason}"
    if any(hasattr(v, "__array__") and not isinstance(v, Tensor) for v in values):
        return "an argument is no tensor of torch, and is converted in each call"
    if any(isinstance(v, Tensor) and v.requires_grad for v in values):
        return "an argument requires gradients: autograd records the call"
    return "" if is_plain_call(values) else "torch traces, transforms or watches the call"


def _list_varying_sizes(kernels: KernelTable, known: Sequence[CompiledCpuKernel]) -> Iterator[str]:
    """The sizes in which the kernels differ, with their values."""
    found: dict[str, set[int]] = {}
    for k in known:
        inputs = [t for t in k.bound.tensors if t.role is Role.INPUT]
        for parameter, t in zip(kernels.function.parameters, inputs, strict=True):
            for d, (size, extent) in enumerate(zip(declared_dims(parameter), t.shape, strict=True)):
                if not (isinstance(k, CompiledRangeKernel) and d in k.dynamic_dimensions(t.name)):
                    name = size if size != "?" else f"dimension {d} of {t.name}"
                    found.setdefault(name, set()).add(extent)
    for name, extents in found.items():
        if len(extents) > 1:
            shown = ", ".join(map(str, sorted(extents)[:SHOWN_VALUES]))
            yield f"{name}: {shown}{', ...' if len(extents) > SHOWN_VALUES else ''}"
