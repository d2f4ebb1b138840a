"""Regions of a def that run on tensor cores: sums of products, with their prologues and epilogues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod

from ...core.dtypes import DType
from ...core.internal_names import internal_name
from ...loop_ir.atoms import TFLOAT32
from ...structured.match.match_contraction import MatchedContraction
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundIndex, BoundStatement, Inequality, walk_expr


class Rounding(Enum):
    """Why a factor of float32 is rounded to tf32: the def says so, exactly how; or options allow it."""

    TEXT = "text"
    OPTION = "option"


@dataclass(frozen=True, slots=True)
class ProductFactor:
    """A factor: an expression of a type that tensor cores take; `element` where it is an element of a tensor.

    rounding: why its values, which are float32, are rounded to tf32 when they are multiplied; None: they are not.
    """

    value: tc.Expr
    rounding: Rounding | None = None

    @property
    def dtype(self) -> DType:
        """The type that is multiplied."""
        return TFLOAT32 if self.rounding else self.value.dtype

    @property
    def indices(self) -> frozenset[str]:
        """The names of the indices that it depends on."""
        return frozenset(x.name for x in walk_expr(self.value) if isinstance(x, tc.Index))

    @property
    def element(self) -> tc.Access | None:
        """The element that it is; None if it is computed, or exists only under a condition."""
        return self.value if isinstance(self.value, tc.Access) and not self.value.guarded else None


@dataclass(frozen=True, slots=True)
class FactorPair:
    """One product of a region: its factors, and the indices of its terms.

    others: more right factors of the same left one, for the other sums of the region.
    """

    left: ProductFactor
    right: ProductFactor
    terms: tuple[BoundIndex, ...]
    others: tuple[ProductFactor, ...] = ()

    @property
    def factors(self) -> tuple[ProductFactor, ...]:
        return self.left, *self.rights

    @property
    def rights(self) -> tuple[ProductFactor, ...]:
        """All right factors, one for each sum."""
        return self.right, *self.others


@dataclass(frozen=True, slots=True)
class OtherSum:
    """Sums beside those of a region, which only the values that it stores depend on.

    Attributes:
        element: of the tensor that would hold it, as the region reads it.
        initial, epilogue: as those of a contraction.
    """

    element: tc.Access
    initial: tc.Expr | None
    epilogue: tc.Expr | None


LARGEST, TOTAL = internal_name("largest"), internal_name("total")
"""The names of the running maximum of a row of scores, and of the sum of its weights, in expressions of a region."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """The weights of a row of scores: all in float32, of `ACCUMULATOR`, the score, and `LARGEST`.

    Attributes:
        largest: what the maximum is of.
        weight: `exp((score - largest) * scale)`, 0 where a mask says so.
        function, scale: of it: exp or exp2, and a positive number.
        total: the element that holds the sum of the weights of a row; None: there is none.
    """

    largest: tc.Expr
    weight: tc.Expr
    function: str
    scale: float
    total: tc.Access | None


@dataclass(frozen=True, slots=True)
class ChainedFactor:
    """The left factor of a region, as computed from the sums of another: over them, or their weights, as ACCUMULATOR.

    Attributes:
        product: the other region, in the names of the first: its rows are those, its columns are the terms.
        softmax: what is between; None: nothing but pointwise statements, which are the epilogue of `product`.
    """

    product: ProductRegion
    softmax: Softmax | None


@dataclass(frozen=True, slots=True)
class ProductRegion:
    """Consecutive statements that run on tensor cores: sums of one or more products, with prologue and epilogue.

    Attributes:
        contraction: their meaning, without the products. total: the type of the sums.
        pairs: the products; columns are those of the right factors, along which the output is contiguous if it can.
        rows, columns, batch: the free indices, by the factors that they move.
        others: sums of products of the same left factor, one for each of `others` of the only pair.
        chain: how the left factor of the only pair is computed from another product.
        domain: the terms of a chain that are added, as conditions on its indices; empty: all.
    """

    contraction: MatchedContraction
    total: DType
    pairs: tuple[FactorPair, ...]
    rows: tuple[BoundIndex, ...]
    columns: tuple[BoundIndex, ...]
    batch: tuple[BoundIndex, ...]
    others: tuple[OtherSum, ...] = ()
    chain: ChainedFactor | None = None
    domain: tuple[Inequality, ...] = ()

    def exchange_sides(self) -> ProductRegion:
        """The same product with its rows as columns."""
        pairs = tuple(replace(p, left=p.right, right=p.left) for p in self.pairs)
        return replace(self, pairs=pairs, rows=self.columns, columns=self.rows)

    @property
    def sums(self) -> int:
        """How many sums each element of the output has."""
        return 1 + len(self.others)

    @property
    def statements(self) -> tuple[BoundStatement, ...]:
        """The members, as the contraction names their indices."""
        return self.contraction.statements

    @property
    def output_dtype(self) -> DType:
        """The type of the results in memory."""
        return self.contraction.output.dtype

    @property
    def factor_bytes(self) -> int:
        """Of an element of a factor."""
        return self.pairs[0].left.dtype.size

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors of the kernel, first the one that it writes."""
        c = self.contraction
        roots = [f.value for pair in self.pairs for f in pair.factors]
        ends = [(c.initial, c.epilogue), *((x.initial, x.epilogue) for x in self.others)]
        roots += [x for both in ends for x in both if x is not None]
        if self.chain is not None:
            inner, softmax = self.chain.product, self.chain.softmax
            ends.append((inner.contraction.initial, inner.contraction.epilogue))
            roots += [f.value for f in inner.pairs[0].factors]
            roots += [] if softmax is None else [softmax.largest, softmax.weight]
        held = {x.element.tensor for x in self.others}
        reads = (e.tensor for x in roots for e in walk_expr(x) if isinstance(e, tc.Access) and e.tensor not in held)
        return tuple(dict.fromkeys((c.output.tensor, *reads)))

    @property
    def text(self) -> str:
        """The region for people: `C: float16 16 x 32 x 64`, rows, columns and terms; the domain of these."""
        terms = " + ".join(str(_count_index_points(p.terms)) for p in self.pairs)
        beside = f"{self.sums} of " if self.others else ""
        sizes = f"{beside}{_count_index_points(self.rows)} x {_count_index_points(self.columns)} x {terms}"
        batch = _count_index_points(self.batch)
        types = "/".join(dict.fromkeys(p.left.dtype.name for p in self.pairs))
        after = "" if self.chain is None else f" after {_count_index_points(self.chain.product.pairs[0].terms)} terms"
        between = " and softmax" if self.chain is not None and self.chain.softmax is not None else ""
        count = f", {batch} of them" if batch > 1 else ""
        where = f" where {' and '.join(map(str, self.domain))}" if self.domain else ""
        return f"{self.contraction.output.tensor}: {types} {sizes}{after}{between}{count}{where}"


def _count_index_points(indices: Sequence[BoundIndex]) -> int:
    return prod(i.extent for i in indices)
