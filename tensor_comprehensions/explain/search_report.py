"""The search for the options of a kernel, in words and as a picture; times are scaled to those of the final race."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html import escape
from math import log10

from .kernel_report import SearchCurve, TriedOptions

WIDTH, HEIGHT, MARGIN = 560, 240, 52


def describe_search(s: SearchCurve) -> str:
    """The number of candidates tried, and the times of the chosen and of the default options, in words."""
    kinds = Counter(c.outcome for c in s.candidates)
    outcomes = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.most_common())
    tried = f"{len(s.candidates)} candidates in {s.elapsed:.0f} s ({outcomes})"
    if s.seconds is None or s.default_seconds is None:
        return f"{tried}; the search has not ended"
    times = f"the winner takes {s.seconds * 1e6:.1f} us in the final race, the default {s.default_seconds * 1e6:.1f} us"
    return f"{tried}; {times} ({s.default_seconds / s.seconds:.2f} x)"


def draw_search(s: SearchCurve) -> str:
    """The picture of a search as SVG: a point for each candidate, a line for the best so far, a circle for the winner.

    Candidates without a time are at the upper edge. Times are scaled to those of the final race.
    """
    if all(c.seconds is None for c in s.candidates):
        return "<p>No candidate was timed.</p>"
    return f'<svg class="chart" width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(_Plot(s).parts())}</svg>'


class _Plot:
    """The geometry of the picture; times are in microseconds, coordinates in pixels."""

    def __init__(self, s: SearchCurve) -> None:
        self._search = s
        times = [self._time(c) for c in s.candidates if c.seconds is not None]
        race = [seconds * 1e6 for seconds in (s.seconds, s.default_seconds) if seconds is not None]
        self._low, self._high = min(times + race), max(times + race)
        self._end = max(s.elapsed, *(c.elapsed for c in s.candidates), 1e-9)

    def _time(self, c: TriedOptions) -> float:
        return (c.seconds or 0.0) * self._search.scale * 1e6

    def _x(self, elapsed: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * elapsed / self._end

    def _y(self, time: float) -> float:
        room = log10(self._high / self._low) or 1.0
        return MARGIN / 2 + (HEIGHT - 1.5 * MARGIN) * log10(self._high / time) / room

    def parts(self) -> Iterator[str]:
        """The SVG elements of the picture."""
        s = self._search
        bottom = HEIGHT - MARGIN
        yield f'<path class="axis" d="M{MARGIN} {MARGIN / 2:.0f} V{bottom} H{WIDTH - MARGIN}"/>'
        for time in (self._low, self._high):
            yield f'<text x="4" y="{self._y(time) + 4:.0f}">{time:.3g} us</text>'
        yield f'<text x="{MARGIN}" y="{bottom + 16}">0 s</text>'
        yield f'<text class="end" x="{WIDTH - MARGIN}" y="{bottom + 16}">{self._end:.0f} s</text>'
        if s.default_seconds is not None:
            y = self._y(s.default_seconds * 1e6)
            title = "<title>the default options in the race</title>"
            yield f'<path class="drop" d="M{MARGIN} {y:.1f} H{WIDTH - MARGIN}">{title}</path>'
        yield f'<path class="roof" d="{self._staircase()}"/>'
        yield from map(self._point, s.candidates)
        if s.seconds is not None:
            place = next((c.elapsed for c in s.candidates if c.options == s.chosen), self._end)
            title = f"<title>{escape(s.chosen)}: {s.seconds * 1e6:.1f} us in the race</title>"
            center = f'cx="{self._x(place):.1f}" cy="{self._y(s.seconds * 1e6):.1f}"'
            yield f'<circle class="limit" {center} r="6">{title}</circle>'

    def _staircase(self) -> str:
        path, y = "", 0.0
        for c in self._search.improvements():
            x, lower = self._x(c.elapsed), self._y(self._time(c))
            path += f"M{x:.1f} {lower:.1f}" if not path else f"H{x:.1f} V{lower:.1f}"
            y = lower
        return f"{path} H{self._x(self._end):.1f}" if y else ""

    def _point(self, c: TriedOptions) -> str:
        is_timed = c.seconds is not None
        y = self._y(self._time(c)) if is_timed else MARGIN / 4
        text = f"{c.options}: {f'{self._time(c):.1f} us' if is_timed else c.outcome.replace('_', ' ')}"
        center = f'cx="{self._x(c.elapsed):.1f}" cy="{y:.1f}"'
        return (
            f'<circle class="{"own" if is_timed else "failed"}" {center} r="2.5"><title>{escape(text)}</title></circle>'
        )
