from __future__ import annotations

import logging
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tensor_comprehensions.core import diagnostics, knobs
from tensor_comprehensions.core.diagnostics import Dump, ScheduleView, tree_to_svg
from tensor_comprehensions.core.errors import ArgumentError

TREE = "domain: S0[i, j]\n  band i, j: parallel\n    sequence\n      S0\n      S1 <a & b>\n"


def rows(picture: str) -> list[tuple[str | None, str | None]]:
    """The texts of an SVG picture with their x."""
    tree = ElementTree.fromstring(picture)
    return [(t.get("x"), t.text) for t in tree.iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_has_a_box_for_each_line_placed_by_depth() -> None:
    placed = rows(tree_to_svg(TREE))
    assert [text for _, text in placed] == [line.strip() for line in TREE.splitlines()]
    x = [int(x or 0) for x, _ in placed]
    assert x[0] < x[1] < x[2] < x[3] == x[4]


def test_the_picture_joins_each_line_to_its_parent() -> None:
    assert tree_to_svg(TREE).count("<path") == 4


def test_the_empty_tree_is_still_a_picture() -> None:
    assert rows(tree_to_svg("")) == []


def test_a_picture_reads_as_text_and_saves_as_svg(tmp_path: Path) -> None:
    picture = ScheduleView(TREE)
    assert str(picture) == repr(picture) == TREE
    picture.save(tmp_path / "tree.svg")
    assert (tmp_path / "tree.svg").read_text() == picture._repr_svg_()


def test_dump_writes_numbered_files(tmp_path: Path) -> None:
    with knobs.override_knobs(dump=str(tmp_path / "stages")):
        dump = Dump.of("mm_1")
    assert dump is not None
    dump.write(3, "simplify", "text")
    assert (tmp_path / "stages" / "mm_1" / "03_simplify.txt").read_text() == "text"


def test_no_folder_no_dump() -> None:
    with knobs.override_knobs(dump=""):
        assert Dump.of("mm_1") is None


def test_a_folder_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="TC_DUMP"):
        Dump(tmp_path / "file" / "kernel").write(0, "text", "")


def test_logging_goes_to_stderr_for_the_topics_asked(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger(diagnostics.ROOT)
    handlers, propagate = list(root.handlers), root.propagate
    try:
        diagnostics.start_logging(("cache",))
        diagnostics.get_logger("cache").debug("a miss")
        diagnostics.get_logger("code").debug("not asked for")
        assert capsys.readouterr().err == "[tensor_comprehensions.cache] a miss\n"
    finally:
        root.handlers, root.propagate = handlers, propagate
        diagnostics.get_logger("cache").setLevel(logging.NOTSET)
