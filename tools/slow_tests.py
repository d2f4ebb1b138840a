"""List the tests that `make test-fast` takes one case of, or none: `python -m tools.slow_tests REPORT.xml`.

The report is that of `pytest --junitxml=REPORT.xml` over the whole suite on a quiet machine. A test is slow if its
cases take more than a fifth of a second together. The table goes to `tests/slow_tests.tsv`: name, seconds of all cases,
seconds of a case on average.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

TABLE = Path(__file__).parents[1] / "tests" / "slow_tests.tsv"
SLOW = 0.2
"""Seconds of all cases of a test."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.slow_tests", description=__doc__)
    parser.add_argument("report", type=Path, help="a report of the whole suite by `pytest --junitxml`")
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(parser.parse_args().report).iter("testcase"):
        seconds[f"{case.get('classname')}.{case.get('name', '').split('[')[0]}"].append(float(case.get("time", 0)))
    slow = {name: cases for name, cases in seconds.items() if sum(cases) > SLOW}
    rows = [f"{name}\t{sum(cases):.1f}\t{sum(cases) / len(cases):.2f}\n" for name, cases in sorted(slow.items())]
    TABLE.write_text("".join(rows))
    rest = sum(sum(cases) for name, cases in seconds.items() if name not in slow)
    print(f"{len(slow)} slow tests of {len(seconds)}; the others take {rest:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
