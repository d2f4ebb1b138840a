"""Everything the README and the documentation show is run."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

import tensor_comprehensions as tc
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.knobs import Knobs
from tensor_comprehensions.target import AVX512

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
GENERATED = {DOCS / "api.md"}
"""Pages that exist in the site only: `tools/docs_site.py` makes them."""


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Snippet:
    """A fenced block of a page: its language, the word after it, where it starts and its text."""

    language: str
    error: str
    line: int
    text: str


def snippets(page: Path) -> Iterator[Snippet]:
    text = page.read_text()
    for match in re.finditer(r"^```(\w*)(?: error=(\w+))?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Snippet(match[1], match[2] or "", text.count("\n", 0, match.start()) + 1, match[3])


def compile_snippet(snippet: Snippet, page: Path) -> object:
    """The code of a Python snippet, which an error shows with the page and its line."""
    return compile("\n" * snippet.line + snippet.text, str(page), "exec")


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta")
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_runs(page: Path) -> None:
    namespace: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for snippet in snippets(page):
            if snippet.language != "python":
                continue
            if snippet.error:
                with pytest.raises(getattr(tc, snippet.error)) as caught:
                    exec(compile_snippet(snippet, page), namespace)
                assert type(caught.value).__name__ == snippet.error
            else:
                exec(compile_snippet(snippet, page), namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_defs_are_defined(page: Path) -> None:
    for snippet in snippets(page):
        if snippet.language == "tc":
            assert list(tc.define(snippet.text)), f"{page}:{snippet.line}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        path = (page.parent / target).resolve()
        assert target.startswith("https://") or path.exists() or path in GENERATED, target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_of_code_names_its_language(page: Path) -> None:
    """So that it is highlighted, or plainly `text`."""
    fences = [line.strip() for line in page.read_text().splitlines() if line.strip().startswith("```")]
    assert len(fences) % 2 == 0
    assert all(
        opening != "```" and closing == "```" for opening, closing in zip(fences[::2], fences[1::2], strict=True)
    )


OLD_WORDS = (
    r"\bstrateg(?:y|ies)\b", r"\bexperts?\b", r"\beinstein\b", r"`calling/", r"`graphs/", r"\bunpack\(", r"--kind\b",
    r"--rounds\b", r"TC_CACHE_KEY\b", r"TC_CACHE_SIZE\b", r"\b[Ww]hoever\b", r"\b[Nn]obody\b", r"\buntold\b",
    r"\bwhere there (?:is|are) (?:one|none|any)\b",
)  # fmt: skip
"""Names from before the tree was renamed, and turns that the pages do without."""


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_pages_are_in_the_words_of_the_field(page: Path) -> None:
    assert [found[0] for word in OLD_WORDS for found in re.finditer(word, page.read_text())] == []


def test_times_stand_on_the_page_of_benchmarks() -> None:
    """Where they have a date and a machine; the README has a table with both."""
    timed = {page_id(page) for page in PAGES if re.search(r"\d ?µs\b|\bgeomean\b", page.read_text(), re.IGNORECASE)}
    assert timed <= {"README.md", "docs/benchmarks.md", "docs/developers/measurements.md"}


def test_files_that_the_pages_name_exist() -> None:
    """`structured/lower/pack.py` is below one of the folders that pages abbreviate."""
    roots = (ROOT, ROOT / "tensor_comprehensions", ROOT / "tests", *(ROOT / "tensor_comprehensions").rglob("*/"))
    for page in PAGES:
        for name in re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:/|\.py))`", page.read_text()):
            assert any((root / name).exists() for root in roots), f"{page.name}: {name}"


def test_the_first_page_shows_the_loops_of_its_def() -> None:
    found = {s.language: s.text for s in snippets(DOCS / "index.md")}
    namespace: dict[str, Any] = {}
    exec(found["python"], namespace)
    loops = namespace["softmax"].compile(namespace["x"], target=AVX512).source("loops")
    assert textwrap.dedent(loops.partition("kernel softmax:\n")[2]).strip() == found["text"].strip()


def test_the_page_on_the_environment_has_every_variable_and_topic() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    for f in fields(Knobs):
        assert f"| `{f.metadata['variable']}` |" in text
    for topic in knobs.TOPICS:
        assert f"`{topic}`" in text


def test_readme_names_the_two_commands_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command
