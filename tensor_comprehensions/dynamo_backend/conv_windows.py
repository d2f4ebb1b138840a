"""Sums over the windows of a convolution, with named indices for images, channels, output positions and taps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .index_views import Value, permute_value, reshape_value, split_index
from .literals import Unsupported
from .op_table import TranslationContext

LEAST_RUN, FEW_PLACES = 4, 32
"""With fewer output positions in a row, or at most as many in all images, vectors run over those of all images."""


@dataclass(frozen=True, slots=True)
class ConvWindows:
    """`out(n, g o, h...) = data(n, g c, s h + d k...) * taps(g o, c, k...)`, any of which may be the summed result.

    Attributes:
        extents: the extents of the indices `n g o c h0 h1... k0 k1...`.
        stride, dilation: of each dimension.
        texts: expressions of the indices that are not loops.
    """

    extents: dict[str, int]
    stride: Sequence[int]
    dilation: Sequence[int]
    texts: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        batch: int, groups: int, weight: Sequence[int], places: Sequence[int], stride: Any, dilation: Any
    ) -> ConvWindows:
        """For `batch` images, channels in `groups`, the shape `weight`, and `places` windows in each dimension."""
        extents = {"n": batch, "g": groups, "o": weight[0] // groups, "c": weight[1]}
        extents |= {f"h{d}": n for d, n in enumerate(places)} | {f"k{d}": n for d, n in enumerate(weight[2:])}
        return ConvWindows(extents, stride, dilation)

    def name(self, letter: str) -> str:
        return self.texts.get(letter, letter) if self.extents[letter] != 1 else "0"

    def channel(self, inner: str) -> Sequence[tuple[str, int]]:
        """The indices of a channel with their extents: `inner` in the group `g`."""
        return [("g", self.extents["g"]), (self.name(inner), self.extents[inner])]

    def places(self) -> list[str]:
        """The position in the data of a tap of a window, in each dimension."""
        both = zip(self.stride, self.dilation, strict=True)
        return [f"({s} * {self.name(f'h{d}')} + {e} * {self.name(f'k{d}')})" for d, (s, e) in enumerate(both)]

    def data(self, x: Value) -> str:
        return format_element(x, [self.name("n"), self.channel("c"), *self.places()])

    def taps(self, weight: Value) -> str:
        spatial = range(len(self.stride))
        return format_element(weight, [self.channel("o"), self.name("c"), *(self.name(f"k{d}") for d in spatial)])

    def results(self, x: Value) -> str:
        spatial = range(len(self.stride))
        return format_element(x, [self.name("n"), self.channel("o"), *(self.name(f"h{d}") for d in spatial)])

    def reduce(self, c: TranslationContext, groups: Sequence[Sequence[str]], term: str, operator: str = "+=!") -> Value:
        """Reduce `term` by `operator` into a tensor whose dimensions are indexed by `groups`."""
        names = [t for group in groups for t in group if self.extents[t] != 1]
        parts = tuple(tuple(self.extents[t] for t in group if self.extents[t] != 1) for group in groups)
        ranges = [f"{letter} in 0:{n}" for letter, n in self.extents.items() if n != 1]
        like = Value(parts, lambda i: "", c.dtype)
        return c.body.add_sum(like, names, term, ranges, operator)

    def convolve(self, c: TranslationContext, data: Callable[[ConvWindows], str], taps: str) -> Value:
        """The sums of products of `data`, which formats an element for the indices of a `ConvWindows`, and `taps`."""
        if not self.has_few_places:
            return self.reduce(c, self.of_out, f"{data(self)} * {taps}")
        rows, places = ["c", *self._number_names("k")], ["n", *self._number_names("h")]
        sizes = [self.extents[t] for t in places]

        def element_text(i: Sequence[str]) -> str:
            rest = iter(i)
            texts = {t: next(rest) for t in rows if self.extents[t] != 1}
            return data(
                replace(self, texts=texts | dict(zip(places, split_index(next(rest, "0"), sizes), strict=True)))
            )

        groups = [(n,) if n != 1 else () for n in (*(self.extents[t] for t in rows), math.prod(sizes))]
        columns = c.body.materialize_rounded(Value(tuple(groups), element_text, c.dtype))
        extents = {t: self.extents[t] for t in ("g", "o", *rows)} | {"z": math.prod(sizes)}
        product = replace(self, extents=extents)
        names = [t for t in (*rows, "z") if extents[t] != 1]
        found = product.reduce(c, ["o", "z"], f"{columns.at(names)} * {taps}")
        apart = reshape_value(found, [self.extents["o"], *sizes])
        return permute_value(apart, [1, 0, *range(2, len(places) + 1)])

    def correlate(self, c: TranslationContext, x: Value, upstream: Value) -> Value:
        """The sums over all positions of `upstream` times the data of each tap, in the shape of the taps.

        What a window reads of `x` is copied to a row, in the order of the taps, so that this is one product of
        matrices with long rows.
        """
        places, taps = ["n", *self._number_names("h")], ["c", *self._number_names("k")]
        loops = [t for t in (*places, *taps) if self.extents[t] != 1]

        def element_text(i: Sequence[str]) -> str:
            return replace(self, texts=dict(zip(loops, i, strict=True))).data(x)

        outer = ((self.extents[t],) if self.extents[t] != 1 else () for t in places)
        row = tuple(self.extents[t] for t in taps if self.extents[t] != 1)
        rows = c.body.materialize_merged(Value((*outer, row), element_text, x.dtype))
        indices = [t for t in places if self.extents[t] != 1]
        extents = {**{t: self.extents[t] for t in indices}, "o": self.extents["o"], "r": math.prod(row)}
        like = Value(tuple((extents[t],) for t in "or"), rows.at, c.dtype)
        ranges = [f"{t} in 0:{n}" for t, n in extents.items()]
        found = c.body.add_sum(like, ["o", "r"], f"{self.results(upstream)} * {rows.at([*indices, 'r'])}", ranges)
        return reshape_value(found, [self.extents[t] for t in ("o", *taps)])

    @property
    def has_few_places(self) -> bool:
        """Whether vectors should run over the output positions of all images, because one image has too few."""
        last = self.extents[f"h{len(self.stride) - 1}"]
        places = math.prod(self.extents[t] for t in ("n", *self._number_names("h")))
        return self.extents["g"] == 1 and places > 1 and (last < LEAST_RUN or places <= FEW_PLACES)

    def _number_names(self, letter: str) -> list[str]:
        return [f"{letter}{d}" for d in range(len(self.stride))]

    @property
    def of_out(self) -> list[Sequence[str]]:
        return ["n", "go", *((f"h{d}",) for d in range(len(self.stride)))]

    @property
    def of_taps(self) -> list[Sequence[str]]:
        return ["go", "c", *((f"k{d}",) for d in range(len(self.stride)))]


def format_element(x: Value, indices: Sequence[str | Sequence[tuple[str, int]]]) -> str:
    """The element of `x` at one index per dimension: a text, or the (digit, extent) pairs that it is composed of."""
    texts: list[str] = []
    for index, group in zip(indices, x.groups, strict=True):
        digits = [(index, group[0] if group else 1)] if isinstance(index, str) else [d for d in index if d[1] != 1]
        if group == tuple(n for _, n in digits):
            texts += (text for text, _ in digits)
        elif len(group) == 1:
            texts.append(_merge_digits(digits))
        elif group:
            raise Unsupported("a window over merged dimensions")
    return x.at(texts)


def _merge_digits(digits: Sequence[tuple[str, int]]) -> str:
    whole = ""
    for text, extent in digits:
        whole = f"({whole} * {extent} + {text})" if whole else text
    return whole or "0"
