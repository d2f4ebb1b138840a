"""The content of a report as values, from which text, JSON and page are made."""

from __future__ import annotations

import webbrowser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ..core.decisions import Decision
from ..core.errors import ArgumentError
from ..tc_lang.ir import BoundFunction, Role

SAME_BYTES, BY_HAND = "the machine code of the kernel, byte for byte", "the kernel that runs was put there by hand"


@dataclass(frozen=True, slots=True)
class SourceStatement:
    """A statement of the def: its name in listings (`S0`), the tensor that it defines, and its lines, from 1 on."""

    name: str
    tensor: str
    line: int
    last: int

    @property
    def label(self) -> str:
        """Line and tensor, by which people find it."""
        return f"{self.line} {self.tensor}"


@dataclass(frozen=True, slots=True)
class ListingLine:
    """A line of a listing.

    Attributes:
        statements: the statements that it belongs to.
        role: its purpose if that is not to compute them: "copy of", "initial value".
        loop: the line of the loops that it computes, from 1 on; 0 if unknown, or in other listings.
    """

    text: str
    statements: tuple[str, ...] = ()
    role: str = ""
    loop: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """One form of the kernel: "def", "schedule", "loops", "asm", "c", "llvm", "cuda" or "ptx"."""

    kind: str
    title: str
    lines: tuple[ListingLine, ...]

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def linked_share(self) -> float:
        """The part of the instructions that belong to a line of the loops.

        Functions without such instructions, for example the one that launches the kernels, do not count.
        """
        linked, total = self.count_links()
        return linked / total if total else 0.0

    def count_links(self) -> tuple[int, int]:
        """Instructions that lead to a line of the loops, and all of them."""
        functions: list[list[int]] = [[]]
        for line in self.lines:
            if line.text.startswith(" "):
                functions[-1].append(line.loop)
            elif not line.text.startswith((".", "$")):
                functions.append([])
        counted = [found for found in functions if any(found)]
        return sum(n > 0 for found in counted for n in found), sum(map(len, counted))


@dataclass(frozen=True, slots=True)
class Footprint:
    """The footprint of one iteration of a loop.

    Attributes:
        loop: its line in the loops, from 1 on. name: of its variable. trips: iterations, at most.
        bytes: distinct bytes that one iteration touches, of each buffer; an upper bound.
        is_exact: whether the bound is exact.
        cache: the smallest cache that holds them, such as "L2"; "memory".
    """

    loop: int
    name: str
    trips: int
    bytes: tuple[tuple[str, int], ...]
    is_exact: bool
    cache: str

    @property
    def total(self) -> int:
        return sum(size for _, size in self.bytes)


@dataclass(frozen=True, slots=True)
class StatementDependence:
    """A dependence of one statement on another, or on itself.

    Attributes:
        source, sink: names of statements. tensor: that they touch both.
        kinds: "flow", "anti", "output".
        distances: of the iterations of their loops, in order; "*" if they may be any.
        is_fused: whether one kernel computes both. why: the reason if not.
    """

    source: str
    sink: str
    tensor: str
    kinds: tuple[str, ...]
    distances: tuple[str, ...]
    is_fused: bool
    why: str = ""

    def with_kind(self, kind: str) -> StatementDependence:
        """The edge with one more kind."""
        return replace(self, kinds=tuple(dict.fromkeys((*self.kinds, kind))))


@dataclass(frozen=True, slots=True)
class PassDiff:
    """The changes of a compiler pass to the loops.

    Attributes:
        before, after: lines of the loops.
        lines: removed ("-") and new ("+") ones, some unchanged ones (" ") around them, and gaps ("~").
    """

    name: str
    before: int
    after: int
    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Roofline:
    """Work and traffic of a call, and the limits of the machine. rates: bytes per second of each memory, by name."""

    flops: float
    bytes: float
    peak: float
    rates: tuple[tuple[str, float], ...]
    seconds: float | None = None

    @property
    def intensity(self) -> float:
        """Operations per byte that has to be moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def attainable_flops(self) -> float:
        """Operations per second that memory allows, at most `peak`."""
        return min(self.peak, self.intensity * self.rates[-1][1])

    @property
    def share(self) -> float | None:
        """The least time that the limits allow, as a part of the measured time; None if not measured."""
        least = max(self.flops / self.peak, self.bytes / self.rates[-1][1])
        return None if self.seconds is None else least / self.seconds


@dataclass(frozen=True, slots=True)
class TriedOptions:
    """A candidate of a search.

    Attributes:
        options: as text. outcome: in a word: "ok", "slow", "wrong_result" and so on.
        seconds: of a call; None if it was not timed. elapsed: seconds from the start of the search to its end.
    """

    options: str
    outcome: str
    seconds: float | None
    elapsed: float


@dataclass(frozen=True, slots=True)
class SearchCurve:
    """A search for options for a kernel.

    Attributes:
        candidates: in the order in which they were tried.
        chosen: the options that won. seconds: the time of a call with them in the race that ended the search; None if
            it has not ended. default_seconds: the same with the default options.
        scale: the candidates' times in the race, as a multiple of those in the search, when the machine may have been
            slower or faster: that of the default options.
        elapsed: seconds that the search took.
    """

    candidates: tuple[TriedOptions, ...]
    chosen: str
    seconds: float | None
    default_seconds: float | None
    scale: float
    elapsed: float

    def improvements(self) -> Iterator[TriedOptions]:
        """The candidates that were faster than all before."""
        best = inf
        for c in self.candidates:
            if c.seconds is not None and c.seconds < best:
                best = c.seconds
                yield c


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of numbers, which a page shows in colors.

    Attributes:
        cells: row by row; -1 for none, such as padding.
        count: the numbers are below it.
        rows, columns: their names, if they have any.
    """

    title: str
    cells: tuple[tuple[int, ...], ...]
    count: int
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A further part of a report, with pictures."""

    title: str
    text: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()


@dataclass(frozen=True, slots=True)
class CallFacts:
    """Calls of the operator that a kernel belongs to.

    Attributes:
        guards: the conditions of the fast path, a line for each argument.
        hindrance: why calls with these arguments do not take it; "" if they do.
        lanes: kinds of calls that take it so far. compiled, loaded: kernels of the operator so far.
        seconds: that making these took.
        varying: the sizes in which they differ, with some of their values, as "M: 20, 33, 64".
    """

    guards: tuple[str, ...]
    hindrance: str
    lanes: int
    compiled: int
    loaded: int
    seconds: float
    varying: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A kernel, and the reasons for its code. `print(report)` is the short form, `save` writes a page.

    Attributes:
        name, sizes, target: of the def, of its tensors, of the machine; all for people.
        resources: kernels launched, bytes of temporaries and so on.
        seconds: of the passes of the compiler.
        facts: further facts of the kernel, by name.
        matches: whether machine code made for the report equals that of the kernel.
        edges: the dependences between statements. passes: what each changed in the loops.
        sections: further facts about this kind of kernel.
        search: the search for the options of the kernel, if one is known.
        calls: facts about calls of the operator, if the report is about one.
    """

    name: str
    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    target: str
    resources: Mapping[str, int]
    statements: tuple[SourceStatement, ...]
    decisions: tuple[Decision, ...]
    listings: tuple[Listing, ...]
    seconds: tuple[tuple[str, float], ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    footprints: tuple[Footprint, ...] = ()
    roofline: Roofline | None = None
    matches: str = ""
    edges: tuple[StatementDependence, ...] = ()
    passes: tuple[PassDiff, ...] = ()
    sections: tuple[Section, ...] = ()
    search: SearchCurve | None = None
    calls: CallFacts | None = None

    def find_listing(self, kind: str) -> Listing:
        """One of the listings. Raises ArgumentError if there is none of that kind."""
        for found in self.listings:
            if found.kind == kind:
                return found
        known = ", ".join(x.kind for x in self.listings)
        raise ArgumentError(f"this report has no listing of kind {kind!r}", expected=known)

    def about(self, subject: str, *tensors: str) -> tuple[Decision, ...]:
        """The decisions about a subject, such as "fusion", that concern a statement of each of `tensors`."""
        tensor_of = {s.name: s.tensor for s in self.statements}
        concerned = ((d, {tensor_of.get(name) for name in d.statements}) for d in self.decisions)
        return tuple(d for d, found in concerned if d.subject == subject and set(tensors) <= found)

    def labels(self, names: tuple[str, ...]) -> Iterator[str]:
        """Lines and tensors of statements, as `4 out`."""
        known = {s.name: s.label for s in self.statements}
        return (known.get(name, name) for name in names)

    def __str__(self) -> str:
        from .text import format_report

        return format_report(self)

    __repr__ = __str__

    def json(self) -> dict[str, Any]:
        """All of it for programs, by schema 3."""
        from .json_form import report_to_json

        return report_to_json(self)

    def html(self) -> str:
        """The page: one file that loads nothing."""
        from .page import format_page

        return format_page(self)

    def save(self, path: str | Path) -> Path:
        """Write the page. Raises ArgumentError if that is not possible."""
        if not isinstance(path, str | Path):
            raise ArgumentError(f"the path is {path!r}", expected="a str or a Path")
        place = Path(path)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(self.html(), encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ArgumentError(f"the page cannot be written: {error}", suggestion="name a file") from error
        return place

    def open(self) -> Path:
        """Show the page in the browser, from a file in a new temporary folder."""
        place = self.save(Path(mkdtemp(prefix="tc-explain-")) / f"{self.name}.html")
        webbrowser.open(place.as_uri())
        return place

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        from .page import format_frame

        return {"text/plain": str(self), "text/html": format_frame(self.html())}


def shapes_of_tensors(bound: BoundFunction) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The tensors of a def that a call passes or gets, with their shapes."""
    return tuple((t.name, t.shape) for t in bound.tensors if t.role is not Role.TEMPORARY)
