"""Diagnostics: log topics, dumped stages, and views of the schedule tree.

Invariant: nothing here changes the compiled code.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from . import knobs
from .errors import ArgumentError

ROOT = "tensor_comprehensions"


def get_logger(topic: str) -> logging.Logger:
    """The logger of one topic of `TC_LOGS`."""
    return logging.getLogger(f"{ROOT}.{topic}")


def start_logging(topics: tuple[str, ...]) -> None:
    """Send the messages of `topics` to stderr; without topics, leave logging to the program."""
    if not topics:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
    logging.getLogger(ROOT).addHandler(handler)
    logging.getLogger(ROOT).propagate = False
    for topic in topics:
        get_logger(topic).setLevel(logging.DEBUG)


@dataclass(frozen=True, slots=True)
class Dump:
    """The folder for the stages of one kernel: `folder/00_text.tc`, `folder/01_legalize.txt`, ..."""

    folder: Path

    @classmethod
    def of(cls, kernel: str) -> Dump | None:
        """The dump of a kernel called `kernel`, below the folder `TC_DUMP`; None if `TC_DUMP` is not set."""
        root = knobs.current_knobs().dump
        return cls(Path(root) / kernel) if root else None

    def write(self, number: int, name: str, text: str, suffix: str = "txt") -> None:
        """Write stage `number`. Raises ArgumentError when the folder cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{number:02}_{name}.{suffix}").write_text(text, "utf-8", "backslashreplace")
        except OSError as error:
            raise ArgumentError(
                f"cannot write to the folder that TC_DUMP names: {error}", suggestion="name a folder that you may write"
            ) from error


# --- pictures ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """A tree as indented text, which a notebook shows as a picture."""

    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        return tree_to_svg(self.text)

    def save(self, path: str | Path) -> None:
        """Write the picture as an SVG file."""
        Path(path).write_text(tree_to_svg(self.text))


_ROW, _STEP, _CHARACTER, _MARGIN = 26, 22, 7.3, 8
_COLOURS = (
    ("parallel", "#cfe8cf"),
    ("vector", "#fde2b8"),
    ("unroll", "#fde2b8"),
    ("band", "#d6e4f5"),
    ("sequence", "#eeeeee"),
    ("set", "#eeeeee"),
    ("mark", "#eadcf5"),
    ("domain", "#f5f5f5"),
)


def tree_to_svg(text: str) -> str:
    """An SVG picture of the tree that `text` shows by indentation: a box for each line, a line to its parent.

    The output is deterministic.
    """
    rows = [(len(line) - len(line.lstrip()), line.strip()) for line in text.splitlines() if line.strip()]
    places = [(_MARGIN + depth * _STEP, _MARGIN + row * _ROW) for row, depth in enumerate(_compute_tree_depths(rows))]
    widths = [16 + _CHARACTER * len(label) for _, label in rows]
    width = _MARGIN + max((x + w for (x, _), w in zip(places, widths, strict=True)), default=0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{2 * _MARGIN + _ROW * len(rows)}" '
        'font-family="monospace" font-size="12">'
    ]
    lines += _render_edges(places)
    for (x, y), w, (_, label) in zip(places, widths, rows, strict=True):
        lines.append(
            f'<rect x="{x}" y="{y}" width="{w:.0f}" height="20" rx="4" fill="{_choose_color(label)}" stroke="#888"/>'
        )
        lines.append(f'<text x="{x + 8}" y="{y + 14}" xml:space="preserve">{escape(label)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _compute_tree_depths(rows: list[tuple[int, str]]) -> Iterator[int]:
    open_indents: list[int] = []
    for indent, _ in rows:
        while open_indents and open_indents[-1] >= indent:
            open_indents.pop()
        yield len(open_indents)
        open_indents.append(indent)


def _render_edges(places: list[tuple[int, int]]) -> Iterator[str]:
    for row, (x, y) in enumerate(places):
        parent = next((p for p in reversed(places[:row]) if p[0] < x), None)
        if parent is not None:
            left = parent[0] + 8
            yield f'<path d="M{left} {parent[1] + 20} V{y + 10} H{x}" fill="none" stroke="#888"/>'


def _choose_color(label: str) -> str:
    return next((color for word, color in _COLOURS if word in label.lower()), "#ffffff")
