"""Hooks of MkDocs: the API page is made from the docstrings; titles of snippets name the error that they raise."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import tensor_comprehensions as tc
from tensor_comprehensions import options, schedules, target
from tensor_comprehensions.core import knobs

GROUPS: tuple[tuple[str, str, ModuleType, tuple[str, ...]], ...] = (
    (
        "Defining operators",
        "tensor_comprehensions",
        tc,
        ("define", "op", "from_expression", "from_notation", "einsum", "tile_kernel"),
    ),
    (
        "Operators, kernels, layers",
        "tensor_comprehensions",
        tc,
        ("Library", "Op", "Kernel", "Module", "TuningResult", "statistics"),
    ),
    ("Sparse tensors", "tensor_comprehensions", tc, ("SparseTensor", "as_sparse", "read_tensor", "write_tensor")),
    (
        "Options",
        "tensor_comprehensions.options",
        options,
        ("CpuOptions", "MappingOptions", "SparseOptions", "TileOptions"),
    ),
    ("Targets", "tensor_comprehensions.target", target, ("CpuTarget", "GpuTarget", "parse_gpu_target")),
    ("Schedules", "tensor_comprehensions.schedules", schedules, tuple(schedules.__all__)),
    (
        "Errors",
        "tensor_comprehensions",
        tc,
        tuple(sorted((n for n in tc.__all__ if n.endswith("Error")), key=lambda n: (n != "TCError", n))),
    ),
    ("Settings", "tensor_comprehensions.core.knobs", knobs, ("override_knobs",)),
)
"""Heading, the module to import from, and the names."""
_DOCUMENTED = frozenset(id(getattr(home, name)) for _, _, home, names in GROUPS for name in names)

_SECTION = re.compile(r"^(Args|Arguments|Attributes|Raises|Returns|Yields|Example|Examples):$")


def on_files(files: Any, config: Any) -> Any:
    """Add the page of the API to those that MkDocs has found."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "api.md", content=render_api_page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show which error a snippet raises. `error=` is for the tests; MkDocs would take such a block for plain text."""
    return re.sub(r"^```python error=(\w+)$", r'```python title="raises \1"', markdown, flags=re.MULTILINE)


def render_api_page() -> str:
    """The API reference as Markdown: every public name with its signature and docstring."""
    parts = [
        "# API\n",
        "Made from the docstrings of this version. `import tensor_comprehensions as tc` is assumed; the operators that"
        " `tc.define` returns are [`Op`](#op) objects.\n",
    ]
    for heading, module, home, names in GROUPS:
        parts.append(f"## {heading}\n")
        if module != "tensor_comprehensions":
            parts.append(f"From `{module}`.\n")
        parts += [_render_object(name, getattr(home, name)) for name in names]
    return "\n".join(parts)


def _render_object(name: str, value: Any) -> str:
    if inspect.isclass(value):
        return _render_class(name, value)
    if callable(value):
        return f"### {name}\n\n{_code(f'{name}{_signature(value)}')}\n{render_docstring(_doc(value))}"
    return f"### {name}\n\n{_code(f'{name} = {value!r}')}\n"


def _render_class(name: str, cls: type) -> str:
    lines = [f"### {name}\n"]
    if not issubclass(cls, (BaseException, enum.Enum)):
        lines.append(_code(f"class {name}{_signature(cls)}"))
    lines.append(render_docstring(_doc(cls)))
    for member, value in _public_members(cls):
        doc = render_docstring(_doc(value))
        if isinstance(value, property):
            lines.append(f"#### {name}.{member}\n\n{doc}")
        else:
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            lines.append(f"#### {name}.{member}\n\n{_code(member + _signature(function))}\n{doc}")
    return "\n".join(lines)


def _public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """The documented methods and properties of the class, and of its bases that have no entry of their own."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("tensor_comprehensions") or (base is not cls and id(base) in _DOCUMENTED):
            continue
        for member, value in vars(base).items():
            is_method = isinstance(value, property | staticmethod | classmethod) or inspect.isfunction(value)
            if is_method and value.__doc__ and not member.startswith("_") and member not in seen:
                seen.add(member)
                yield member, value


def _doc(value: Any) -> str:
    doc = inspect.getdoc(value) or ""
    if dataclasses.is_dataclass(value) and doc.startswith(f"{getattr(value, '__name__', '')}("):
        return ""  # made by `dataclass`: the signature, which is shown anyway
    return doc


class _Annotation:
    """An annotation that prints as written in the source, not as a string."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _signature(value: Callable[..., Any]) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [p.replace(annotation=_plain(p.annotation)) for p in signature.parameters.values() if p.name != "self"]
    returns = signature.empty if inspect.isclass(value) else _plain(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=returns))


def _plain(annotation: Any) -> Any:
    return _Annotation(annotation) if isinstance(annotation, str) else annotation


def _code(text: str) -> str:
    if len(text) > 100 and "(" in text:
        head, _, rest = text.partition("(")
        body, _, tail = rest.rpartition(")")
        arguments = "".join(f"    {a.strip()},\n" for a in _split_arguments(body))
        text = f"{head}(\n{arguments}){tail}"
    return f"```python\n{text}\n```\n"


def _split_arguments(text: str) -> list[str]:
    """Split at the commas that are outside of all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [p for p in parts if p.strip()]


def render_docstring(doc: str) -> str:
    """A docstring in Google form as Markdown: sections become lists, indented text becomes code."""
    out: list[str] = []
    lines = doc.splitlines()
    at = 0
    while at < len(lines):
        section = _SECTION.match(lines[at])
        if section:
            block, at = _take_indented(lines, at + 1)
            out += ["", f"**{section[1]}**", "", *_items(block), ""]
        elif lines[at].startswith("    "):
            block, at = _take_indented(lines, at)
            out += ["", "```python", *textwrap.dedent("\n".join(block)).strip("\n").splitlines(), "```", ""]
        else:
            out.append(lines[at])
            at += 1
    return "\n".join(out).strip() + "\n"


def _take_indented(lines: list[str], start: int) -> tuple[list[str], int]:
    end = start
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith("    ")):
        end += 1
    return lines[start:end], end


def _items(block: list[str]) -> list[str]:
    """`name: text` with its continuation lines, as items of a list."""
    items: list[str] = []
    for line in textwrap.dedent("\n".join(block)).splitlines():
        found = re.match(r"^([\w*][\w*, ]*): (.*)$", line)
        if found:
            names = ", ".join(f"`{name.strip()}`" for name in found[1].split(","))
            items.append(f"- {names}: {found[2]}")
        elif line.strip():
            items.append(f"  {line.strip()}" if items else line.strip())
    return items
