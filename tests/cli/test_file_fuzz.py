"""Commands on files that are damaged, are no files, or change while they are read.

They say so and end with an exit code; what is sound stays, and is all that is used. A failure prints its seed;
`python -m tools.fuzz command-files --examples 5000` runs many more.
"""

from __future__ import annotations

import io
import os
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Event, Thread

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensor_comprehensions as tc
from tensor_comprehensions.cache import measurement_store
from tensor_comprehensions.cache.key import Key
from tensor_comprehensions.cache.measurement_store import Measurement
from tensor_comprehensions.cache.store import Store
from tensor_comprehensions.cli import main
from tensor_comprehensions.core import knobs
from tensor_comprehensions.options import CpuOptions

from ..helpers.mutations import damage_bytes, no_hang

SEEDS = st.integers(0, 2**64 - 1)
MANY = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
DEFS = "def scale(float(N) x) -> (y) { y(i) = 2 * x(i) }\n"
KEYS = [Key((("kind", "tuning"), ("def", f"def f{n}(...)"), ("shapes", "(3)"), ("threads", "2"))) for n in range(4)]
MEASURED = tuple(Measurement(CpuOptions(interleave=v), 1e-5 * (v + 1), True, time=0) for v in (1, 2))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a kernel and measurements, an export of it, and a file of defs."""
    folder = tmp_path_factory.mktemp("sound")
    with knobs.override_knobs(cache="readwrite", cache_dir=str(folder / "cache"), verify=False):
        tc.define(DEFS).scale(torch.ones(3))
    for key in KEYS:
        measurement_store.record_measurements(Store(folder / "cache"), key, MEASURED)
    assert command("cache", "--dir", folder / "cache", "export", folder / "all.tct") == 0
    (folder / "defs.tc").write_text(DEFS)
    return folder


def command(*words: object) -> int:
    """The exit code. Whatever a command prints must be printable."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main.main(list(map(str, words)))
    (out.getvalue() + err.getvalue()).encode()
    assert code in (0, 1, 2)
    assert code != 2 or err.getvalue()
    return code


def spoil(r: Random, path: Path, others: list[Path]) -> None:
    """Damage a file, or put something else in its place."""
    data = path.read_bytes()
    kinds = ("bytes", "bytes", "bytes", "splice", "folder", "loop", "device", "absent", "mode", "pipe")
    kind = r.choice(kinds if path.suffix != ".tc" or "cache" in path.parts else kinds[:-1])  # defs may come by a pipe
    if kind == "mode":
        path.chmod(0)
        return
    path.unlink()
    match kind:
        case "bytes":
            path.write_bytes(damage_bytes(r, data))
        case "splice":  # of another entry, or its half
            other = r.choice([o for o in others if o.is_file()] or [Path("/dev/null")]).read_bytes()
            path.write_bytes(r.choice((other, data[: len(data) // 2] + other[len(other) // 2 :], data + other)))
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(path)


@MANY
@given(SEEDS)
@no_hang()
def test_commands_on_spoiled_files(sound: Path, seed: int) -> None:
    r = Random(seed)
    with TemporaryDirectory(prefix="tc-fuzz-") as name:
        folder = Path(name, "x")
        shutil.copytree(sound, folder)
        cache, exported = folder / "cache", folder / "all.tct"
        files = sorted(cache.rglob("*.tc"))
        spoiled = {path for path in (*files, exported, folder / "defs.tc") if r.random() < 0.4}
        for path in sorted(spoiled):
            spoil(r, path, [f for f in files if f not in spoiled])
        on_cache = ("cache", "--dir", cache)
        commands = [
            (*on_cache, "ls"), (*on_cache, "show", r.choice(("", "0", KEYS[0].digest))), (*on_cache, "verify"),
            (*on_cache, "verify", "--remove"), (*on_cache, "export", folder / "new.tct"), (*on_cache, "gc"),
            ("cache", "--dir", folder / "other", "import", exported),
            ("cache", "--dir", folder / "other", "merge", r.choice((cache, exported, folder))),
            (*on_cache, "import", "--code", r.choice((exported, folder))),
            ("show", folder / "defs.tc", "--sizes", "N=3", "--emit", "ranges"),
        ]  # fmt: skip
        with knobs.override_knobs(cache="readwrite", cache_dir=str(cache), verify=False):
            for words in r.sample(commands, 5):
                command(*words)
            assert torch.equal(tc.define(DEFS).scale(torch.ones(3)), torch.full((3,), 2.0))
        for store in (Store(cache), Store(folder / "other")):
            for key in KEYS:
                found = measurement_store.recall_measurements(store, key)
                assert found in ((), MEASURED[:1], MEASURED[1:], MEASURED)
                entries = [f for f in files if key.digest in f.parts and store.root == cache]
                assert not entries or spoiled.intersection(entries) or found == MEASURED


def test_files_without_an_end_are_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "MAX_PAYLOAD_BYTES", 1 << 16)
    for name in ("defs.tc", "secret"):
        (tmp_path / name).symlink_to("/dev/zero")
    assert command("show", tmp_path / "defs.tc") == 2
    with knobs.override_knobs(cache_signing_key=str(tmp_path / "secret")):
        command("cache", "--dir", tmp_path, "ls")


@no_hang()
def test_an_entry_that_another_process_writes_meanwhile(sound: Path, tmp_path: Path) -> None:
    """In place and byte by byte, as no correct program writes: readers see the former bytes, or none."""
    shutil.copytree(sound / "cache", tmp_path / "cache")
    store = Store(tmp_path / "cache")
    (path,) = (p for p in store.root.rglob("*.tc") if KEYS[0].digest in p.parts)
    data, done = path.read_bytes(), Event()

    def write() -> None:
        r = Random(0)
        while not done.is_set():
            with path.open("r+b") as file:
                file.truncate(r.randrange(len(data)))
                file.write(damage_bytes(r, data))
                file.seek(0)
                file.write(data)
                file.truncate()

    writer = Thread(target=write)
    writer.start()
    try:
        found = [measurement_store.recall_measurements(store, KEYS[0]) for _ in range(300)]
    finally:
        done.set()
        writer.join()
    assert set(found) <= {(), MEASURED}
    for key in KEYS[1:]:
        assert measurement_store.recall_measurements(store, key) == MEASURED
