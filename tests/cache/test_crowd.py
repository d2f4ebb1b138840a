"""Many processes, one cache."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tensor_comprehensions.cache import safe_io
from tensor_comprehensions.cache.store import Store

CROWD = Path(__file__).parent / "crowd.py"


@pytest.mark.parametrize(
    "task",
    [
        pytest.param("same_key", id="fault_17_processes_that_keep_the_same"),
        pytest.param("different_keys", id="fault_18_processes_that_keep_different_things_lose_none"),
        pytest.param("one_of_them", id="fault_19_of_different_bytes_for_one_key_one_is_there_whole"),
        pytest.param("check_eviction", id="fault_20_readers_during_eviction_miss"),
        pytest.param("check_compaction", id="measurements_survive_everybody_compacting"),
        pytest.param("check_killed_writers", id="fault_6_writers_killed_a_hundred_times"),
        pytest.param("held", id="faults_21_22_locks_of_stopped_and_killed_processes"),
    ],
)
def test_processes(task: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, CROWD, task, tmp_path / "cache"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_fault_27_processes_of_two_hosts_with_one_number_use_different_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their clocks, numbers and even random numbers may agree."""
    used: list[str] = []
    same = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: same)

    def opened(path: Path, *rest: int) -> int:
        used.append(Path(path).name)
        return os.open(path, *rest)

    for host in ("one", "two"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        safe_io.write_file(safe_io.OsFunctions(open=opened), tmp_path / "entry", b"x")
    assert len(set(used)) == 2
    assert all(str(os.getpid()) in name for name in used)


def test_a_full_file_system(tmp_path: Path) -> None:
    """Fault 7 for real: a file may not grow beyond a limit."""
    program = f"""
import resource, signal
from tensor_comprehensions.cache.store import Store
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
store = Store(Path({str(tmp_path / "cache")!r}))
assert store.write(("kernel", "f", "small"), b"x" * 1000)
assert not store.write(("kernel", "f", "large"), b"x" * 10000)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(Store(tmp_path / "cache").walk()) == [("kernel", "f", "small")]
    assert not list(tmp_path.rglob("*.tmp"))
