"""List the skipped tests of a JUnit report; fail where one is not on the allowed list.

Usage: check_skips.py REPORT.xml ALLOWED.txt
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def skipped(report: Path) -> dict[str, str]:
    """The skipped tests of `report` with the reason of each, in order."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        mark = case.find("skipped")
        if mark is not None and mark.get("type") != "pytest.xfail":
            found[f"{case.get('classname')}::{case.get('name')}"] = mark.get("message", "")
    return found


def allowed(listing: Path) -> set[str]:
    lines = (line.strip() for line in listing.read_text().splitlines())
    return {line for line in lines if line and not line.startswith("#")}


def main(report: str, listing: str) -> int:
    permitted = allowed(Path(listing))
    refused = 0
    for name, reason in skipped(Path(report)).items():
        refused += name not in permitted
        print(f"skipped{'' if name in permitted else ', not allowed'}: {name}: {reason}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
