"""The pictures of reports in the docs: `python -m tools.explain_pictures [NAME ...]`. Needs Chromium."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image

import tensor_comprehensions as tc
from tensor_comprehensions.explain.kernel_report import Report
from tensor_comprehensions.target import AVX512
from tensor_comprehensions.tiles.library.product import gemm80

from .browser import Browser

ROOT = Path(__file__).parents[1]
WIDTH, COLORS = 1200, 64
"""Pixels of a picture; colors that are kept of it."""
THEMES = ("light", "dark")


@dataclass(frozen=True)
class Picture:
    """A part of a page.

    Attributes:
        fragment: of the address: what is pinned.
        parts: the elements that are shown, from the top of the first to the end of the last; the others are hidden.
        most: pixels of its height at most.
        scripts: whether the page runs its script.
    """

    report: Callable[[], Report]
    fragment: str = ""
    parts: tuple[str, ...] = ("header", "#summary", ".hint", ".panes")
    most: int = 900
    scripts: bool = True


def _example(file: str, name: str) -> tc.Op:
    return next(op for op in tc.define((ROOT / "examples" / file).read_text()) if op.function.name == name)


def _explain_softmax() -> Report:
    return _example("softmax.tc", "softmax").explain(torch.rand(512, 1024), target=AVX512)


def _explain_attention() -> Report:
    x = torch.rand(4, 8, 1024, 64)
    op = _example("attention.tc", "attention")
    return op.explain(x, x, x, options=tc.CpuOptions(fusion="min"), target=AVX512)


def _explain_conv2d() -> Report:
    op = _example("convolution.tc", "conv2d")
    return op.explain(torch.rand(4, 64, 58, 58), torch.rand(64, 64, 3, 3), torch.rand(64), measure=True)


def _explain_matmul() -> Report:
    x = torch.rand(1024, 1024)
    return _example("matmul.tc", "matmul").explain(x, x, target="cuda:sm_80")


def _explain_gemm() -> Report:
    x = torch.zeros(256, 320).half()
    return gemm80.compile(x, x, target="cuda:sm_80").explain()


PICTURES = {
    "softmax": Picture(_explain_softmax, "#s1"),
    "attention": Picture(_explain_attention, "#s1", ("header", "#summary", "#dependences", "#why"), 1100),
    "conv2d": Picture(_explain_conv2d, "#s1", ("header", "#footprints", "#limits"), 1000),
    "cuda": Picture(_explain_matmul, "#s0", ("header", ".panes", "section:has(.banks)"), 1700),
    "tiles": Picture(_explain_gemm, "", ("section:has(.banks)",), 900),
    "no_script": Picture(_explain_softmax, "", scripts=False),
}


def take_picture(name: str, picture: Picture, theme: str, page: Path) -> Path:
    """Write `docs/explain_NAME.png`, with the theme in its name if it is dark."""
    target = ROOT / "docs" / f"explain_{name}{'' if theme == 'light' else f'_{theme}'}.png"
    wanted = ",".join(picture.parts)
    with Browser(WIDTH, picture.most) as browser:
        browser.set_theme(theme)
        if not picture.scripts:
            browser.stop_scripts()
        browser.open(page, picture.fragment)
        height = browser.evaluate(
            f"(()=>{{for(const e of document.querySelectorAll('header,main>*'))if(!e.matches('{wanted}'))e.remove();"
            "scrollTo(0,0);return Math.ceil(document.querySelector('main').getBoundingClientRect().bottom)})()"
        )
        browser.save_picture(target, width=WIDTH, height=min(height, picture.most))
    Image.open(target).convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        target, optimize=True
    )
    return target


def main(names: list[str]) -> int:
    """Take the named pictures, or all."""
    for name, picture in PICTURES.items():
        if names and name not in names:
            continue
        with TemporaryDirectory() as folder:
            page = picture.report().save(Path(folder) / f"{name}.html")
            for theme in THEMES if picture.scripts else THEMES[:1]:
                made = take_picture(name, picture, theme, page)
                print(f"{made}: {made.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
