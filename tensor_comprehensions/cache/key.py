"""Cache keys: everything that can change a kernel or a measurement, as named texts in a fixed order.

Fields of options and targets are found by reflection, so a new field becomes a part of the key without other changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version

from ..core.errors import InternalError
from ..tc_lang import ir as f
from ..tc_lang.ir import BoundFunction, Function
from ..tc_lang.transforms.canonical_bound import canonicalize
from . import package_digest
from .store import current_store

PACKAGES = ("tensor-comprehensions", "islpy", "llvmlite", "torch", "numpy")
"""The packages whose versions are recorded."""
FAMILY_PARTS = ("kind", "def", "dtypes", "target.", "threads")
"""The parts that are equal in all keys of a family; a name that ends in a dot is a prefix."""

FORM_VERSION = "2"
"""The version of the canonical def; a new one invalidates old entries. Before 2, code could have names of the def."""


class Uncacheable(Exception):
    """A kernel cannot be cached, because a value, such as a function, has no text that determines its meaning."""


@dataclass(frozen=True, slots=True)
class Key:
    """Named parts. Keys are equal if and only if all parts are equal."""

    parts: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """64 hexadecimal digits, the name of the entry."""
        return _compute_key_digest(self.parts)

    @property
    def family(self) -> str:
        """16 hexadecimal digits that are equal for keys that differ only in sizes, strides, scalars, options etc."""
        return _compute_key_digest(tuple(part for part in self.parts if _in_family(part[0])))[:16]

    def __getitem__(self, name: str) -> str:
        """The text of a part; empty if the key has none of this name."""
        return dict(self.parts).get(name, "")

    def difference(self, other: Key) -> tuple[str, ...]:
        """The names of the parts in which two keys differ, in order."""
        mine, theirs = dict(self.parts), dict(other.parts)
        return tuple(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))


def make_key(
    function: Function,
    bound: BoundFunction,
    target: object,
    *,
    options: object = None,
    threads: int = 0,
    alignment: int = 0,
    flags: Mapping[str, str] | None = None,
    rows: str = "",
) -> Key:
    """The key of a kernel, or without `options` the key for measurements of all options.

    A kernel depends on the source of this package and on its compilers, so these are parts of its key. A measurement
    records versions instead: options that were good for an earlier version are still good starting points.

    Args:
        function: the def.
        bound: the def with its sizes, strides and scalars.
        target: the processor, a frozen dataclass.
        options: how the def is lowered, a frozen dataclass.
        threads: the number of threads of a measurement; kernels work with any number.
        alignment: bytes to which the addresses of tensors are aligned; 0: the size of an element.
        flags: other facts that the emitted code depends on.
        rows: a description of the axes of a range kernel; `bound` is then the def for a single row.

    Raises Uncacheable if the options hold a function, or if the source of this package cannot be read.
    """
    tensors = [t for t in bound.tensors if t.role is not f.Role.TEMPORARY]
    parts = [
        ("kind", "tuning" if options is None else "range" if rows else "kernel"),
        ("def", function.canonical),
        ("form", FORM_VERSION),
        ("dtypes", " ".join(str(t.dtype) for t in tensors)),
        ("shapes", " ".join(_format_dimensions(t.shape) for t in tensors)),
        ("strides", " ".join(_format_dimensions(t.strides) for t in tensors)),
        ("alignment", str(alignment or "element")),
        ("bound", sha256(repr(canonicalize(bound)).encode()).hexdigest()),
        *_flatten_fields("target", target),
    ]
    if rows:
        parts.append(("rows", rows))
    if options is None:
        parts.append(("threads", str(threads)))
        return Key(tuple(parts))
    parts += _flatten_fields("options", options)
    if refers_to_names(options):
        parts.append(("spelling", names_digest(bound)))
    return Key((*parts, *_toolchain_parts(flags)))


def make_sparse_key(text: str, kernel: object, target: object, *, flags: Mapping[str, str] | None = None) -> Key:
    """The key of a kernel with sparse operands, which depends neither on sizes nor on the stored elements.

    Args:
        text: the def with the formats of its tensors.
        kernel: other facts that the kernel depends on: tuples of numbers and texts.
        target: the processor, a frozen dataclass.
        flags: other facts that the emitted code depends on.

    Raises Uncacheable if the source of this package cannot be read.
    """
    parts = [("kind", "sparse"), ("def", text), ("kernel", canonical_text(kernel)), *_flatten_fields("target", target)]
    return Key((*parts, *_toolchain_parts(flags)))


def make_sparse_tuning_key(text: str, kernel: object, shapes: str, target: object, *, threads: int) -> Key:
    """The key for measurements of a def with sparse operands. Measurements record versions themselves.

    Args:
        text, kernel, target: as in `make_sparse_key`.
        shapes: the sizes, and the numbers of stored elements.
        threads: the number of threads.
    """
    parts = [("kind", "sparse tuning"), ("def", text), ("dtypes", canonical_text(kernel)), ("shapes", shapes)]
    return Key((*parts, *_flatten_fields("target", target), ("threads", str(threads))))


def make_installation_key(kind: str, facts: Mapping[str, str], target: object) -> Key:
    """The key of a fact about this installation on a processor.

    Args:
        kind: the kind of fact.
        facts: all that the fact depends on, except the versions of packages.
        target: the processor, a frozen dataclass.

    Raises Uncacheable if the source of this package cannot be read.
    """
    return Key((("kind", kind), *_flatten_fields("target", target), *_toolchain_parts(facts)))


def _toolchain_parts(flags: Mapping[str, str] | None) -> list[tuple[str, str]]:
    parts = [(f"version.{name}", text) for name, text in toolchain_versions()]
    return [*parts, ("source", _source()), *((f"flag.{name}", text) for name, text in sorted((flags or {}).items()))]


def names_digest(bound: BoundFunction) -> str:
    """A digest of the names in a def, for options that use them."""
    names = [t.name for t in bound.tensors]
    names += [name for s in bound.statements for name in (s.name, *(index.name for index in s.indices))]
    return _compute_key_digest((("names", " ".join(names)),))[:16]


def refers_to_names(options: object) -> bool:
    """Whether options name loops or tensors of the def."""
    return getattr(options, "schedule", None) is not None


# --- parts -------------------------------------------------------------------------------------------------------


def canonical_text(value: object) -> str:
    """The text of a value of an option or target, the same in every process. Raises Uncacheable for other values."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple):
        return f"({', '.join(map(canonical_text, value))})"
    if type(value).__name__ == "Schedule":
        return repr(value)
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in _flatten_fields('', value))})"
    raise Uncacheable(f"{value!r} has no text that could be part of a key")


def _flatten_fields(prefix: str, record: object) -> Iterator[tuple[str, str]]:
    """(name, text) of every field of a dataclass; with a prefix, the first pair is (prefix, name of the class)."""
    if not is_dataclass(record):
        raise InternalError(f"{record!r} is no record")
    if prefix:
        yield prefix, type(record).__name__
    for x in fields(record):
        yield f"{prefix}.{x.name}" if prefix else x.name, canonical_text(getattr(record, x.name))


def _format_dimensions(numbers: tuple[int, ...]) -> str:
    return f"({','.join(map(str, numbers))})"


def _compute_key_digest(parts: tuple[tuple[str, str], ...]) -> str:
    """The SHA-256 of the parts, each with its length, so that different lists of parts give different bytes."""
    total = sha256()
    for part in parts:
        for text in part:
            data = text.encode()
            total.update(b"%d:" % len(data) + data)
    return total.hexdigest()


def _in_family(name: str) -> bool:
    return any(name == member or (member[-1] == "." and name.startswith(member)) for member in FAMILY_PARTS)


# --- versions ----------------------------------------------------------------------------------------------------


@cache
def toolchain_versions() -> tuple[tuple[str, str], ...]:
    """The installed versions of the package and of its compilers."""
    return tuple((name, _get_package_version(name)) for name in PACKAGES)


def _get_package_version(name: str) -> str:
    """The version of a package, from the loaded module if possible: reading metadata is slower than a cache lookup.

    It has no local part: the metadata of torch's CUDA builds say `2.15.0`, and the module `2.15.0+cu132`.
    """
    module = sys.modules.get(name.replace("-", "_"))
    if not isinstance(text := getattr(module, "__version__", None), str):
        try:
            text = version(name)
        except PackageNotFoundError:
            return "unknown"
    return str(text).partition("+")[0]  # torch's version is a subclass of str whose comparisons fail for some texts


def _source() -> str:
    try:
        return package_digest.package_digest(current_store())
    except package_digest.SourceChanged as reason:
        raise Uncacheable(str(reason)) from reason
