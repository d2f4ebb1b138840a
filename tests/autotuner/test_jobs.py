"""Job files, shards, reports and whole searches that really compile and run, small ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.autotuner import jobs as jobs
from tensor_comprehensions.autotuner.device import available_cpus
from tensor_comprehensions.autotuner.jobs import parse_shard, read_job, shard_tasks
from tensor_comprehensions.autotuner.journal import _parse_records
from tensor_comprehensions.autotuner.op_api import store_of
from tensor_comprehensions.autotuner.progress import LineProgress, TableProgress
from tensor_comprehensions.cache import measurement_store, remote_measurements
from tensor_comprehensions.cache.store import Store
from tensor_comprehensions.cli import main
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.errors import ArgumentError, CacheError

from .pretend import Pretend
from .test_workers import gone

JOB = """
budget = "100s"
generations = 1
population = 6
seed = 5

[[tune]]
source = "def tmm(float(M,K) A, float(N,K) B) -> (C) { C(m,n) +=! A(m,k) * B(n,k) }"
sizes = [{M = 32, N = 48, K = 64}, "M=16,N=16,K=16"]
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def pretend_evaluators(monkeypatch: pytest.MonkeyPatch) -> list[Pretend]:
    """Have jobs run nothing; the evaluators that they make."""
    made: list[Pretend] = []

    def local(devices: object) -> Pretend:
        made.append(Pretend())
        return made[-1]

    monkeypatch.setattr(jobs, "LocalWorkers", local)
    return made


# --- operators ---------------------------------------------------------------------------------------------------


def held() -> tuple[int, int, int]:
    """How many files are open, how many threads there are, and how many child processes."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(children)


def test_an_operator_is_tuned_and_remembers_it(tmp_path: Path) -> None:
    source = "def tmm(float(M,K) A, float(N,K) B) -> (C) { C(m,n) +=! A(m,k) * B(n,k) }"
    op = tc.define(source).tmm
    a, b = torch.randint(-4, 5, (33, 64)).float(), torch.randint(-4, 5, (48, 64)).float()
    before = held()
    with knobs.override_knobs(cache="readwrite", cache_dir=str(tmp_path)):
        best = op.autotune(a, b, generations=1, population=6, report=tmp_path / "page.html").options
        assert held() == before
        assert op.compile(a, b).compiled.options.fusion == best.fusion
        assert torch.equal(op(a, b), a @ b.T)
        again = tc.define(source, options="tuned").tmm
        settled = again.compile(a, b).compiled.options
        assert best.schedule is None or settled.schedule == best.schedule
        assert torch.equal(again(a, b), a @ b.T)
        assert torch.equal(again(a[:30], b), a[:30] @ b.T)
    facts = json.loads((tmp_path / "page.json").read_text())
    assert facts[0]["options"] == repr(best)
    assert facts[0]["statuses"]["ok"] >= 2
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2
    assert "in the race, where untuned ones took" in page
    assert "scaled so that the default options take as long as in the final race" in page
    assert facts[0]["seconds_in_search"] in [c["seconds"] for c in facts[0]["candidates"]]
    assert "tmm" in page


def test_nothing_is_tuned_implicitly_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensor_comprehensions.autotuner import op_api

    calls = []

    def tune(subject: object, *_: object) -> object:
        calls.append(subject)

        class Found:
            options = tc.CpuOptions(interleave=2)

        return Found()

    monkeypatch.setattr(op_api, "tune", tune)
    op = tc.define("def f(float(N) x) -> (y) { y(i) = x(i) + 1 }", options="tuned").f
    with knobs.override_knobs(cache="readwrite", cache_dir=str(tmp_path)):
        op(torch.ones(5))
        assert not calls
        with knobs.override_knobs(tune="auto"):
            op(torch.ones(6))
            op(torch.ones(6))
            assert op.compile(torch.ones(6)).compiled.options.interleave == 2
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget": "soon"}, "the budget is 'soon'"),
        ({"generations": 0}, "generations is 0"),
        ({"population": 2.5}, "population is 2.5"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"search": "luck"}, "no search 'luck'"),
        ({"search": []}, r"no search \[\]"),
        ({"devices": 3}, "the devices are 3"),
        ({"devices": ["cpu:0-99999999999999"]}, "no processor"),
        ({"devices": ["gpu"]}, "the device is 'gpu'"),
        ({"devices": [f"cpu:{min(available_cpus())}"] * 2}, "share no processor"),
        ({"devices": ["cpu:9999"]}, "no processor 9999"),
        ({"executor": 3}, "the executor is a int"),
        ({"store": 3}, "the store is 3"),
        ({"report": 3}, "the report is 3"),
        ({"options": 3}, "options is an int"),
    ],
)
def test_what_means_nothing_is_refused_before_anything_starts(wrong: dict[str, object], message: str) -> None:
    op = tc.define("def f(float(N) x) -> (y) { y(i) = x(i) }").f
    with pytest.raises(ArgumentError, match=message):
        op.autotune(torch.ones(4), **wrong)


# --- job files ---------------------------------------------------------------------------------------------------


def test_a_job_is_worked_off_and_goes_on_from_its_journal(
    job: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluators = pretend_evaluators(monkeypatch)
    arguments = ["tune", str(job), "--store", str(tmp_path / "store")]
    assert main.main(arguments) == 0
    first = json.loads(job.with_suffix(".json").read_text())
    assert [f["name"] for f in first] == ["tmm(M=32,N=48,K=64)", "tmm(M=16,N=16,K=16)"]
    lines = capsys.readouterr().err
    for part in ("[1/2] tmm(M=32,N=48,K=64): begins", "[2/2]", "times as fast as untuned"):
        assert part in lines
    assert len(measurement_store.all_measurements(Store(tmp_path / "store"))) == 2
    assert main.main(arguments) == 0
    assert evaluators[0].asked
    assert not evaluators[1].asked
    again = json.loads(job.with_suffix(".json").read_text())
    assert [f["options"] for f in again] == [f["options"] for f in first]
    assert [[c["seconds"] for c in f["candidates"]] for f in again] == [
        [c["seconds"] for c in f["candidates"]] for f in first
    ]


def test_cases_47_and_48_a_job_that_is_killed_leaves_no_process_and_goes_on(job: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tensor_comprehensions.cli.main",
        "tune",
        str(job),
        "--store",
        str(tmp_path / "store"),
    ]
    environment = {**os.environ, "TC_VERIFY": "0"}
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    journal = job.with_suffix(".journal")
    while not journal.exists() or journal.stat().st_size < 1000:
        assert running.poll() is None
        time.sleep(0.05)
    children = _descendants(running.pid)
    assert children
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert all(map(gone, children))
    before = journal.read_bytes()
    assert main.main(command[3:]) == 0
    ends = [end for end, _, _ in _parse_records(before)]
    assert ends
    assert journal.read_bytes().startswith(before[: ends[-1]])


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(entry.name), *_descendants(int(entry.name))]
    return found


MISTAKES = {
    "toml": ("tune = [", "cannot be understood"),
    "unknown setting": ("bugdet = 3\n[[tune]]\nsource = ''", "no setting 'bugdet'"),
    "nothing": ("budget = 3", "has nothing to tune"),
    "both": ("[[tune]]\nsource = ''\nfile = 'x'", "either file or source"),
    "no file": ("[[tune]]\nfile = 'absent.tc'", r"cannot read the defs: .*absent\.tc"),
    "no def": ("[[tune]]\nsource = 'def f(float(N) x) -> (y) { y(i) = x(i) }'\ndef = 'g'", "no def 'g'"),
    "huge size": (
        f"[[tune]]\nsource = 'def f(float(N) x) -> (y) {{ y(i) = x(i) }}'\nsizes = 'N={'2' * 400}'",
        "the size N is 2222",
    ),
    "sizes": ("[[tune]]\nsource = 'def f(float(N) x) -> (y) { y(i) = x(i) }'\nsizes = [3]", "sizes are 3"),
    "devices": ("devices = 'cpu'\n[[tune]]\nsource = 'def f(float(N) x) -> (y) { y(i) = x(i) }'", "devices is 'cpu'"),
    "table": ("tune = [3]", "is not a table"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_job_files(tmp_path: Path, name: str) -> None:
    text, message = MISTAKES[name]
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        read_job(path)


def test_json_job_files(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    (tmp_path / "f.tc").write_text("def f(float(N) x) -> (y) { y(i) = x(i) }\ndef g(float(N) x) -> (y) { y(i) = x(i) }")
    path.write_text(json.dumps({"tune": [{"file": "f.tc", "sizes": "N=3"}]}))
    assert [t.name for t in read_job(path).tasks] == ["f(N=3)", "g(N=3)"]
    path.write_text("[]")
    with pytest.raises(ArgumentError, match="not a table"):
        read_job(path)


# --- shards ------------------------------------------------------------------------------------------------------


def test_every_task_is_in_one_shard_or_in_several_with_other_seeds(job: Path) -> None:
    tasks = read_job(job).tasks
    assert [t.name for n in range(2) for t in shard_tasks(tasks, (n, 2))] == [t.name for t in tasks]
    islands = [shard_tasks(tasks, (n, 5))[0] for n in range(5)]
    assert [t.name for t in islands] == [tasks[n % 2].name for n in range(5)]
    assert len({(t.name, t.effort.seed) for t in islands}) == 5
    assert [t.effort.part for t in islands] == [(0, 3), (0, 2), (1, 3), (1, 2), (2, 3)]


def test_shards_of_one_search_have_smaller_generations_and_more_of_them(job: Path) -> None:
    task = read_job(job).tasks[0]
    for search, population, expected in (
        ("genetic", 24, (12, 20)), ("genetic", 10, (8, 13)), ("genetic", 6, (6, 10)), ("random", 24, (24, 10)),
        ("sweep", 24, (24, 10)),
    ):  # fmt: skip
        whole = replace(task, effort=replace(task.effort, search=search, population=population, generations=10))
        (shard,) = shard_tasks([whole], (1, 4))
        assert (shard.effort.population, shard.effort.generations) == expected
        assert shard_tasks([whole], (0, 1)) == (whole,)


@pytest.mark.parametrize("wrong", ["3", "3/3", "-1/2", "a/b", "1/0", ""])
def test_shards_that_there_are_not(wrong: str) -> None:
    with pytest.raises(ArgumentError, match="shard"):
        parse_shard(wrong)


def test_an_impossible_store_is_reported_before_a_search(job: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ArgumentError, match="cannot be used: it is not a folder"):
        store_of(tmp_path / "file")
    assert main.main(["tune", str(job), "--store", "/proc/none"]) == 2


def test_shards_meet_in_a_store_by_url(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_evaluators(monkeypatch)
    url = f"file://{tmp_path}/bucket"
    for n in range(2):
        assert main.main(["tune", str(job), "--shard", f"{n}/2", "--store", url]) == 0
    assert len(list((tmp_path / "bucket").iterdir())) == 2
    assert main.main(["cache", "--dir", str(tmp_path / "merged"), "merge", url]) == 0
    merged = measurement_store.all_measurements(Store(tmp_path / "merged"))
    assert len(merged) == 2
    assert all(m.validated for measurements in merged.values() for m in measurements)
    assert "new measurements" in capsys.readouterr().out
    assert main.main(["cache", "--dir", str(tmp_path / "merged"), "merge", url]) == 0
    assert "0 new measurements" in capsys.readouterr().out


def test_case_55_a_store_that_is_away_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "store")
    kept = remote_measurements.upload_measurements(store, "nowhere://bucket/results")
    assert (tmp_path / kept).exists()
    with pytest.raises(CacheError, match="nowhere"):
        remote_measurements.download_measurements("nowhere://bucket/results")
    with pytest.raises(CacheError, match="no answer in 0 s"):
        remote_measurements.with_timeout(lambda: time.sleep(5), "slow://bucket", patience=0.05)
    (tmp_path / "html").mkdir()
    (tmp_path / "html" / "page.tct").write_text("<html>404</html>")
    assert remote_measurements.download_measurements(f"file://{tmp_path}/html") == {}


# --- progress ----------------------------------------------------------------------------------------------------


def test_a_terminal_gets_a_table(job: Path) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(force_terminal=True, width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    task = read_job(job).tasks[0]
    with console, Live(console=console, auto_refresh=False) as live:
        table = TableProgress(live)
        table.begin(0, 2, task)
        table.end(task, None, "it failed\nbadly")
        table.begin(1, 2, task)
    text = console.export_text()
    console.file.close()
    assert "tmm(M=32,N=48,K=64): failed: it failed" in text
    assert "generation" in text
    assert "2/2 tmm" in text


def test_plain_lines_elsewhere(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = read_job(job).tasks[0]
    lines = LineProgress(sys.stdout)
    lines.begin(0, 1, task)
    lines.end(task, None, "no way\nat all")
    assert capsys.readouterr().out.splitlines()[1] == "[1/1] tmm(M=32,N=48,K=64): failed: no way"
