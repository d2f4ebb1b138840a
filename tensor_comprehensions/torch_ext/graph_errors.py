"""Errors found while torch traces: the graph raises them when it runs, as an eager call would.

Dynamo would replace an exception that is raised during tracing by its own, or swallow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.errors import ArgumentError, Span
from ..core.interrupts import deferred_interrupts
from ..core.single_flight import SingleFlightCache
from ..dispatch.arguments import TORCH_TYPES
from ..dispatch.inline_cache import dtype_number
from .schema import NAMESPACE

F = TypeVar("F", bound=Callable[..., Any])
ErrorFields = tuple[str, str, int, int, str, str, str]
"""The fields of an ArgumentError: message, source, start and end of the span, expected, found, suggestion."""

_registered: SingleFlightCache[str, Any] = SingleFlightCache(1)


def dynamo_constant(call: F) -> F:
    """Let Dynamo call a function of constants instead of tracing it, and treat its result as a constant.

    Equivalent to `torch.compiler.assume_constant_result`, which imports Dynamo.
    """
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call


def error_fields(error: ArgumentError) -> ErrorFields:
    """The fields of an error, which a graph can hold. Also registers the operator that raises it."""
    _registered.get("", _register_refused_op)
    span = error.span or Span(0, 0)
    return error.message, error.source or "", span.start, span.end, error.expected, error.found, error.suggestion


def deferred_error(words: ErrorFields, near: Sequence[Any], kinds: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Put an operator that raises the error into the graph; returns placeholders for the results of the call.

    near: values of the call, whose device the placeholders have. kinds: (rank, type) of each result.
    """
    message, source, start, end, expected, found, suggestion = words
    beside = [x.detach() for x in near if isinstance(x, Tensor)]
    ranks, types = [rank for rank, _ in kinds], [dtype for _, dtype in kinds]
    texts = [message, source, expected, found, suggestion]
    results: list[Tensor] = torch.ops.tc.refused(texts, [start, end], beside, ranks, types)
    return results


def _register_refused_op() -> Any:
    with deferred_interrupts():
        from torch._library.effects import EffectType
    new: Callable[..., Any] = torch.library.Library
    library, name = new(NAMESPACE, "FRAGMENT"), f"{NAMESPACE}::refused"
    library.define("refused(str[] texts, int[] span, Tensor[] near, int[] ranks, ScalarType[] types) -> Tensor[]")
    library.impl("refused", _raise_argument_error, "CompositeExplicitAutograd")
    torch.library.register_fake(name, _make_placeholders, lib=library)
    library._register_effectful_op(name, EffectType.ORDERED)  # it runs even if its results are not used
    return library


def _raise_argument_error(
    texts: list[str], span: list[int], near: list[Tensor], ranks: list[int], types: list[torch.dtype]
) -> list[Tensor]:
    message, source, expected, found, suggestion = texts
    raise ArgumentError(
        message,
        source=source or None,
        span=Span(*span) if source else None,
        expected=expected,
        found=found,
        suggestion=suggestion,
    )


def _make_placeholders(
    texts: list[str], span: list[int], near: list[Tensor], ranks: list[int], types: list[torch.dtype | int]
) -> list[Tensor]:
    device = near[0].device if near else torch.device("cpu")
    dtypes = map(_to_torch_type, types)
    return [torch.empty((1,) * rank, dtype=dtype, device=device) for rank, dtype in zip(ranks, dtypes, strict=True)]


def _to_torch_type(dtype: torch.dtype | int) -> torch.dtype:
    """A type in a list of types, for which some versions of torch pass its number."""
    if isinstance(dtype, torch.dtype):
        return dtype
    return next(t for t in TORCH_TYPES.values() if dtype_number(t) == dtype)
