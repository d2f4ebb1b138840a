"""What surrounds the timing: memory that is kept while one thing is timed, and given back before the next."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from benchmarks.timing import keep_memory, release_memory
import numpy

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

print(keep_memory())
before = resident()
parts = [numpy.ones(10 << 20, numpy.uint8) for _ in range(20)]
del parts
kept = resident() - before
release_memory()
print(kept >> 20, resident() - before >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_kept_until_it_is_released() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    worked, kept, left = done.stdout.split()
    if worked == "False":
        pytest.skip("this C library has no such setting")
    assert int(kept) > 150
    assert int(left) < 50
