"""Pages in a browser without a screen: they ask for nothing, complain of nothing, and link their listings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.explain.kernel_report import Report
from tools.browser import CHROMIUM, Browser

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="looking at pages needs Chromium")


def list_marked_lines(browser: Browser, pane: str, name: str = "pin") -> list[str]:
    """The marked lines of a pane."""
    script = f"[...document.querySelectorAll('#{pane} .{name}')].map(e=>e.textContent.replace(/\\n$/,''))"
    found: list[str] = browser.evaluate(script)
    return found


def line(pane: str, number: int) -> str:
    """An expression for a line of a pane, from 1 on."""
    return f"document.querySelectorAll('#{pane} .l')[{number - 1}]"


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def report() -> Report:
    return tc.define(Path("examples/softmax.tc").read_text()).softmax.explain(torch.rand(64, 256))


@needs_browser
def test_a_pinned_statement_is_marked_in_all_listings(report: Report, tmp_path: Path, browser: Browser) -> None:
    page = report.save(tmp_path / "softmax.html")
    browser.open(page, "#s1")
    assert (browser.console, browser.requests) == ([], [page.as_uri()])
    name = report.statements[1].name
    for pane in ("def", "schedule", "loops"):
        own = {x.text for x in report.find_listing(pane).lines if name in x.statements}
        assert set(list_marked_lines(browser, pane)) <= own
        assert list_marked_lines(browser, pane), pane
    assert list_marked_lines(browser, "asm")
    assert list_marked_lines(browser, "dependences")


@needs_browser
def test_pointing_clicking_and_keys(report: Report, tmp_path: Path, browser: Browser) -> None:
    """Pointing marks lines and leaves when the pointer does; a click stays; keys do what the mouse does."""
    browser.open(report.save(tmp_path / "softmax.html"))
    second = report.statements[1]
    text = report.find_listing("def").lines[second.line - 1].text
    browser.hover(line("def", second.line))
    assert list_marked_lines(browser, "def", "near") == [text]
    assert list_marked_lines(browser, "asm", "near")
    browser.hover("document.querySelector('h1')")
    assert not list_marked_lines(browser, "def", "near")
    browser.click(line("def", second.line))
    browser.hover("document.querySelector('h1')")
    assert list_marked_lines(browser, "def") == [text]
    browser.press("ArrowDown")
    third = report.find_listing("def").lines[second.line].text
    assert list_marked_lines(browser, "def") == [third]
    browser.press("ArrowUp")
    assert list_marked_lines(browser, "def") == [text]
    browser.press("Escape")
    assert not list_marked_lines(browser, "def")


@needs_browser
def test_a_line_of_loops_is_marked_in_its_code(report: Report, tmp_path: Path, browser: Browser) -> None:
    browser.open(report.save(tmp_path / "softmax.html"))
    assembly = report.find_listing("asm").lines
    loop = next(x.loop for x in assembly if x.loop)
    browser.hover(line("loops", loop))
    assert list_marked_lines(browser, "asm", "near") == [x.text for x in assembly if x.loop == loop]
    assert list_marked_lines(browser, "loops", "near") == [report.find_listing("loops").lines[loop - 1].text]


@needs_browser
def test_folded_panes_open(report: Report, tmp_path: Path, browser: Browser) -> None:
    """By keys alone: their lines are those of the report, and linked like all others."""
    browser.open(report.save(tmp_path / "softmax.html"), "#s1")
    for pane in ("c", "llvm"):
        assert not browser.evaluate(f"document.querySelectorAll('#{pane} .l').length")
        browser.evaluate(f"document.querySelector('#{pane} summary').focus()")
        browser.press("Enter")
        count = f"document.querySelectorAll('#{pane} .l').length"
        wanted = report.find_listing(pane).lines
        browser.evaluate(f"new Promise(done=>{{const f=()=>{count}?done(1):setTimeout(f,20);f()}})")
        texts = browser.evaluate(f"[...document.querySelectorAll('#{pane} .l')].map(e=>e.textContent)")
        assert texts == [f"{x.text}\n" for x in wanted]
        own = {x.text for x in wanted if report.statements[1].name in x.statements}
        assert list_marked_lines(browser, pane)
        assert set(list_marked_lines(browser, pane)) <= own
    assert not browser.console
    assert len(browser.requests) == 1


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes_and_widths(report: Report, tmp_path: Path, browser: Browser, theme: str) -> None:
    """Nothing is wider than the window, and text differs from its background."""
    browser.set_theme(theme)
    browser.open(report.save(tmp_path / "softmax.html"))
    for width in (420, 900, 1500):
        browser.resize(width, 900)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    colors = browser.evaluate("(()=>{const s=getComputedStyle(document.body);return [s.color,s.backgroundColor]})()")
    light = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors]
    assert abs(light[0] - light[1]) > 450
    assert (light[1] > light[0]) == (theme == "light")


@needs_browser
def test_a_page_without_script(report: Report, tmp_path: Path, browser: Browser) -> None:
    browser.stop_scripts()
    browser.open(report.save(tmp_path / "softmax.html"))
    shown = browser.evaluate("document.body.innerText")
    for pane in ("def", "schedule", "loops", "asm"):
        assert all(x.text.strip() in shown for x in report.find_listing(pane).lines)
    assert not browser.console


@needs_browser
def test_a_hostile_program_runs_no_script(tmp_path: Path, browser: Browser) -> None:
    text = 'def f(float(N) x) -> (y) { y(i) = x(i) + 1  # </script><script>document.title="broken"</script>\n}'
    browser.open(tc.define(text).f.explain(torch.rand(100)).save(tmp_path / "f.html"))
    assert not browser.console
    assert len(browser.requests) == 1
    assert browser.evaluate("document.title") == "f"


@needs_browser
def test_the_policy_stops_what_was_put_into_a_page(report: Report, tmp_path: Path, browser: Browser) -> None:
    """The check of the checks: a script of somebody else is refused, and the console says so."""
    page = tmp_path / "changed.html"
    page.write_text(report.html().replace("</main>", '<script>document.title="broken"</script></main>'))
    browser.open(page)
    assert "Content Security Policy" in browser.console[0]
    assert browser.evaluate("document.title") == "softmax"


@needs_browser
def test_a_request_of_a_page_would_be_seen(tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "asking.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png">')
    browser.open(page)
    assert browser.requests == [page.as_uri(), "http://127.0.0.1:9/x.png"]


def test_json_of_a_report_is_no_part_of_its_page(report: Report) -> None:
    assert json.dumps(report.json())
    assert "application/json" not in report.html()
