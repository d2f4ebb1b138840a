"""The page on the architecture lists the packages in the order in which they may import one another."""

from __future__ import annotations

import re
from pathlib import Path

from tests.core.test_layers import LEVEL

PAGE = (Path(__file__).parents[2] / "docs" / "developers" / "architecture.md").read_text()
TABLE = PAGE.partition("## Packages")[2].partition("\n## ")[0]


def test_packages_are_listed_from_the_bottom_up() -> None:
    rows = [
        re.findall(r"`([a-z_]+)[/.`]", line.split(" | ")[0]) for line in TABLE.splitlines() if line.startswith("| `")
    ]
    assert {package for row in rows for package in row} == set(LEVEL)
    levels = [LEVEL[package] for row in rows for package in row]
    assert levels == sorted(levels)
