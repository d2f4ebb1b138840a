"""Prefetch rows that stored coordinates select some positions ahead, since hardware cannot predict their addresses.

Rows of dense operands are fetched into L2, which allows more outstanding lines than L1. The next rows of a loop over
all rows go into L1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..core.dtypes import INT64
from ..core.errors import CannotLower
from ..loop_ir import build, linear_forms
from ..loop_ir.intrinsics import PREFETCH, PREFETCH_LATER
from ..loop_ir.nodes import Buffer, Expr, Invoke, Stmt
from ..machine import CACHE_LINE_BYTES
from ..tc_lang.formats import LevelKind
from ..tc_lang.ir import Access, Index
from ..thresholds import MAX_PREFETCHED_ROW_LINES, PREFETCHED_ROWS_AHEAD
from .absent_operands import Term, reads
from .expr_translator import Translator
from .graph import Nest, Path
from .levels import Cursor, Place, locate
from .operand_buffers import Sizes, SparseOperand


@dataclass(frozen=True, slots=True)
class RowPrefetcher:
    """Emits prefetches for the loops inside a loop over stored coordinates.

    element: returns the buffer of a dense tensor and the index of an element in it. distance: stored positions to
    prefetch ahead (Emerald Rapids, 512-byte rows: 2 to 12 are as good). reads_values: whether values are read.
    """

    nest: Nest
    order: tuple[str, ...]
    operands: Mapping[str, SparseOperand]
    sizes: Sizes
    element: Callable[[str, tuple[Expr, ...]], tuple[Buffer, Expr]]
    distance: int
    reads_values: bool = True

    def fetch_ahead(
        self,
        depth: int,
        walked: Access,
        cursor: Cursor,
        position: Expr,
        term: Term,
        places: Mapping[Access, Place],
        indices: Mapping[str, Expr],
    ) -> Stmt:
        """Prefetch operands of the loops inside `depth` for a later position of `cursor`, the iterator of `walked`."""
        name = self.order[depth]
        if depth + 1 == len(self.order) or self.nest.loops[name].window or name not in indices:
            return build.NOTHING
        last = build.sub(
            count_positions(self.nest.paths[walked], self.operands[walked.tensor], self.sizes, cursor.depth + 1), 1
        )
        ahead = cursor.coordinate(build.minimum(build.add(position, self.distance), last))
        hints = [*self._sparse_rows(depth, term, places, ahead)]
        if self.reads_values:
            hints += self._dense_rows(depth, term, {**indices, name: ahead}, PREFETCH_LATER)
        return build.block(*dict.fromkeys(hints))

    def fetch_rows_ahead(self, depth: int, row: Expr, last: Expr, term: Term, indices: Mapping[str, Expr]) -> Stmt:
        """Prefetch the rows of dense operands for a later iteration of a loop over all rows.

        Only if there is a loop over stored positions inside, whose reads defeat the hardware prefetcher.
        """
        inner = self.order[depth + 1 :]
        follows = any(step.loop in inner for path in self.nest.paths.values() for step in path.iterated)
        if not (follows and self.reads_values) or self.order[depth] not in self.nest.loops:
            return build.NOTHING
        ahead = build.minimum(build.add(row, PREFETCHED_ROWS_AHEAD), last)
        return build.block(
            *dict.fromkeys(self._dense_rows(depth, term, {**indices, self.order[depth]: ahead}, PREFETCH))
        )

    def _dense_rows(self, depth: int, term: Term, indices: Mapping[str, Expr], hint: str) -> Iterator[Stmt]:
        """Prefetch, with `hint`, all lines of the rows of dense operands whose length is known."""
        name, inner = self.order[depth], self.order[depth + 1 :]
        firsts = {n: self.sizes.value(self.nest.loops[n].lower) for n in inner}
        translator = Translator({**indices, **firsts}, self.sizes, _refuse_read)
        for a in dict.fromkeys(reads(term.value)):
            used = [e.name for e in a.subscripts if isinstance(e, Index)]
            if term.pattern_access(a) in self.nest.paths or len(used) < len(a.subscripts) or name not in used[:-1]:
                continue
            if used[-1] not in inner or not set(used) <= {*indices, *inner}:
                continue
            buffer, index = self.element(a.tensor, tuple(translator.subscript(e) for e in a.subscripts))
            loop = self.nest.loops[used[-1]]
            extent = linear_forms.difference(self.sizes.value(loop.upper), self.sizes.value(loop.lower)) or 1
            line = CACHE_LINE_BYTES // a.dtype.size
            for start in range(0, min(extent, MAX_PREFETCHED_ROW_LINES * line), line):
                yield Invoke(hint, ((buffer, (build.add(index, start),)),), (0,))

    def _sparse_rows(self, depth: int, term: Term, places: Mapping[Access, Place], ahead: Expr) -> Iterator[Stmt]:
        """Prefetch the first coordinates and values below a dense level of sparse operands."""
        name, inner = self.order[depth], self.order[depth + 1 :]
        uses = term.uses
        for a, path in self.nest.paths.items():
            place = places[a]
            steps = path.steps[place.depth : place.depth + 2]
            if (
                a not in uses
                or place.high is not None
                or place.present is not None
                or [s.level.kind for s in steps] != _ROW
            ):
                continue
            if steps[0].loop != name or steps[1].loop not in inner:
                continue
            row = locate(place, self.sizes.value(steps[0].extent), ahead)
            operand = self.operands[a.tensor]
            pos, crd = operand.pos[row.depth], operand.crd[row.depth]
            if pos is None or crd is None:
                continue
            start = build.cast(build.load(pos, row.low), INT64)
            yield Invoke(PREFETCH, ((crd, (start,)),), (0,))
            if self.reads_values and row.depth + 1 == len(path.steps):
                yield Invoke(PREFETCH, ((operand.values, (start,)),), (0,))


_ROW = [LevelKind.DENSE, LevelKind.COMPRESSED]


def count_positions(path: Path, operand: SparseOperand, sizes: Sizes, depth: int) -> Expr:
    """The number of positions of the first `depth` levels of an operand."""
    count: Expr = build.const(1)
    for n, step in enumerate(path.steps[:depth]):
        pos = operand.pos[n]
        if step.level.is_dense:
            count = build.mul(count, sizes.value(step.extent))
        elif pos is not None:
            count = build.cast(build.load(pos, count), INT64)
    return count


def _refuse_read(access: Access, _: tuple[Expr, ...], __: Expr | None) -> Expr:
    raise CannotLower(f"a subscript reads '{access.tensor}'")
