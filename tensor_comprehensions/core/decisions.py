"""A record of the compiler's decisions with their reasons and numbers, kept only while a `DecisionBook` is open.

Without a book, which is the normal case, a decision point reads one `ContextVar` and builds no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Rival:
    """A rejected alternative. number: its value in the unit of the decision, such as cycles; None if unknown."""

    text: str
    number: float | None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice of the compiler.

    Attributes:
        subject: the kind of the decision, one of `SUBJECTS`.
        statements: names of the statements of the def that the decision affects.
        chosen: the outcome. why: its reason.
        numbers: the compared numbers, by name; the name includes the unit, such as `bytes` or `cycles`.
        others: the rejected alternatives, best first.
    """

    subject: str
    statements: tuple[str, ...]
    chosen: str
    why: str
    numbers: tuple[tuple[str, float], ...] = ()
    others: tuple[Rival, ...] = ()

    def number(self, name: str) -> float:
        """The number called `name`. Raises KeyError if there is none."""
        return dict(self.numbers)[name]


SUBJECTS = {
    "fusion": "statements in one kernel, or in two",
    "lowering": "register tiles, or loops",
    "split": "sums in several parts",
    "order": "copies of operands into another order before a product",
    "tiles": "what one iteration of the shared loops covers",
    "temporary": "where an intermediate result lives",
    "plan": "loops, register tile and copies of a contraction",
    "pack": "copies of a factor into panels",
    "vector": "what runs along the lanes",
    "function": "vector functions, or scalar calls",
    "memory": "heap, or stack",
    "tuning": "options from a search",
    "mapping": "blocks and threads",
    "promotion": "tensors in shared memory and registers",
    "padding": "rows of shared memory",
    "graph": "operations of a graph of torch",
}
"""The subjects of decisions, each with its meaning."""


@dataclass(slots=True)
class DecisionBook:
    """The decisions of a compilation in order, without duplicates."""

    _entries: dict[Decision, None] = field(default_factory=dict)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(self._entries)

    def add(self, decision: Decision) -> None:
        self._entries.setdefault(decision)


_BOOK: ContextVar[DecisionBook | None] = ContextVar("tc_decisions", default=None)


def is_recording() -> bool:
    """Whether a book is open in this context."""
    return _BOOK.get() is not None


def record_decision(make: Callable[[], Decision]) -> None:
    """Record the decision that `make` returns. Without an open book, `make` is not called."""
    book = _BOOK.get()
    if book is not None:
        book.add(make())


def note_decision(decision: Decision) -> None:
    """Record `decision` if a book is open."""
    record_decision(lambda: decision)


@contextmanager
def open_book() -> Iterator[DecisionBook]:
    """Open a new book in this context that records the decisions of the `with` block."""
    book = DecisionBook()
    token = _BOOK.set(book)
    try:
        yield book
    finally:
        _BOOK.reset(token)


@contextmanager
def close_book() -> Iterator[None]:
    """Record nothing inside the `with` block, whose decisions are only trials."""
    token = _BOOK.set(None)
    try:
        yield
    finally:
        _BOOK.reset(token)
