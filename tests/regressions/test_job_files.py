"""Job files, journals and texts that hung the tuner or broke it with an exception of another kind."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from io import FileIO
from pathlib import Path

import pytest

import tensor_comprehensions as tc
from tensor_comprehensions.autotuner import journal as journals
from tensor_comprehensions.autotuner import tuner_pb2 as pb
from tensor_comprehensions.autotuner.device import parse_device
from tensor_comprehensions.autotuner.jobs import parse_shard, read_job
from tensor_comprehensions.autotuner.journal import Journal
from tensor_comprehensions.autotuner.op_api import parse_budget, store_of
from tensor_comprehensions.autotuner.report import write_report
from tensor_comprehensions.autotuner.session import parse_seconds
from tensor_comprehensions.cache.options_proto import to_message
from tensor_comprehensions.cli import main
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.core.knobs import parse_bytes
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.structured.language.primitives import parse_schedule
from tensor_comprehensions.tc_lang import compile_source

DEF = "def f(float(N) x, int k) -> (y) { y(i) = x(i) + k }"
TASK = f"[[tune]]\nsource = '{DEF}'\n"
JOBS = {
    "budget of many digits": (f'budget = "{"1" * 40}!"\n' + TASK, "the budget is '1111"),
    "no budget": (TASK + "budget = 0", r"tune\[0\]: the budget is 0"),
    "false budget": (TASK + "budget = false", r"tune\[0\]: the budget is False"),
    "no sizes": (TASK + "sizes = []", "sizes is an empty list"),
    "size of text": (TASK + "sizes = {N = 'x'}", "the size N is 'x'"),
    "size of truth": (TASK + "sizes = {N = true}", "the size N is True"),
    "size of nothing": (TASK + "sizes = {N = nan}", "the size N is nan"),
    "store": ("store = 5\n" + TASK, "store is 5"),
    "def": (TASK + "def = 5", "def is 5"),
    "source": ("[[tune]]\nsource = 5", "source is 5"),
    "source without def": ("[[tune]]\nsource = ''", "there is no def"),
    "NUL": ('[[tune]]\nfile = "a\\u0000b"', "cannot read the defs: .*null byte"),
    "endless file": ("[[tune]]\nfile = '/dev/zero'", "not a regular file"),
    "folder": ("[[tune]]\nfile = '.'", "cannot read the defs"),
    "large number": (f"seed = 0x{'f' * 9000}\n" + TASK, "a number of 36000 bits"),
    "population": ("population = 1_000_000_000\n" + TASK, "population is 1000000000"),
    "lists": ("x = " + "[" * 100_000, "nests too deep"),
    "tables": ("x = " + "{a=" * 100_000, "nests too deep"),
    "key": (".".join("a" * 100_000) + " = 1", "more than 16 parts"),
    "quoted key": (".".join(["'a'"] * 100_000) + " = 1", "more than 16 parts"),
    "nesting that can be read": ("x = " + "[" * 40 + "]" * 40, "nests too deep"),
}


@pytest.mark.parametrize("name", JOBS)
def test_job_files(tmp_path: Path, name: str) -> None:
    text, message = JOBS[name]
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=message) as caught:
        read_job(path)
    assert len(str(caught.value)) < 10_000


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"tune": "\\ud800"}', "9" * 5000, '{"seed": 1e999']
)
def test_json_job_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(ArgumentError):
        read_job(path)


def test_a_report_does_not_replace_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensor_comprehensions.autotuner import jobs as jobs

    from ..autotuner.pretend import Pretend

    monkeypatch.setattr(jobs, "LocalWorkers", lambda devices: Pretend())
    path = tmp_path / "job.json"
    task = {"source": "def f(float(N) x) -> (y) { y(i) = x(i) }", "sizes": {"N": 8}}
    text = json.dumps({"generations": 1, "population": 4, "tune": [task]})
    path.write_text(text)
    assert main.main(["tune", str(path), "--store", str(tmp_path / "store")]) == 0
    assert path.read_text() == text
    assert json.loads((tmp_path / "job.report.json").read_text())[0]["name"] == "f(N=8)"
    with pytest.raises(ArgumentError, match="report"):
        write_report(Path(), [])


# --- texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["1" * 40 + "!", "1" * 100_000 + "!", "1 " * 50_000 + "!", "1s" * 50_000 + "!", "²s", ""]
)
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentError, match="the budget is"):
        parse_seconds(text)


def test_budgets() -> None:
    assert parse_seconds("1h 30min") == 5400
    assert parse_seconds("1.5m10s") == 100
    assert parse_seconds("9" * 400) == float("inf")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: parse_shard("²/3"),
        lambda: parse_shard("1/" + "9" * 5000),
        lambda: parse_device("cpu:" + "9" * 5000),
        lambda: parse_device("cpu:0-" + "9" * 5000),
        lambda: parse_device("cpu:٣"),
        lambda: parse_bytes("TC_CACHE_MAX_SIZE", "9" * 5000),
        lambda: parse_budget(1, 1, 4, 1 << 100_000, "genetic"),
        lambda: parse_schedule("(" * 5000 + "tile(m=8)" + ")" * 5000),
        lambda: parse_schedule("tile(m=8) >> " * 4000 + "tile(m=8)"),
        lambda: parse_schedule("tile(m=" + "-" * 50_000 + "8)"),
        lambda: parse_schedule("tile(m=8)\0"),
        lambda: store_of("~nobody-of-this-name/store"),
        lambda: store_of("a\0b"),
        lambda: store_of(""),
    ],
)
def test_texts_that_mean_nothing(wrong: object) -> None:
    with pytest.raises(ArgumentError):
        wrong()  # type: ignore[operator]


@pytest.mark.parametrize(
    "end",
    [
        "(" + "#" * 5000,
        "(a,b" + "#," * 5000,
        " in" * 5000 + "]",
        " in a" * 5000 + "]",
        "def f(" * 5000 + "[",
    ],
)
def test_texts_are_refused_in_linear_time(end: str) -> None:
    with pytest.raises(tc.ParseError):
        compile_source("def f(float(N) x) -> (y) { y(i) = x(i) " + end)


def test_remarks_are_found_in_linear_time() -> None:
    gap = " " * 100_000
    assert tc.define(f"def f(float(N) x) -> (y) {{ y(i) = x(i) + 1{gap} }}").f is not None


def test_a_sample_needs_whole_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.tc"
    path.write_text("def f(float(N) x, int k) -> (y) { y(i) max=! x(i+j) where j in 0:k }")
    assert main.main(["run", str(path), "--sizes", "N=4,k=nan"]) == 2
    assert "k is nan" in capsys.readouterr().err


# --- journals ----------------------------------------------------------------------------------------------------

OUTCOME = pb.Outcome(options=to_message(CpuOptions()), status=pb.OK)


def test_two_searches_do_not_write_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    book = Journal(path)
    book.add("problem", OUTCOME)
    program = f"""
from pathlib import Path
from tensor_comprehensions.autotuner.journal import Journal
from tensor_comprehensions.core.errors import ArgumentError
try:
    Journal(Path({str(path)!r}))
except ArgumentError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "another search writes the journal" in said
    assert "--journal" in said
    book.add("another", OUTCOME)
    book.close()
    again = Journal(path)
    assert len(again) == 2
    again.close()


def test_a_full_disk_ends_the_journal_and_not_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    book = Journal(path)
    book.add("problem", OUTCOME)
    whole = path.read_bytes()
    written = []

    def write(file: FileIO, data: bytes) -> None:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(file.write(data[: len(data) // 2]))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journals, "_write_whole", write)
    logging.getLogger("tensor_comprehensions").propagate = True
    with caplog.at_level(logging.WARNING, "tensor_comprehensions.tune"):
        book.add("another", OUTCOME)
        book.add("a third", OUTCOME)
    assert written
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1
    assert len(book) == 3
    book.close()
    assert path.read_bytes() == whole


def test_journals_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/full"), tmp_path / "a\0b"):
        with pytest.raises(ArgumentError, match="cannot be written"):
            Journal(path)


def test_a_journal_with_times_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    book = Journal(path)
    for low in (0.0, -1.0, float("nan"), float("inf")):
        timing = pb.Timing(low=low, median=1.0, high=1.0, runs=3)
        book.add("problem", pb.Outcome(options=to_message(CpuOptions()), status=pb.OK, timing=timing))
        book.add("problem", pb.Decision(finalists=[to_message(CpuOptions())], timings=[timing]))
    book.close()
    again = Journal(path)
    assert len(again) == 0
    assert again.decision("problem") is None
    again.close()
