"""Docstrings name parameters and attributes that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tensor_comprehensions

PACKAGE = Path(tensor_comprehensions.__file__).parent
FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if not p.name.endswith("_pb2.py")]
ENTRY = re.compile(r" {4}((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*): ")
"""A line of a section that begins with names."""


def list_described_names(node: ast.AST, heading: str) -> Iterator[str]:
    """The names that a section of the docstring of `node` describes."""
    text = ast.get_docstring(node) if isinstance(node, ast.ClassDef | ast.FunctionDef) else None
    section = re.search(rf"^{heading}:\n((?: .*\n|\n)+)", f"{text}\n", re.MULTILINE)
    for line in section[1].splitlines() if section else ():
        if found := ENTRY.match(line):
            yield from (name.strip(" *") for name in found[1].split(","))


def parameters(function: ast.FunctionDef) -> set[str]:
    a = function.args
    return {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x is not None}


def bases(node: ast.ClassDef) -> Iterator[str]:
    """The names of the classes that `node` inherits from, without type arguments."""
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(plain, ast.Name):
            yield plain.id


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """The classes of the package by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def attributes(node: ast.ClassDef) -> set[str]:
    """Fields, methods, and what methods set, in the class and in those that it inherits from."""
    found: set[str] = set()
    for name in bases(node):
        found = found.union(*map(attributes, classes().get(name, ())))
    for inner in ast.walk(node):
        match inner:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name) | ast.Attribute(attr=name):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {t.id for t in targets if isinstance(t, ast.Name)}
    return found


def unknown_names(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if not re.search(r"^ *(Args|Attributes):$", text, re.MULTILINE):  # parsing all takes seconds
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            yield from (
                f"{node.name}({name})" for name in list_described_names(node, "Args") if name not in parameters(node)
            )
        elif isinstance(node, ast.ClassDef):
            yield from (
                f"{node.name}.{x}" for x in list_described_names(node, "Attributes") if x not in attributes(node)
            )
            for init in node.body:
                if isinstance(init, ast.FunctionDef) and init.name == "__init__":
                    yield from (
                        f"{node.name}({x})" for x in list_described_names(node, "Args") if x not in parameters(init)
                    )


@pytest.mark.every_case
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_docstrings_name_what_exists(path: Path) -> None:
    assert list(unknown_names(path)) == []
