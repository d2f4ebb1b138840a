"""The canonical form of a bound def, which lowering gets, so that its output does not depend on a program's names.

Tensors are `a0`, `a1`, ... in order; indices are `i0`, `i1`, ... in the order of the statements, all distinct.
Statements keep their names. `OriginalNames` translates back to the program's names, for messages and reports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

from ...core.errors import CannotLower, TCError
from ...core.internal_names import SEPARATOR
from .. import ir as f
from ..ir import BoundFunction

NAME = "f"
"""The canonical name of every def."""


def canonicalize(bound: BoundFunction, name: str = NAME) -> BoundFunction:
    """`bound` with canonical names, so that defs that differ only in names become equal."""
    tensors = {t.name: f"a{n}" for n, t in enumerate(bound.tensors)}
    numbers = count()
    return replace(
        bound,
        name=name,
        tensors=tuple(replace(t, name=tensors[t.name]) for t in bound.tensors),
        statements=tuple(
            _rename_statement(s, tensors, {i.name: f"i{next(numbers)}" for i in s.indices}) for s in bound.statements
        ),
        returns=tuple(tensors[name] for name in bound.returns),
    )


def _rename_statement(s: f.BoundStatement, tensors: Mapping[str, str], indices: Mapping[str, str]) -> f.BoundStatement:
    """`s` with its tensors and indices renamed; its own name is canonical already."""

    def expression(e: f.Expr) -> f.Expr:
        match e:
            case f.Index(name=index):
                return replace(e, name=indices.get(index, index))
            case f.Access(tensor=tensor):
                e = replace(e, tensor=tensors[tensor])
        return f.with_operands(e, tuple(map(expression, f.operands_of(e))))

    def check(c: f.BoundsCheck) -> f.BoundsCheck:
        guard = None if c.guard is None else expression(c.guard)
        return replace(c, tensor=tensors[c.tensor], subscript=expression(c.subscript), guard=guard)

    return replace(
        s,
        target=tensors[s.target],
        subscripts=tuple(map(expression, s.subscripts)),
        value=expression(s.value),
        indices=tuple(replace(index, name=indices[index.name]) for index in s.indices),
        checks=tuple(map(check, s.checks)),
    )


@dataclass(frozen=True, slots=True)
class OriginalNames:
    """A map from canonical names to those of a program. function: the name of the def."""

    function: str
    names: Mapping[str, str]

    @staticmethod
    def of(bound: BoundFunction) -> OriginalNames:
        """The original names of `canonicalize(bound)`."""
        plain = canonicalize(bound)
        pairs = [(t.name, own.name) for t, own in zip(plain.tensors, bound.tensors, strict=True)]
        pairs += [(i.name, own.name) for i, own in zip(_list_indices(plain), _list_indices(bound), strict=True)]
        return OriginalNames(bound.name, dict(pairs))

    def name(self, name: str) -> str:
        """Translate a canonical name, or a name that lowering has composed from some, to the program's names."""
        return SEPARATOR.join(self.names.get(part, part) for part in name.split(SEPARATOR))

    def text(self, text: str) -> str:
        """Translate the canonical names in a text to the program's names."""
        return re.sub(r"(?<![^\W_])[ai]\d+(?![^\W_])", lambda found: self.names.get(found[0], found[0]), text)


@contextmanager
def translate_errors(bound: BoundFunction) -> Iterator[None]:
    """Translate the names in errors that the `with` block raises about the canonical form of `bound`."""
    try:
        yield
    except TCError as error:
        text = OriginalNames.of(bound).text
        error.message, error.suggestion = text(error.message), text(error.suggestion)
        error.expected, error.found = text(error.expected), text(error.found)
        error.args = (error.message,)
        raise
    except CannotLower as refusal:
        raise CannotLower(OriginalNames.of(bound).text(str(refusal))) from refusal


def _list_indices(bound: BoundFunction) -> Iterator[f.BoundIndex]:
    return (i for s in bound.statements for i in s.indices)
