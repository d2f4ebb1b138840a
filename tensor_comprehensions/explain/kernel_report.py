"""The content of a report as dataclasses, from which text, JSON and HTML are generated."""

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
    """A statement of the def: its name in listings (`S0`), the tensor that it defines, its first and last line."""

    name: str
    tensor: str
    line: int
    last: int

    @property
    def label(self) -> str:
        """The line and the tensor, for users: `4 out`."""
        return f"{self.line} {self.tensor}"


@dataclass(frozen=True, slots=True)
class ListingLine:
    """A line of a listing.

    Attributes:
        text: the text without the line break.
        statements: the names of the statements that it belongs to.
        role: "copy of", "initial value" and so on, if its purpose is not to compute these statements.
        loop: the line (from 1) of the loops listing that it implements; 0 if unknown, or in other listings.
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
        """The fraction of the instructions that have a line of the loops.

        Functions without such instructions, for example the one that launches the kernels, do not count.
        """
        linked, total = self.count_links()
        return linked / total if total else 0.0

    def count_links(self) -> tuple[int, int]:
        """The number of instructions with a line of the loops, and of all instructions."""
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
        loop: its line in the loops listing, from 1 on.
        name: the name of its variable.
        trips: most iterations; -1 if unknown.
        bytes: (buffer, upper bound on the distinct bytes that one iteration touches).
        is_exact: whether all bounds are exact.
        cache: the smallest cache with room for these bytes, such as "L2", or "memory".
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
        source, sink: the names of the statements; `sink` depends on `source`.
        tensor: the tensor that both access.
        kinds: "flow", "anti" or "output".
        distances: the dependence distance along each loop; "*" if it varies.
        is_fused: whether one kernel computes both.
        why: the reason if not.
    """

    source: str
    sink: str
    tensor: str
    kinds: tuple[str, ...]
    distances: tuple[str, ...]
    is_fused: bool
    why: str = ""

    def with_kind(self, kind: str) -> StatementDependence:
        """The dependence with one more kind."""
        return replace(self, kinds=tuple(dict.fromkeys((*self.kinds, kind))))


@dataclass(frozen=True, slots=True)
class PassDiff:
    """The changes of a compiler pass to the loops.

    Attributes:
        name: the name of the pass.
        before, after: the number of lines of the loops.
        lines: (sign, text): removed ("-"), added ("+") and unchanged (" ") lines, and gaps ("~").
    """

    name: str
    before: int
    after: int
    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Roofline:
    """The roofline model: work and traffic of a call, and the limits of the machine.

    Attributes:
        flops: operations of a call.
        bytes: bytes of its arguments and results.
        peak: operations per second of one thread.
        rates: (cache or memory, bytes per second), memory last.
        seconds: the measured time of a call; None if not measured.
    """

    flops: float
    bytes: float
    peak: float
    rates: tuple[tuple[str, float], ...]
    seconds: float | None = None

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def attainable_flops(self) -> float:
        """Operations per second that memory allows, at most `peak`."""
        return min(self.peak, self.intensity * self.rates[-1][1])

    @property
    def share(self) -> float | None:
        """The time that the limits allow, as a fraction of the measured time; None if not measured."""
        least = max(self.flops / self.peak, self.bytes / self.rates[-1][1])
        return None if self.seconds is None else least / self.seconds


@dataclass(frozen=True, slots=True)
class TriedOptions:
    """A candidate of a search.

    Attributes:
        options: the options as text.
        outcome: "ok", "slow", "wrong_result" and so on.
        seconds: the time of a call; None if it was not timed.
        elapsed: seconds from the start of the search to the end of the trial.
    """

    options: str
    outcome: str
    seconds: float | None
    elapsed: float


@dataclass(frozen=True, slots=True)
class SearchCurve:
    """A search for options for a kernel.

    Attributes:
        candidates: the candidates in the order in which they were tried.
        chosen: the options that won.
        seconds: the time of a call with them in the final race; None if the search has not ended.
        default_seconds: the time of a call with the default options in the final race; None if it has not ended.
        scale: the ratio of times in the final race to times during the search, since the speed of the machine may
            have changed; measured with the default options.
        elapsed: seconds that the search took.
    """

    candidates: tuple[TriedOptions, ...]
    chosen: str
    seconds: float | None
    default_seconds: float | None
    scale: float
    elapsed: float

    def improvements(self) -> Iterator[TriedOptions]:
        """The candidates that were faster than all earlier ones."""
        best = inf
        for c in self.candidates:
            if c.seconds is not None and c.seconds < best:
                best = c.seconds
                yield c


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of numbers, which a page shows in colors.

    Attributes:
        title: the caption, which says what the numbers mean.
        cells: the numbers, row by row; -1 for cells without one, such as padding.
        count: an exclusive upper bound of the numbers.
        rows, columns: the names of rows and columns; () if they have none.
    """

    title: str
    cells: tuple[tuple[int, ...], ...]
    count: int
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report for one kind of kernel, with lines of text and grids."""

    title: str
    text: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()


@dataclass(frozen=True, slots=True)
class CallFacts:
    """Facts about the calls of the operator that a kernel belongs to.

    Attributes:
        guards: the conditions of the fast path, a line for each argument.
        hindrance: why calls with these arguments do not take the fast path; "" if they do.
        lanes: the number of cached calls.
        compiled, loaded: how many kernels of the operator were compiled, and loaded from the cache.
        seconds: the time that compiling and loading these took.
        varying: the sizes in which the kernels differ, with some of their values: "M: 20, 33, 64".
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
        name: the name of the def.
        sizes: (tensor, shape) of the arguments and results.
        target: the machine, as text.
        resources: launched kernels, bytes of temporaries and so on, by name.
        statements: the statements of the def.
        decisions: the compiler's decisions.
        listings: the forms of the kernel.
        seconds: (pass, seconds) of the compiler.
        facts: further facts about the kernel, by name.
        footprints: the footprints of loops.
        roofline: the roofline model; None without a measurement.
        matches: `SAME_BYTES` if the report's machine code equals the kernel's, else `BY_HAND`; "" if unknown.
        edges: the dependences between statements.
        passes: the changes of each pass to the loops.
        sections: parts for this kind of kernel.
        search: the search for the options of the kernel; None if unknown.
        calls: facts about calls of the operator; None if the report is about a kernel alone.
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
        """The listing of a kind. Raises ArgumentError if the report has none."""
        for found in self.listings:
            if found.kind == kind:
                return found
        known = ", ".join(x.kind for x in self.listings)
        raise ArgumentError(f"this report has no listing of kind {kind!r}", expected=known)

    def about(self, subject: str, *tensors: str) -> tuple[Decision, ...]:
        """The decisions about a subject, such as "fusion", that concern a statement for each of `tensors`."""
        tensor_of = {s.name: s.tensor for s in self.statements}
        concerned = ((d, {tensor_of.get(name) for name in d.statements}) for d in self.decisions)
        return tuple(d for d, found in concerned if d.subject == subject and set(tensors) <= found)

    def labels(self, names: tuple[str, ...]) -> Iterator[str]:
        """The labels of statements, such as `4 out`."""
        known = {s.name: s.label for s in self.statements}
        return (known.get(name, name) for name in names)

    def __str__(self) -> str:
        from .text import format_report

        return format_report(self)

    __repr__ = __str__

    def json(self) -> dict[str, Any]:
        """The whole report as JSON values, by schema 3."""
        from .json_form import report_to_json

        return report_to_json(self)

    def html(self) -> str:
        """The report as one HTML page, which loads no other files."""
        from .page import format_page

        return format_page(self)

    def save(self, path: str | Path) -> Path:
        """Write the HTML page, and folders that are missing. Returns the path. Raises ArgumentError if that fails."""
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
        """Show the HTML page in the browser. Returns its path in a new temporary folder."""
        place = self.save(Path(mkdtemp(prefix="tc-explain-")) / f"{self.name}.html")
        webbrowser.open(place.as_uri())
        return place

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        from .page import format_frame

        return {"text/plain": str(self), "text/html": format_frame(self.html())}


def shapes_of_tensors(bound: BoundFunction) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(name, shape) of the arguments and results of a def."""
    return tuple((t.name, t.shape) for t in bound.tensors if t.role is not Role.TEMPORARY)
