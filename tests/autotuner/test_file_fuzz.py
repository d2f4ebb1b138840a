"""Whatever a file holds, its reader says so in a TCError, or takes what is sound; nothing else escapes, nothing hangs.

A failure prints its seed; `python -m tools.fuzz files --examples 10000` runs many more.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensor_comprehensions as tc
from tensor_comprehensions.autotuner import tuner_pb2 as pb
from tensor_comprehensions.autotuner.device import parse_devices
from tensor_comprehensions.autotuner.evaluators import future_reply
from tensor_comprehensions.autotuner.jobs import parse_shard, read_job, shard_tasks
from tensor_comprehensions.autotuner.journal import Journal
from tensor_comprehensions.autotuner.outcomes import outcome_from_message
from tensor_comprehensions.autotuner.recorded_options import nearest_sizes
from tensor_comprehensions.autotuner.session import load_or_start, parse_seconds
from tensor_comprehensions.cache import checked_defs, file_format, import_export, measurement_store, stored_kernels
from tensor_comprehensions.cache.file_format import CorruptEntry
from tensor_comprehensions.cache.key import Key
from tensor_comprehensions.cache.measurement_store import Measurement
from tensor_comprehensions.cache.options_proto import from_message, to_message
from tensor_comprehensions.cache.store import Store
from tensor_comprehensions.cache.stored_kernels import StoredKernel
from tensor_comprehensions.cache.tc_cache_pb2 import Collection
from tensor_comprehensions.cli import main
from tensor_comprehensions.cli.cache_commands import _line, _shapes, _title
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.errors import TCError
from tensor_comprehensions.dispatch.arguments import parse_sizes
from tensor_comprehensions.options import CpuOptions, MappingOptions
from tensor_comprehensions.schedules import pack, tile, vectorize
from tensor_comprehensions.structured.language.primitives import parse_schedule
from tensor_comprehensions.tc_lang import compile_source

from ..helpers.mutations import damage_bytes, no_hang, odd_message, odd_table, text, to_json, to_toml

SEEDS = st.integers(0, 2**64 - 1)
MANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
DEFS = """def mm(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }
def pool(float(N) x, int k) -> (y) { y(i) max=! x(i+j) where j in 0:k }
"""
JOB = {
    "budget": "1h 30min", "generations": 3, "population": 6, "search": "random", "seed": 7, "devices": ["cpu"],
    "store": "results",
    "tune": [
        {"source": DEFS, "def": "mm", "sizes": [{"M": 3, "K": 4, "N": 5}, "M=1,K=2,N=3"], "budget": 90.5},
        {"file": "defs.tc", "sizes": {"N": 4}},
    ],
}  # fmt: skip
PIPELINE = tile(m=8, n=32) >> (pack(B="n1") | pack("B")) >> vectorize("n")
OPTIONS = (CpuOptions(), CpuOptions(schedule=PIPELINE, tile=(4, 8)), CpuOptions(schedule=(("C", PIPELINE),)))
KEY = Key((("kind", "tuning"), ("def", "def f0(...)"), ("shapes", "(3) (4,5)"), ("threads", "2")))
OTHER = Key((("kind", "tuning"), ("def", "def f0(...)"), ("shapes", "(7) (4,5)"), ("threads", "2")))
MEASUREMENTS = tuple(Measurement(o, 1e-3 * (n + 1), True, samples=3) for n, o in enumerate(OPTIONS))


def objection(reader: Callable[..., object], *given: object) -> str:
    """What a reader says against what it is given; "" where it takes it. Any other exception fails."""
    try:
        reader(*given)
    except TCError as error:
        return str(error)
    return ""


def place() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tc-fuzz-")


# --- job files ---------------------------------------------------------------------------------------------------


def read(folder: str, name: str, data: bytes) -> None:
    """Read a job, and what follows from it; a TCError that can be printed is fine."""
    Path(folder, "defs.tc").write_text(DEFS)
    path = Path(folder, name)
    path.write_bytes(data)
    problem = objection(use_job, path)
    assert problem.encode() is not None  # it can be printed


def use_job(path: Path) -> None:
    job = read_job(path)
    for shard in ((0, 1), (0, 3), (5, 7)):
        assert all(task.name.encode() and task.effort.seconds > 0 for task in shard_tasks(job.tasks, shard))


def test_the_job_that_is_changed_can_be_read() -> None:
    for name, written in (("job.toml", to_toml(JOB)), ("job.json", to_json(JOB))):
        with place() as folder:
            Path(folder, "defs.tc").write_text(DEFS)
            path = Path(folder, name)
            path.write_text(written)
            found = read_job(path)
            assert [t.name for t in found.tasks] == ["mm(M=3,K=4,N=5)", "mm(M=1,K=2,N=3)", "mm(N=4)", "pool(N=4)"]
            assert found.tasks[0].effort.seconds == 90.5


@MANY
@given(SEEDS)
@no_hang()
def test_jobs_with_odd_values(seed: int) -> None:
    table = odd_table(Random(seed), JOB)
    with place() as folder:
        read(folder, "job.json", to_json(table).encode("utf-8", "surrogatepass"))
        read(folder, "job.toml", to_toml(table).encode("utf-8", "surrogatepass"))


@MANY
@given(SEEDS)
@no_hang()
def test_damaged_jobs(seed: int) -> None:
    r = Random(seed)
    with place() as folder:
        read(folder, "job.json", damage_bytes(r, to_json(JOB).encode()))
        read(folder, "job.toml", damage_bytes(r, to_toml(JOB).encode()))


# --- texts -------------------------------------------------------------------------------------------------------


@MANY
@given(SEEDS)
@no_hang()
def test_damaged_files_with_defs(seed: int) -> None:
    with place() as folder:
        path = Path(folder, "defs.tc")
        path.write_bytes(damage_bytes(Random(seed), DEFS.encode()))
        objection(main._op, Namespace(file=str(path), name=None))


@MANY
@given(SEEDS)
@no_hang()
def test_damaged_texts(seed: int) -> None:
    """Of the command line, of the environment, and of options."""
    r = Random(seed)
    readers = {
        "M=3,alpha=0.5,N=7": parse_sizes, "3/64": parse_shard, "1h 30min": parse_seconds,
        "cpu:0-1,3": lambda t: parse_devices([t]),
        repr(PIPELINE): parse_schedule, "500M": lambda t: knobs.parse_bytes("TC_CACHE_MAX_SIZE", t),
        "all,tune,cache": lambda t: knobs.Knobs.read({"TC_LOGS": t, "TC_CACHE_DIR": t}),
    }  # fmt: skip
    for valid, reader in readers.items():
        changed = damage_bytes(r, valid.encode()).decode("utf-8", "surrogateescape")
        for wrong in (changed, text(r)):
            objection(reader, wrong)


# --- measurements ------------------------------------------------------------------------------------------------


def export_measurements() -> bytes:
    return measurement_store.collection_to_bytes({KEY: MEASUREMENTS, OTHER: MEASUREMENTS[:1]})


@MANY
@given(SEEDS)
@no_hang()
def test_damaged_measurements(seed: int) -> None:
    r = Random(seed)
    with place() as folder:
        path = Path(folder, "tuned.tct")
        path.write_bytes(damage_bytes(r, file_format.pack_entry(export_measurements())))
        with suppress(TCError):
            import_export.read_measurements(path)
        path.write_bytes(file_format.pack_entry(odd_message(r, Collection.FromString(export_measurements()))))
        store = Store(Path(folder, "store"))
        with suppress(TCError):
            import_export.add_measurements(store, import_export.read_measurements(path))
        for key, found in measurement_store.all_measurements(store).items():
            assert f"{_shapes(key)} {_title(key)}".encode()
            assert all(map(_line, found))
            measurement_store.best_measurement(store, key)
            nearest_sizes(store, key, "")
            measurement_store.compact_measurements(store, key)
        nearest_sizes(store, KEY, "")
        assert import_export.write_measurements(store, path) == len(import_export.read_measurements(path))


@MANY
@given(SEEDS)
@no_hang()
def test_odd_records_of_options(seed: int) -> None:
    r = Random(seed)
    message = to_message(r.choice((*OPTIONS, MappingOptions())))
    with suppress(TCError, TypeError, ValueError, DecodeError):  # those who read records pass over these
        changed = type(message).FromString(odd_message(r, message))
        made = from_message(changed)
        assert from_message(to_message(made)) == made


# --- the cache ---------------------------------------------------------------------------------------------------


@MANY
@given(SEEDS)
@no_hang()
def test_damaged_entries(seed: int) -> None:
    r = Random(seed)
    with suppress(CorruptEntry):
        assert file_format.unpack_entry(damage_bytes(r, file_format.pack_entry(b"payload"))) == b"payload"
    with place() as folder:
        store = Store(Path(folder, "store"))
        measurement_store.record_measurements(store, KEY, MEASUREMENTS)
        (path,) = Path(folder, "store").rglob("*.tc")
        path.write_bytes(damage_bytes(r, path.read_bytes()))
        assert measurement_store.recall_measurements(store, KEY) in ((), MEASUREMENTS)


@MANY
@given(SEEDS)
@no_hang()
def test_odd_programs_and_code(seed: int) -> None:
    """What a digest does not protect, for whoever can write it can make the digest."""
    r = Random(seed)
    data = checked_defs.defs_to_bytes(compile_source(DEFS))
    assert checked_defs.defs_from_bytes(data) == compile_source(DEFS)
    checked_defs.defs_from_bytes(damage_bytes(r, data))
    checked_defs.defs_from_bytes(to_json(odd_table(r, json.loads(data))).encode("utf-8", "surrogatepass"))
    head = json.dumps({"key": KEY.parts, "facts": {"a": 1}}).encode()
    payload = struct.pack("<I", len(head)) + head + b"code"
    assert stored_kernels.kernel_from_bytes(payload) == StoredKernel(KEY, {"a": 1}, b"code")
    stored_kernels.kernel_from_bytes(damage_bytes(r, payload))
    odd = to_json(odd_table(r, {"key": [list(p) for p in KEY.parts], "facts": {"a": 1}})).encode()
    found = stored_kernels.kernel_from_bytes(struct.pack("<I", len(odd)) + odd)
    assert found is None or found.key.parts is not None


@settings(MANY, max_examples=25)
@given(SEEDS)
@no_hang()
def test_a_call_with_damaged_entries(seed: int) -> None:
    """Each file of a cache is damaged once; calls compile again and are right."""
    r = Random(seed)
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with place() as folder, knobs.override_knobs(cache="readwrite", cache_dir=folder, verify=False):
        tc.define(DEFS).mm(a, b)
        for path in sorted(Path(folder).rglob("*.tc")):
            if r.random() < 0.7:
                path.write_bytes(damage_bytes(r, path.read_bytes()))
        assert torch.equal(tc.define(DEFS).mm(a, b), a @ b)


# --- the tuner ---------------------------------------------------------------------------------------------------

TIMING = pb.Timing(median=1e-3, low=9e-4, high=2e-3, runs=5)
OUTCOME = pb.Outcome(options=to_message(OPTIONS[1]), status=pb.OK, timing=TIMING, digest="d", generation=1, elapsed=2.0)
DECISION = pb.Decision(finalists=[to_message(OPTIONS[0])], timings=[TIMING], elapsed=3.0)
START = pb.Start(known=[to_message(o) for o in OPTIONS])


def record(kind: bytes, message: bytes, problem: bytes = b"problem") -> bytes:
    payload = kind + bytes([len(problem)]) + problem + message
    return struct.pack("<II", len(payload), zlib.crc32(payload)) + payload


@MANY
@given(SEEDS)
@no_hang()
def test_damaged_journals(seed: int) -> None:
    r = Random(seed)
    records = [record(b"o", odd_message(r, OUTCOME)), record(b"d", odd_message(r, DECISION))]
    records += [record(b"s", odd_message(r, START)), record(b"o", OUTCOME.SerializeToString())]
    data = b"tcjournal1\n" + b"".join(r.sample(records, 4))
    with place() as folder:
        for n, content in enumerate((data, damage_bytes(r, data), data + record(r.randbytes(1), b"", r.randbytes(3)))):
            path = Path(folder, str(n))
            path.write_bytes(content)
            with suppress(TCError):
                use(Journal(path))


def use(book: Journal) -> None:
    """Read what a search reads."""
    for known in list(book._known.values()):
        found = outcome_from_message(known, OPTIONS[0])
        assert found.kind
        assert found.seconds is None or found.seconds > 0
    assert all(isinstance(o, CpuOptions | MappingOptions) for o in load_or_start(book, "problem", "key", list))
    decision = book.decision("problem")
    assert decision is None or len(decision.timings) == len(decision.finalists)
    book.close()


@MANY
@given(SEEDS)
@no_hang()
def test_odd_replies(seed: int) -> None:
    r = Random(seed)
    reply = pb.Reply(version=1, status=pb.OK, timings=[TIMING, TIMING], digest="d", fingerprint="here", running=1.0)
    future: Future[bytes] = Future()
    future.set_result(odd_message(r, reply))
    assert isinstance(future_reply(future, "here"), pb.Reply)


@no_hang()
def test_every_reader_refuses_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "none", Path("a\0b"), Path("\ud800")):
        if path != tmp_path / "none":  # is made
            with pytest.raises(TCError):
                Journal(path)
        if path != tmp_path:  # a folder is a cache
            with pytest.raises(TCError):
                import_export.read_measurements(path)
        if path != tmp_path / "pipe":  # a job may come through a pipe
            with pytest.raises(TCError):
                read_job(path)
