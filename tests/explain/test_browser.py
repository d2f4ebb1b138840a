"""Pages in a browser without a screen: they ask for nothing, complain of nothing, and link their listings."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.explain.kernel_report import Report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="looking at pages needs Chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-default-apps", "--disable-sync", "--no-first-run", "--enable-logging=stderr",
    "--proxy-server=http://127.0.0.1:9",
)  # fmt: skip
"""The proxy is nobody: the browser is offline."""
SECONDS = 120


def show_page(page: Path, fragment: str, folder: Path) -> tuple[str, str, list[str]]:
    """The document after its script ran, what the console says, and the addresses that were asked for."""
    log = folder / "net.json"
    command = [
        str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", "--dump-dom",
        f"{page.as_uri()}{fragment}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    console = "\n".join(line for line in done.stderr.split("\n") if "CONSOLE" in line)
    return done.stdout, console, requests_of_pages(log.read_text())


def requests_of_pages(log: str) -> list[str]:
    """The addresses that pages, and not the browser itself, have asked for beyond the page's own."""
    try:
        events = json.loads(log)["events"]
    except json.JSONDecodeError:  # the browser ended before it had closed the list
        events = json.loads(log.rstrip().rstrip(",") + "]}")["events"]
    found = [e["params"] for e in events if {"url", "initiator"} <= e.get("params", {}).keys()]
    return [p["url"] for p in found if p["initiator"] != "not an origin"]


def marked_lines(document: str, pane: str) -> list[str]:
    """The lines of a pane that are pinned."""
    start = document.index(f'id="{pane}"')
    part = document[start : document.index("</pre>", start)]
    return re.findall(r'<span class="[^"]*\bpin\b[^"]*"[^>]*>([^<]*)', part)


@pytest.fixture(scope="module")
def report() -> Report:
    return tc.define(Path("examples/softmax.tc").read_text()).softmax.explain(torch.rand(64, 256))


@needs_browser
def test_a_pinned_statement_is_marked_in_all_listings(report: Report, tmp_path: Path) -> None:
    page = report.save(tmp_path / "softmax.html")
    document, console, addresses = show_page(page, "#s1", tmp_path)
    assert not console
    assert not addresses
    name = report.statements[1].name
    for pane in ("def", "schedule", "loops"):
        marked = marked_lines(document, pane)
        assert marked, pane
        own = {line.text for line in report.find_listing(pane).lines if name in line.statements}
        assert {
            line.rstrip("\n").replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") for line in marked
        } <= own
    assert marked_lines(document, "asm")


@needs_browser
def test_a_hostile_program_runs_no_script(tmp_path: Path) -> None:
    text = 'def f(float(N) x) -> (y) { y(i) = x(i) + 1  # </script><script>document.title="broken"</script>\n}'
    page = tc.define(text).f.explain(torch.rand(100)).save(tmp_path / "f.html")
    document, console, addresses = show_page(page, "", tmp_path)
    assert not console
    assert not addresses
    assert "<title>f</title>" in document


@needs_browser
def test_the_policy_stops_what_was_put_into_a_page(report: Report, tmp_path: Path) -> None:
    """The check of the checks: a script of somebody else is refused, and the console says so."""
    page = tmp_path / "changed.html"
    page.write_text(report.html().replace("</main>", '<script>document.title="broken"</script></main>'))
    document, console, _ = show_page(page, "", tmp_path)
    assert "Content Security Policy" in console
    assert "<title>softmax</title>" in document


@needs_browser
def test_a_request_of_a_page_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "asking.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png">')
    assert show_page(page, "", tmp_path)[2] == ["http://127.0.0.1:9/x.png"]


def test_json_of_a_report_is_no_part_of_its_page(report: Report) -> None:
    assert json.dumps(report.json())
    assert "application/json" not in report.html()
