"""Choose the temporaries that a recorded call saves for its gradient instead of recomputing them.

Outputs are available anyway. Of the temporaries, reductions are saved, since each of their elements takes many
operations, and so are pointwise functions of reductions that are no larger. Everything else is recomputed. So no call
saves more elements than its reductions have. A batched product that feeds another one, such as the scores of attention,
is recomputed, too: it may be far larger than all inputs, and a tiled pass never stores it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..binding.ranges import Bounds
from ..ir import Function, Role
from .factorize import is_batched_product
from .ssa import SsaProgram, SsaStatement


def choose_saved_tensors(steps: SsaProgram, used: Iterable[str], keep: bool) -> tuple[set[str], list[str]]:
    """The final versions of outputs, and the names of temporaries, to save so that `used` need not be recomputed.

    keep: whether a call can save temporaries; if not, none are chosen.
    """
    chooser = _Chooser(steps, {s.target: s for s in steps.steps}, frozenset(used))
    final = {steps.last[r]: r for r in steps.function.returns}
    temporaries = {steps.last[t.name]: t.name for t in steps.function.tensors if t.role is Role.TEMPORARY and keep}
    outputs: set[str] = set()
    kept: list[str] = []
    needed = set(used)
    for step in reversed(steps.steps):
        if step.target not in needed:
            continue
        if step.target in final:
            outputs.add(step.target)
        elif step.target in temporaries and chooser.is_worth_keeping(step):
            kept.append(temporaries[step.target])
        else:
            needed |= step.reads
    return outputs & needed, kept[::-1]


def with_saved_outputs(function: Function, names: Sequence[str]) -> Function:
    """`function` with the temporaries `names` as additional outputs, after its own."""
    places = [str(n) for n, t in enumerate(function.tensors) if t.name in names]
    kept = [replace(function.tensor(name), role=Role.OUTPUT) for name in names]
    others = [t for t in function.tensors if t.name not in names]
    before = [t for t in others if t.role is not Role.TEMPORARY]
    after = [t for t in others if t.role is Role.TEMPORARY]
    return replace(
        function,
        tensors=(*before, *kept, *after),
        returns=(*function.returns, *names),
        canonical=f"{function.canonical}\nkeeping {', '.join(places)}",
    )


@dataclass(slots=True)
class _Chooser:
    """made: the step that makes each version. used: the versions that the gradient itself reads."""

    steps: SsaProgram
    made: dict[str, SsaStatement]
    used: frozenset[str]
    found: dict[str, frozenset[str]] = field(default_factory=dict)

    def is_worth_keeping(self, step: SsaStatement) -> bool:
        if _is_reduction(step):
            return not self.is_inside_chain(step)
        sums = self.sums(step)
        large = [self._extents(s) for s in sums if not self.is_inside_chain(self.made[s])]
        extents = self._extents(step.target)
        return not sums <= self.used and any(_is_subset(extents, s) for s in large)

    def is_inside_chain(self, step: SsaStatement) -> bool:
        """Whether `step` is a batched product that another one reads, directly or through pointwise functions."""
        if not _is_batched_product(step):
            return False
        others = (s for s in self.steps.steps if s is not step and _is_batched_product(s))
        return any(step.target in s.reads | self._sums_read(s) for s in others)

    def _sums_read(self, step: SsaStatement) -> frozenset[str]:
        """The reductions on which the pointwise tensors that `step` reads depend."""
        made = (self.made[name] for name in step.reads & self.made.keys())
        return frozenset().union(*(self.sums(s) for s in made if not _is_reduction(s)))

    def sums(self, step: SsaStatement) -> frozenset[str]:
        """The reductions on which `step` depends through pointwise tensors only."""
        if step.target not in self.found:
            out: set[str] = set()
            for name in step.reads & self.made.keys():
                out |= {name} if _is_reduction(self.made[name]) else self.sums(self.made[name])
            self.found[step.target] = frozenset(out)
        return self.found[step.target]

    def _extents(self, version: str) -> list[Bounds]:
        return list(self.steps.versions[version].bounds)


def _is_reduction(step: SsaStatement) -> bool:
    return any(i not in step.left for i in step.ranges)


def _is_batched_product(step: SsaStatement) -> bool:
    return _is_reduction(step) and is_batched_product(step.value, step.left)


def _is_subset(small: list[Bounds], large: list[Bounds]) -> bool:
    """Whether the dimensions in `small` are among those in `large`, with multiplicity."""
    left = list(large)
    for bounds in small:
        if bounds not in left:
            return False
        left.remove(bounds)
    return True
