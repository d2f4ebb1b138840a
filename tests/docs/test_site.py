"""The pages build into a site without a warning, every page is reachable, and what is generated is up to date."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tensor_comprehensions as tc
from tensor_comprehensions import options
from tools.docs_chart import CHART, DOCS, render_chart
from tools.docs_site import render_api_page, render_docstring

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_the_site_builds(site: Path) -> None:
    assert (site / "language" / "index.html").exists()


def test_every_fence_becomes_a_block_of_code(site: Path) -> None:
    """One with a header that MkDocs does not know would be text, and swallow what follows."""
    pages = list(site.rglob("index.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        assert "```" not in text, page
        assert "error=" not in text, page


def test_snippets_that_raise_say_so(site: Path) -> None:
    assert '<span class="filename">raises ParseError</span>' in (site / "errors" / "index.html").read_text()


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = [p.relative_to(DOCS).as_posix() for p in sorted(DOCS.rglob("*.md"))]
    assert [p for p in pages if not re.search(rf": {re.escape(p)}$", menu, re.MULTILINE)] == []


def test_the_api_page_has_every_public_name() -> None:
    page = render_api_page()
    for name in (*tc.__all__, *(n for n, x in vars(options).items() if n.endswith("Options") and isinstance(x, type))):
        assert f"\n### {name}\n" in page, name


def test_a_docstring_becomes_markdown() -> None:
    doc = "One line.\n\n    f(x)\n\nArgs:\n    x, y: two\n        things.\n    *rest: more.\n\nRaises:\n    E: never."
    expected = (
        "One line.\n\n\n```python\nf(x)\n```\n\n\n**Args**\n\n- `x`, `y`: two\n  things.\n- `*rest`: more.\n\n\n"
        "**Raises**\n\n- `E`: never.\n"
    )
    assert render_docstring(doc) == expected


def test_the_chart_shows_the_table_of_the_benchmarks() -> None:
    assert CHART.read_text() == render_chart((DOCS / "benchmarks.md").read_text()), "run python -m tools.docs_chart"
