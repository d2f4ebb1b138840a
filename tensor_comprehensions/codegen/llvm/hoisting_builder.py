"""Builder for the text of one LLVM function, with value numbering and loop-invariant code motion.

An operation without effects is emitted once per scope and placed in the outermost region where its operands are
defined, so loop invariants are hoisted as the text is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Union

Lines = list[Union[str, "Lines"]]

_UNPREDICTABLE = ", !unpredictable !{}"
"""Metadata of a `select` that should not become a branch."""


@dataclass(slots=True)
class CodeRegion:
    """A loop body or a branch. head: the lines of the parent just before it, where hoisted instructions go."""

    lines: Lines
    head: Lines
    certain: bool  # whether it runs at least once whenever its parent runs
    writes: frozenset[str] = frozenset()  # of a loop: the buffers that it writes
    unpredictable: bool = False  # whether its conditions depend on data, as in the steps of a merge or a search
    values: dict[str, str] = field(default_factory=dict)


class HoistingBuilder:
    """Builds instructions and basic blocks. A value is represented by its operand text: `%t7`, `42`, `splat (...)`."""

    def __init__(self, declarations: dict[str, None]) -> None:
        self.allocas: list[str] = []
        self.prologue: list[str] = []  # whole blocks, after the allocas
        self.block = "body"
        self.declarations = declarations
        self._regions = [CodeRegion([], [], True)]
        self._levels: dict[str, int] = {}
        self._counters: set[str] = set()
        self._count = 0

    def instruction(self, text: str) -> str:
        """The line of text of an instruction."""
        return f"  {text}"

    # --- values

    def fresh_name(self, hint: str = "t") -> str:
        self._count += 1
        return f"{hint}.{self._count}"

    def level(self, value: str) -> int:
        """The depth of the region that defines `value`; constants and parameters are at depth 0."""
        return self._levels.get(value, 0)

    def counts(self, value: str) -> bool:
        """Whether `value` is the induction variable of a loop."""
        return value in self._counters

    def define(self, text: str, operands: Sequence[str], *, reads: str = "", version: int = 0) -> str:
        """The value of an operation without effects, placed in the outermost region where its operands are defined.

        An operation that `reads` a buffer is not hoisted out of loops that write it, nor out of regions that might not
        run; `version` distinguishes the contents of the buffer before and after a write.
        """
        level, levels = 0, self._levels
        for o in operands:
            if (depth := levels.get(o, 0)) > level:
                level = depth
        if reads:
            level = max(level, self._reading_level(reads))
        here = len(self._regions) - 1
        region = self._regions[level]
        key = f"{text} {version}" if reads else text
        known = region.values.get(key)
        if known is None:
            known = f"%{self.fresh_name()}"
            region.values[key] = known
            self._levels[known] = level
            if region.unpredictable and text.startswith("select i1"):
                text += _UNPREDICTABLE
            lines = region.lines if level == here else self._regions[level + 1].head
            lines.append(self.instruction(f"{known} = {text}"))
        return known

    def remember(self, text: str, version: int, value: str) -> None:
        """Let `define(text, ..., version=version)` return `value` in this region: store-to-load forwarding."""
        self._regions[-1].values[f"{text} {version}"] = value

    def define_local(self, text: str) -> str:
        """The value of an operation that must not be hoisted or shared."""
        name = f"%{self.fresh_name()}"
        self._levels[name] = len(self._regions) - 1
        self._regions[-1].lines.append(self.instruction(f"{name} = {text}"))
        return name

    def emit_side_effect(self, text: str) -> None:
        self._regions[-1].lines.append(self.instruction(text))

    def declare(self, text: str) -> None:
        """Declare an external function, such as `float @expf(float)`, once."""
        self.declarations.setdefault(f"declare {text}")

    def _reading_level(self, buffer: str) -> int:
        for level in range(len(self._regions) - 1, 0, -1):
            region = self._regions[level]
            if not region.certain or buffer in region.writes:
                return level
        return 0

    # --- control

    def label(self, name: str) -> None:
        self._regions[-1].lines.append(f"{name}:")
        self.block = name

    @contextmanager
    def _region(
        self, head: Lines, certain: bool, writes: frozenset[str] = frozenset(), unpredictable: bool = False
    ) -> Iterator[None]:
        unpredictable = unpredictable or self._regions[-1].unpredictable
        self._regions.append(CodeRegion(self._regions[-1].lines, head, certain, writes, unpredictable))
        yield
        self._regions.pop()

    def _new_head(self) -> Lines:
        head: Lines = []
        self._regions[-1].lines.append(head)
        return head

    @contextmanager
    def loop(self, hint: str, start: str, stop: str, step: int, certain: bool, writes: frozenset[str]) -> Iterator[str]:
        """Emit `for i in range(start, stop, step)` around the block, tested at the bottom; yields i.

        certain: whether it is known to run at least once. writes: the buffers written inside.
        """
        name = self.fresh_name(hint)
        body, after, variable, following = f"loop.{name}", f"end.{name}", f"%{name}", f"%{name}.next"
        self._counters.add(variable)
        head, before = self._new_head(), self.block
        test: Lines = []
        with ExitStack() as inside:
            if certain:
                self.emit_side_effect(f"br label %{body}")
            else:  # loop-invariant loads go after the loop test: without an iteration, they must not run
                enter = self.define_local(f"icmp slt i64 {start}, {stop}")
                self._regions[-1].lines.append(test)
                inside.enter_context(self._region(head, False))
                head = self._new_head()
            self.label(body)
            phi: Lines = []
            self._regions[-1].lines.append(phi)
            with self._region(head, True, writes):
                self._levels[variable] = len(self._regions) - 1
                yield variable
            self.emit_side_effect(f"{following} = add nsw i64 {variable}, {step}")
            again = self.define_local(f"icmp slt i64 {following}, {stop}")
            self.emit_side_effect(f"br i1 {again}, label %{body}, label %{after}")
            last = self.block
        if not certain and head:
            before = f"enter.{name}"
            test += [self.instruction(f"br i1 {enter}, label %{before}, label %{after}"), f"{before}:"]
            head.append(self.instruction(f"br label %{body}"))
        elif not certain:
            test.append(self.instruction(f"br i1 {enter}, label %{body}, label %{after}"))
        phi.append(f"  {variable} = phi i64 [ {start}, %{before} ], [ {following}, %{last} ]")
        self.label(after)

    @contextmanager
    def repeat(self, condition: Callable[[], str], writes: frozenset[str]) -> Iterator[None]:
        """Emit `while condition()` around the block; `condition` prints inside the loop. writes: as in `loop`."""
        name = self.fresh_name("while")
        test, body, after = f"test.{name}", f"body.{name}", f"end.{name}"
        head = self._new_head()
        self.emit_side_effect(f"br label %{test}")
        self.label(test)
        with self._region(head, False, writes, unpredictable=True):
            self.emit_side_effect(f"br i1 {condition()}, label %{body}, label %{after}")
            self.label(body)
            yield
            self.emit_side_effect(f"br label %{test}")
        self.label(after)

    def branch(self, condition: str, then: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
        """Emit `if condition`, with the branches that `then` and `otherwise` print."""
        name = self.fresh_name("if")
        yes, no, after = f"then.{name}", f"else.{name}", f"end.{name}"
        head = self._new_head()
        self.emit_side_effect(f"br i1 {condition}, label %{yes}, label %{no if otherwise else after}")
        for label, write in ((yes, then), (no, otherwise)):
            if write is None:
                continue
            self.label(label)
            with self._region(head, False):
                write()
            self.emit_side_effect(f"br label %{after}")
        self.label(after)

    def text(self) -> list[str]:
        """The lines of the body, the entry block first."""
        lines = ["entry:", *self.allocas, *self.prologue, "  br label %body", "body:"]
        _flatten(self._regions[0].lines, lines)
        return lines


def _flatten(lines: Lines, into: list[str]) -> None:
    for line in lines:
        if isinstance(line, str):
            into.append(line)
        else:
            _flatten(line, into)
