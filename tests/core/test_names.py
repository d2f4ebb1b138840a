"""Names stay in the words of the field: no old name comes back, no public name means two things."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import tensor_comprehensions

PACKAGE = Path(tensor_comprehensions.__file__).parent
FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if not p.name.endswith("_pb2.py")]
NODES = {"tc_lang/syntax/tree.py", "tc_lang/ir.py", "loop_ir/nodes.py", "tiles/specs.py"}
"""Trees of several levels: their nodes share names on purpose and are written with the name of the module."""


def read_words(name: str) -> frozenset[str]:
    return frozenset((Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8").split())


OLD_MODULES = read_words("old_modules")
OLD_VARIABLES = ("TC_CACHE_KEY", "TC_CACHE_SIZE")
TWICE = frozenset(
    {
        "add",
        "select",
        "sub",
    }
)
"""Functions of several modules that do the same for different things."""
PARTICIPLES = frozenset({"embedding"})
"""At most 25: each takes a value and gives it back changed, or is the name of a torch operation."""
WORDS = read_words("bare_public_words")
"""Participles without -ed and -ing, and adverbs, that were names of functions."""
BARE_WORDS = WORDS | read_words("bare_words")
"""Words that say neither an action nor an object, beside those in -ed and -ing."""
TILE_LEVEL = "gives a value of the same kind, as `sorted` does"
BARE_ALLOWED = {
    "composed": TILE_LEVEL,
    "divided": TILE_LEVEL,
    "each": "a word of the tile language",
    "elapsed": "the seconds since a start, as `torch.cuda.Event.elapsed_time`",
    "enlarged": TILE_LEVEL,
    "embedding": "the operation of torch",
    "fresh": "a name that nothing has yet, as compilers call it",
    "joined": TILE_LEVEL,
    "nested": "a rule of the grammar of layouts",
    "over": "a quotient, beside `plus`, `minus` and `times`",
    "parenthesized": "a rule of the grammar of the language",
    "picked": TILE_LEVEL,
    "real": "a rule of the grammar of the language",
    "reshaped": TILE_LEVEL,
    "ring": "a word of the tile language: a buffer of several stages",
    "shared": "a word of the tile language: a tensor in shared memory",
    "swizzled": TILE_LEVEL,
    "when": "a statement below a condition, as in Chisel",
    "where": "the operation of torch, in the tile language",
}
"""At most 25 names of functions and methods that are a bare word, each with its reason."""


@dataclass(frozen=True)
class Names:
    """The names that a file gives.

    public: its public functions and classes. functions: those among them. inner: all functions, methods and functions
    inside of them, with their lines; no properties, which may be nouns and adjectives.
    """

    public: tuple[str, ...]
    functions: frozenset[str]
    inner: tuple[tuple[str, int], ...]


@cache
def names_in(path: Path) -> Names:
    """Parses a file once for all tests."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public = [
        node
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]
    functions = frozenset(node.name for node in public if isinstance(node, ast.FunctionDef))
    return Names(tuple(node.name for node in public), functions, tuple(list_functions(tree)))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_no_module_has_an_old_name() -> None:
    assert not [name_of(p) for p in FILES if name_of(p).removesuffix(".py") in OLD_MODULES]


def test_no_file_reads_an_old_variable() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert not [v for v in OLD_VARIABLES if re.search(rf"\b{v}\b", text)], name_of(path)


def test_a_public_name_means_one_thing() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        if name_of(path) not in NODES:
            for name in names_in(path).public:
                homes[name].add(name_of(path))
    twice = {name: sorted(where) for name, where in homes.items() if len(where) > 1 and name not in TWICE}
    assert not twice
    assert not {name for name in TWICE if len(homes[name]) < 2}, "no longer needed"


def test_public_functions_say_what_they_do() -> None:
    assert len(PARTICIPLES) <= 25
    bare = [
        f"{name_of(path)}: {name}"
        for path in FILES
        for name in sorted(names_in(path).functions - PARTICIPLES)
        if "_" not in name and (name in WORDS or re.fullmatch(r"[a-z]+(ed|ing)", name))
    ]
    assert not bare


def list_functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not any(
            "property" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            yield node.name, node.lineno


def is_bare(name: str) -> bool:
    word = name.strip("_")
    return not name.startswith("__") and (word in BARE_WORDS or re.fullmatch(r"[a-z]+(ed|ing)", word) is not None)


def test_private_functions_and_methods_say_what_they_do() -> None:
    assert len(BARE_ALLOWED) <= 25
    names: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for name, line in names_in(path).inner:
            if is_bare(name):
                names[name.strip("_")].append(f"{name_of(path)}:{line}: {name}")
    assert not [x for name, where in names.items() if name not in BARE_ALLOWED for x in where]
    assert not {name for name in BARE_ALLOWED if name not in names}, "no longer needed"


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["_kept", "_added", "_without", "_racing", "chosen", "_at"])
def test_a_bare_word_is_found(name: str) -> None:
    assert is_bare(name)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name", ["_merge_equal_terms", "_is_scattered", "__len__", "_kept_labels", "footprint", "emit"]
)
def test_an_action_is_no_bare_word(name: str) -> None:
    assert not is_bare(name)


def test_neighboring_folders_share_no_module_name() -> None:
    """Folders of one folder, and a folder and those in it."""
    modules: dict[Path, set[str]] = defaultdict(set)
    for path in FILES:
        if path.name not in ("__init__.py", "__main__.py"):
            modules[path.parent].add(path.stem)
    for folder, names in modules.items():
        for other, others in modules.items():
            if folder < other and (folder.parent == other.parent or folder == other.parent):
                assert not names & others, f"{folder} and {other}"
