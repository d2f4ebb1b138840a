"""Equations: parsed, checked against the shapes of the operands, and with every ellipsis spelled out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import ArgumentError, Span

Shape = tuple[int, ...]
ELLIPSIS = "..."


@dataclass(frozen=True, slots=True)
class Equation:
    """Subscripts of the operands and of the output.

    Attributes:
        operands: a label for every dimension; None if a dimension of size 1 meets a larger one and is repeated.
        output: distinct labels of the operands.
        sizes: of every label.
    """

    operands: tuple[tuple[str | None, ...], ...]
    output: tuple[str, ...]
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Term:
    """The subscripts of one operand or of the output, and where in the equation they start."""

    labels: tuple[str, ...]
    start: int

    @property
    def has_ellipsis(self) -> bool:
        return ELLIPSIS in self.labels

    @property
    def letters(self) -> list[str]:
        return [label for label in self.labels if label != ELLIPSIS]


def parse_equation(text: str, shapes: Sequence[Shape]) -> Equation:
    """The equation `text` for operands of these shapes.

    Raises:
        ArgumentError: the equation is malformed, or does not fit the shapes.
    """
    left, arrow, right = text.partition("->")
    terms: list[_Term] = []
    start = 0
    for part in left.split(","):
        terms.append(_Term(_parse_labels(text, part, start), start))
        start += len(part) + 1
    if len(terms) != len(shapes):
        raise _equation_error(
            text, f"the equation has subscripts for {_format_plural(len(terms), 'operand')}, got {len(shapes)}"
        )
    covered = max(
        (_count_ellipsis_dims(text, n, *pair) for n, pair in enumerate(zip(terms, shapes, strict=True))), default=0
    )
    spelled = tuple(_expand_labels(term, shape, covered) for term, shape in zip(terms, shapes, strict=True))
    sizes = _infer_label_sizes(text, spelled, shapes)
    output = _Term(_parse_labels(text, right, start + 1), start + 1) if arrow else None
    operands = tuple(
        tuple(label if sizes[label] == size else None for label, size in zip(labels, shape, strict=True))
        for labels, shape in zip(spelled, shapes, strict=True)
    )
    return Equation(operands, _infer_output_labels(text, output, terms, sizes, covered), sizes)


def _parse_labels(text: str, part: str, start: int) -> tuple[str, ...]:
    """The labels in `part`, which stands at `start` of the equation."""
    found: list[str] = []
    at = 0
    while at < len(part):
        here = part[at]
        if part.startswith(ELLIPSIS, at):
            if ELLIPSIS in found:
                raise _equation_error(text, "an operand has two ellipses", start + at, 3)
            found.append(ELLIPSIS)
            at += 3
            continue
        if here.isascii() and here.isalpha():
            found.append(here)
        elif here == ".":
            raise _equation_error(text, "found '.' that is not part of an ellipsis", start + at)
        elif not here.isspace():
            raise _equation_error(text, f"invalid subscript {here!r}, subscripts are letters", start + at)
        at += 1
    return tuple(found)


def _count_ellipsis_dims(text: str, number: int, term: _Term, shape: Shape) -> int:
    """How many dimensions the ellipsis of an operand stands for."""
    rest = len(shape) - len(term.letters)
    if rest < 0 or (rest and not term.has_ellipsis):
        raise _equation_error(
            text,
            f"operand {number} has {_format_plural(len(shape), 'dimension')}, "
            f"and {_format_plural(len(term.letters), 'subscript')}",
            term.start,
            suggestion="" if rest < 0 else "write ... for the dimensions without subscripts",
        )
    return rest


def _expand_labels(term: _Term, shape: Shape, covered: int) -> tuple[str, ...]:
    """The label of every dimension: an ellipsis becomes the last of `covered` numbered labels."""
    rest = len(shape) - len(term.letters)
    names = tuple(f"e{n}" for n in range(covered - rest, covered))
    return tuple(name for label in term.labels for name in (names if label == ELLIPSIS else (label,)))


def _infer_label_sizes(text: str, operands: Sequence[tuple[str, ...]], shapes: Sequence[Shape]) -> dict[str, int]:
    """The size of every label; 1 gives way to any other."""
    sizes: dict[str, int] = {}
    where: dict[str, int] = {}
    for number, (labels, shape) in enumerate(zip(operands, shapes, strict=True)):
        within: dict[str, int] = {}
        for label, size in zip(labels, shape, strict=True):
            if within.setdefault(label, size) != size:
                found = f"{within[label]} and {size}"
                raise _equation_error(
                    text, f"{_describe_label(label)} is repeated in operand {number}, whose sizes are {found}"
                )
            if sizes.get(label, 1) == 1:
                sizes[label], where[label] = size, number
            elif size not in (1, sizes[label]):
                found = f"{sizes[label]} in operand {where[label]} and {size} in operand {number}"
                raise _equation_error(text, f"{_describe_label(label)} has size {found}")
    return sizes


def _infer_output_labels(
    text: str, output: _Term | None, terms: Sequence[_Term], sizes: Mapping[str, int], covered: int
) -> tuple[str, ...]:
    """The labels of the output: as written, or the dimensions of ellipses, then the labels that occur once, sorted."""
    dots = tuple(f"e{n}" for n in range(covered))
    uses = Counter(letter for term in terms for letter in term.letters)
    if output is None:
        return (*dots, *sorted(letter for letter, count in uses.items() if count == 1))
    for letter in output.letters:
        if letter not in uses:
            raise _equation_error(text, f"output subscript {letter!r} is in no operand", output.start)
        if output.letters.count(letter) > 1:
            raise _equation_error(text, f"output subscript {letter!r} occurs more than once", output.start)
    return tuple(name for label in output.labels for name in (dots if label == ELLIPSIS else (label,)))


def _describe_label(label: str) -> str:
    return f"subscript {label!r}" if len(label) == 1 else f"dimension {label[1:]} of the ellipsis"


def _format_plural(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _equation_error(
    text: str, message: str, start: int | None = None, length: int = 1, suggestion: str = ""
) -> ArgumentError:
    span = Span(0, len(text)) if start is None else Span(start, start + length)
    return ArgumentError(f"einsum: {message}", source=text, span=span, suggestion=suggestion)
