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
    """Why a float32 factor is rounded to tf32: the def says so and defines the rounding (TEXT), or options allow it."""

    TEXT = "text"
    OPTION = "option"


@dataclass(frozen=True, slots=True)
class ProductFactor:
    """A factor of a product: an expression whose type tensor cores support, perhaps after rounding.

    rounding: why float32 values are rounded to tf32 when they are multiplied; None if they are not.
    """

    value: tc.Expr
    rounding: Rounding | None = None

    @property
    def dtype(self) -> DType:
        """The type in which the factor is multiplied."""
        return TFLOAT32 if self.rounding else self.value.dtype

    @property
    def indices(self) -> frozenset[str]:
        """The names of the indices on which the factor depends."""
        return frozenset(x.name for x in walk_expr(self.value) if isinstance(x, tc.Index))

    @property
    def element(self) -> tc.Access | None:
        """The tensor element that the factor is; None if it is computed, or if the access is guarded."""
        return self.value if isinstance(self.value, tc.Access) and not self.value.guarded else None


@dataclass(frozen=True, slots=True)
class FactorPair:
    """One product of a region: its factors and the indices of its terms.

    others: further right factors for the same left one, one for each of the other sums of the region.
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
    """An additional sum of a region, which is used only in its epilogue and never stored.

    Attributes:
        element: the element of the temporary tensor of the sum, as the region reads it.
        initial, epilogue: as in a contraction.
    """

    element: tc.Access
    initial: tc.Expr | None
    epilogue: tc.Expr | None


LARGEST, TOTAL = internal_name("largest"), internal_name("total")
"""The variables for the running maximum of a row of scores, and for the sum of its weights, in expressions."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """The weights of a row of scores. Expressions are float32; `ACCUMULATOR` is the score, `LARGEST` the maximum.

    Attributes:
        largest: the expression whose maximum is taken.
        weight: `exp((score - largest) * scale)`, perhaps masked to 0.
        function, scale: exp or exp2, and the positive scale, in `weight`.
        total: the element that holds the sum of the weights of a row; None if the def has no such sum.
    """

    largest: tc.Expr
    weight: tc.Expr
    function: str
    scale: float
    total: tc.Access | None


@dataclass(frozen=True, slots=True)
class ChainedFactor:
    """How the left factor of a region is computed from another product; in it, ACCUMULATOR is a score or its weight.

    Attributes:
        product: the other region, with the index names of this one: the same rows, and this one's terms as columns.
        softmax: the softmax in between; None if there are only pointwise statements, the epilogue of `product`.
    """

    product: ProductRegion
    softmax: Softmax | None


@dataclass(frozen=True, slots=True)
class ProductRegion:
    """Consecutive statements that run on tensor cores: sums of one or more products, with prologue and epilogue.

    Attributes:
        contraction: the matched statements, output, initial value and epilogue. total: the type of the sums.
        pairs: the products.
        rows, columns, batch: the free indices of left factors, of right factors, and of both. The output is contiguous
            along a column if possible.
        others: further sums with the same left factor, one for each of `others` of the only pair.
        chain: how the left factor of the only pair is computed from another product, if it is.
        domain: for masked sums, the inequalities under which a term is added; empty if all terms are.
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
        """The same region with left and right factors, and rows and columns, exchanged."""
        pairs = tuple(replace(p, left=p.right, right=p.left) for p in self.pairs)
        return replace(self, pairs=pairs, rows=self.columns, columns=self.rows)

    @property
    def sums(self) -> int:
        """The number of sums per element of the output."""
        return 1 + len(self.others)

    @property
    def statements(self) -> tuple[BoundStatement, ...]:
        """The statements of the region, with the index names of the contraction."""
        return self.contraction.statements

    @property
    def output_dtype(self) -> DType:
        """The type of the results in memory."""
        return self.contraction.output.dtype

    @property
    def factor_bytes(self) -> int:
        """The bytes of an element of a factor."""
        return self.pairs[0].left.dtype.size

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors that the kernel uses, first the one that it writes."""
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
        """A description: `C: float16 16 x 32 x 64` (rows, columns, terms), and the chain, batch and domain if any."""
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
