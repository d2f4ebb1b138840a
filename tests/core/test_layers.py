"""An import may only point down the list of rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensor_comprehensions

PACKAGE = Path(tensor_comprehensions.__file__).parent
LAYERS = (
    ("core",),
    (
        "machine",
        "target",
        "thresholds",
    ),
    ("tc_lang",),
    ("layouts",),
    ("loop_ir",),
    ("lower_expr",),
    ("structured",),
    (
        "options",
        "schedules",
    ),
    ("cache",),
    (
        "polyhedral",
        "sparse",
    ),
    ("tiles",),
    ("codegen",),
    ("runtime",),
    ("compiler",),
    ("explain",),
    ("dispatch",),
    ("torch_ext",),
    ("autotuner",),
    ("kernel",),
    ("api",),
    (
        "einsum_frontend",
        "decorators",
        "nn",
        "dynamo_backend",
    ),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
APART = {("loop_ir", "tc_lang"), ("codegen", "tc_lang"), ("runtime", "tc_lang")}
"""Pairs that the order would allow and the design does not."""
OWNERS = {
    "islpy": {"polyhedral"},
    "llvmlite": {"codegen", "runtime"},
    "lark": {"layouts", "tc_lang"},
    "pyopencl": {"runtime"},
    "cupy": {"runtime"},
    "cupy_backends": {"runtime"},
    "google": {"autotuner", "cache"},
    "deap": {"autotuner"},
    "scipy": {"dispatch"},
}
"""Third-party modules that only some rooms may import."""


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """The absolute names of what `path` imports at any depth, with the line."""
    here = ("tensor_comprehensions", *path.relative_to(PACKAGE).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield node.lineno, module
            if not node.module:
                for alias in node.names:
                    yield node.lineno, f"{module}.{alias.name}"


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "__init__.py" or p.parent != PACKAGE]


@pytest.mark.every_case
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL, f"{room} has no place in LAYERS"
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] in OWNERS:
            assert room in OWNERS[parts[0]] or room == "cli", f"{path}:{line} imports {parts[0]}"
        if parts[0] != "tensor_comprehensions" or len(parts) == 1 or parts[1] not in LEVEL:
            continue
        assert LEVEL[parts[1]] <= LEVEL[room], f"{path}:{line} imports {parts[1]}, which is above {room}"
        assert (room, parts[1]) not in APART, f"{path}:{line}: {room} must know nothing of {parts[1]}"
