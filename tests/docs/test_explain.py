"""The page on reports shows what its snippets print."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from tensor_comprehensions.runtime.cuda import nvrtc

PAGE = Path(__file__).parents[2] / "docs" / "explain.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run_snippets() -> list[tuple[str, str]]:
    """What each snippet that a text follows prints, and that text."""
    blocks = [(found[1], found[2]) for found in BLOCK.finditer(PAGE.read_text())]
    namespace: dict[str, Any] = {}
    pairs = []
    for number, (language, text) in enumerate(blocks):
        if language != "python":
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(text, namespace)
        if number + 1 < len(blocks) and blocks[number + 1][0] == "text":
            pairs.append((out.getvalue(), blocks[number + 1][1]))
    return pairs


def without_registers(text: str) -> str:
    """A report as without NVRTC, which tells the registers of a thread."""
    return re.sub(r"\d+ blocks on a processor.*|[\d.]+ times the blocks.*", "", text)


def test_the_texts_are_what_is_printed() -> None:
    found = run_snippets()
    assert len(found) == 6
    for out, text in found:
        exact = nvrtc.is_nvrtc_available()
        assert (out if exact else without_registers(out)) == (text if exact else without_registers(text))
