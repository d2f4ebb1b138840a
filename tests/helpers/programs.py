"""Random well-formed programs of the language, with sizes, for tests against the reference evaluator."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

SIZES = ("A", "B", "C")
INDEX = {"A": "a", "B": "b", "C": "c"}
UNARY = ("{}", "-{}", "tanh({})", "fmaxf({}, 0.25)", "{} * 0.5", "relu({})", "abs({})", "exp(0.1 * {})")
BINARY = ("{} + {}", "{} - {}", "{} * {}", "min({}, {})", "fmaxf({}, {})", "{} < {} ? 1.0 : {}")
REDUCTIONS = ("+=!", "max=!", "min=!")


@dataclass(frozen=True)
class Program:
    """A def, and the sizes to bind it to."""

    source: str
    sizes: tuple[tuple[str, int], ...]
    inputs: tuple[tuple[str, tuple[str, ...]], ...]  # name -> size names


@st.composite
def programs(draw: st.DrawFn, most_statements: int = 5) -> Program:
    """A def of up to `most_statements` statements: pointwise chains, reductions, updates, stencils, gathers."""
    inputs = tuple(
        (f"X{k}", tuple(draw(st.lists(st.sampled_from(SIZES), min_size=0, max_size=3, unique=True))))
        for k in range(draw(st.integers(1, 3)))
    )
    inputs = (*inputs, ("Y", SIZES))  # every size is bound by some input
    known = dict(inputs)
    defined: dict[str, tuple[str, ...]] = {}
    statements = []
    for k in range(draw(st.integers(1, most_statements))):
        text, name, dims = draw(_statement(known, defined, k))
        statements.append(text)
        known[name] = defined[name] = dims
    returns = sorted(draw(st.sets(st.sampled_from(sorted(defined)), min_size=1)) | {name})
    parameters = ", ".join((f"float({','.join(dims)}) {name}" if dims else f"float {name}") for name, dims in inputs)
    body = "\n    ".join(statements)
    source = f"def f({parameters}) -> ({', '.join(returns)}) {{\n    {body}\n}}"
    sizes = tuple((s, draw(st.sampled_from((1, 2, 3, 5, 8, 16, 17, 33)))) for s in SIZES)
    return Program(source, sizes, inputs)


@st.composite
def _statement(
    draw: st.DrawFn, known: dict[str, tuple[str, ...]], defined: dict[str, tuple[str, ...]], number: int
) -> tuple[str, str, tuple[str, ...]]:
    kind = draw(st.sampled_from(("pointwise", "reduction", "update", "contraction")))
    if kind == "update" and defined:
        name = draw(st.sampled_from(sorted(defined)))
        dims = defined[name]
        other = draw(_read(known, dims))
        value = draw(st.sampled_from(BINARY[:5])).format(_element(name, dims), other)
        return f"{_element(name, dims)} = {value}", name, dims
    name = f"T{number}"
    space = tuple(draw(st.permutations(SIZES))[: draw(st.integers(1, 3))])
    first, second = draw(_read(known, space)), draw(_read(known, space))
    exists = f" where {', '.join(f'exists Y({_axes(s)})' for s in space)}" if space else ""
    if kind == "pointwise" or kind == "update":
        value = draw(_value(first, second))
        return f"{_element(name, space)} = {value}{exists}", name, space
    kept = space[: draw(st.integers(0, len(space) - 1))]
    if kind == "contraction":
        return f"{_element(name, kept)} +=! {first} * {second}{exists}", name, kept
    value = draw(_value(first, second))
    return f"{_element(name, kept)} {draw(st.sampled_from(REDUCTIONS))} {value}{exists}", name, kept


def _axes(size: str) -> str:
    """Subscripts of Y that bind the index of `size` and leave the other indices at 0."""
    return ", ".join(INDEX[s] if s == size else "0" for s in SIZES)


@st.composite
def _value(draw: st.DrawFn, first: str, second: str) -> str:
    x = draw(st.sampled_from(UNARY)).format(first)
    template = draw(st.sampled_from(BINARY))
    return template.format(*(x, second, x)[: template.count("{}")])


@st.composite
def _read(draw: st.DrawFn, known: dict[str, tuple[str, ...]], space: tuple[str, ...]) -> str:
    """A read of a known tensor at the indices of `space`."""
    fitting = sorted(name for name, dims in known.items() if set(dims) <= set(space))
    choices = [_element(name, known[name]) for name in fitting] or ["1.5"]
    return draw(st.sampled_from(choices))


def _element(name: str, dims: tuple[str, ...]) -> str:
    return f"{name}({', '.join(INDEX[s] for s in dims)})" if dims else name
