from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_runs"/>
<testcase classname="tests.a" name="test_gpu"><skipped type="pytest.skip" message="no GPU"/></testcase>
<testcase classname="tests.a" name="test_known"><skipped type="pytest.xfail" message="a bug"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(("listing", "status"), [("# none\n", 1), ("tests.a::test_gpu\n", 0)])
def test_a_skip_fails_unless_it_is_on_the_list(tmp_path: Path, listing: str, status: int) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    (tmp_path / "allowed.txt").write_text(listing)
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "check_skips.py", tmp_path / "report.xml", tmp_path / "allowed.txt"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == status
    assert "tests.a::test_gpu: no GPU" in done.stdout
    assert "test_known" not in done.stdout
