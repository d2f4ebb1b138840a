"""How somebody wants contractions to be lowered: pipelines, experts that make them, and which is meant for which op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from ..errors import ArgumentError
from ..later import later

if TYPE_CHECKING:
    from ..target import Target
    from . import pipeline
    from .op import StructuredOp
    from .pipeline import Pipeline
else:
    pipeline = later("structured.pipeline")

Expert: TypeAlias = "Callable[[StructuredOp, Target], Pipeline]"
"""Makes the pipeline for an op on a machine."""
Strategy: TypeAlias = "Pipeline | Expert"
Strategies: TypeAlias = "Strategy | tuple[tuple[str, Strategy], ...] | None"
"""One for all contractions, or one per name of a tensor that a contraction defines; None: the cost model's choice."""


def frozen(strategy: object) -> Strategies:
    """What a user passes as a strategy, as a value that can be a key. Raises ArgumentError."""
    if isinstance(strategy, Mapping):
        return tuple((str(name), _checked(s)) for name, s in strategy.items())
    if isinstance(strategy, tuple):
        return tuple((str(name), _checked(s)) for name, s in strategy)
    return None if strategy is None else _checked(strategy)


def _checked(strategy: object) -> Strategy:
    if isinstance(strategy, pipeline.Pipeline) or (callable(strategy) and not isinstance(strategy, type)):
        return strategy
    raise ArgumentError(
        f"the strategy is {strategy!r}",
        expected='a pipeline, such as tile(m=8, n=32) >> pack(B="n1"), or a function (op, target) that gives one',
    )


def meant_for(strategies: Strategies, *names: str) -> Strategy | None:
    """The strategy for the contraction that has these names."""
    if isinstance(strategies, tuple):
        return next((s for name, s in strategies if name in names), None)
    return strategies
