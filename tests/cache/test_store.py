"""The store against the faults of a disk, numbered as in the list of faults that the cache is designed for."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_comprehensions.cache import eviction, file_format, store
from tensor_comprehensions.cache.file_format import HEADER, CorruptEntry
from tensor_comprehensions.cache.safe_io import SYSTEM, OsFunctions
from tensor_comprehensions.cache.store import Store
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.errors import ArgumentError, CacheError

NAME = ("kernel", "family", "digest")
PAYLOAD = b"some code" * 10
SECRET = b"a key of at least thirty-two bytes"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def put(root: Path, **options: Any) -> Path:
    """A cache with one entry; the file that has it."""
    made = Store(root, **options)
    assert made.write(NAME, PAYLOAD)
    assert made.read(NAME) == PAYLOAD
    return made.path(NAME)


def no_temporaries(root: Path) -> bool:
    return not list(root.rglob("*.tmp"))


# --- what is in a file -------------------------------------------------------------------------------------------


def test_fault_1_an_entry_cut_anywhere_is_a_miss_and_is_repaired(root: Path) -> None:
    path = put(root)
    whole = path.read_bytes()
    for end in (0, 1, 7, 8, 9, 10, 12, 19, 20, 21, HEADER - 1, HEADER, HEADER + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        again = Store(root)
        assert again.read(NAME) is None
        assert again.write(NAME, PAYLOAD)
        assert path.read_bytes() == whole


@settings(max_examples=40)
@given(st.binary(max_size=40), st.data())
def test_fault_2_an_entry_with_any_bit_flipped_is_damaged(payload: bytes, data: st.DataObject) -> None:
    for secret in (None, SECRET):
        whole = bytearray(file_format.pack_entry(payload, secret))
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(CorruptEntry):
            file_format.unpack_entry(bytes(whole), secret)


def test_fault_2_an_entry_with_a_byte_flipped_in_each_place_is_a_miss(root: Path) -> None:
    path = put(root)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        assert Store(root).read(NAME) is None


def test_an_entry_with_more_at_its_end_is_damaged() -> None:
    with pytest.raises(CorruptEntry):
        file_format.unpack_entry(file_format.pack_entry(PAYLOAD) + b"x")


@pytest.mark.parametrize("secret", [None, SECRET])
def test_what_is_packed_is_unpacked(secret: bytes | None) -> None:
    assert file_format.unpack_entry(file_format.pack_entry(PAYLOAD, secret), secret) == PAYLOAD
    assert file_format.unpack_entry(file_format.pack_entry(b"", secret), secret) == b""


def empty(path: Path) -> None:
    path.write_bytes(b"")


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("disturb", [empty, link, folder, pipe])
def test_fault_3_odd_things_in_the_place_of_an_entry_are_a_miss(root: Path, disturb: Callable[[Path], None]) -> None:
    disturb(put(root))
    again = Store(root)
    assert again.read(NAME) is None
    assert again.write(NAME, PAYLOAD) == (disturb is not folder)
    assert no_temporaries(root)
    assert Path("/etc/passwd").read_bytes()[:4] != file_format.MAGIC[:4]


def test_fault_4_another_version_of_the_format_is_a_miss(root: Path) -> None:
    path = put(root)
    whole = bytearray(path.read_bytes())
    whole[8] += 1
    path.write_bytes(whole)
    assert Store(root).read(NAME) is None


def test_fault_4_entries_of_other_versions_are_left_alone(root: Path) -> None:
    put(root)
    later = root / "v3" / "kernel" / "digest.tc"
    later.parent.mkdir(parents=True)
    later.write_bytes(b"of the future")
    made = Store(root, limit=1)
    assert eviction.evict(made) is not None
    assert list(made.walk()) == []
    assert later.exists()


def test_fault_13_a_length_beyond_all_memory_is_refused_before_anything_is_allocated(root: Path) -> None:
    path = put(root)
    whole = bytearray(path.read_bytes())
    whole[12:20] = (1 << 63).to_bytes(8, "little")
    path.write_bytes(whole)
    assert Store(root).read(NAME) is None


def test_fault_13_a_file_that_is_too_long_is_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(root)
    os.truncate(path, file_format.MAX_PAYLOAD_BYTES + HEADER + 1)  # sparse: it takes no room

    def forbidden(*_: object) -> bytes:
        raise AssertionError("read")

    assert Store(root, system=replace(SYSTEM, read=forbidden)).read(NAME) is None
    monkeypatch.setattr(file_format, "MAX_PAYLOAD_BYTES", 5)
    assert not Store(root).write(NAME, PAYLOAD)


# --- keys --------------------------------------------------------------------------------------------------------


def test_fault_12_code_signed_with_another_key_or_with_none_is_a_miss(root: Path) -> None:
    path = put(root, secret=SECRET)
    assert Store(root, secret=SECRET[::-1]).read(NAME) is None
    assert Store(root).read(NAME) is None
    path.write_bytes(file_format.pack_entry(PAYLOAD))
    assert Store(root, secret=SECRET).read(NAME) is None


def test_measurements_are_not_signed(root: Path) -> None:
    assert Store(root, secret=SECRET).write(("tuning", "f", "d"), PAYLOAD)
    assert Store(root).read(("tuning", "f", "d")) == PAYLOAD


# --- faults of the system ----------------------------------------------------------------------------------------


class Failing:
    """A function of the system that fails so many times, or always."""

    def __init__(self, original: Callable[..., Any], code: int, times: int = 1 << 30) -> None:
        self.original, self.code, self.times, self.calls = original, code, times, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls <= self.times:
            raise OSError(self.code, os.strerror(self.code))
        return self.original(*arguments)


def short_then_full(descriptor: int, data: memoryview) -> int:
    """A disk that takes three bytes and then is full."""
    if len(data) < len(file_format.pack_entry(PAYLOAD)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return os.write(descriptor, data[:3])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_fault_7_a_full_disk_leaves_nothing_behind_and_is_reported_once(
    root: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = Store(root, system=replace(SYSTEM, write=Failing(os.write, code)))
    with caplog.at_level(logging.WARNING):
        assert not made.write(NAME, PAYLOAD)
        assert not made.write(NAME, PAYLOAD)
    assert made.read(NAME) is None
    assert no_temporaries(root)
    assert len(caplog.records) == 1


def test_fault_7_a_disk_that_fills_up_in_the_middle_leaves_nothing_behind(root: Path) -> None:
    made = Store(root, system=replace(SYSTEM, write=short_then_full))
    assert not made.write(NAME, PAYLOAD)
    assert Store(root).read(NAME) is None
    assert no_temporaries(root)


def test_a_write_that_takes_a_byte_at_a_time_is_continued(root: Path) -> None:
    slow = Store(root, system=replace(SYSTEM, write=lambda d, data: os.write(d, data[:1])))
    assert slow.write(NAME, PAYLOAD)
    assert Store(root).read(NAME) == PAYLOAD


def test_after_a_failure_writing_pauses_and_is_tried_again_later(root: Path) -> None:
    now = [1000.0]
    fault = Failing(os.write, errno.ENOSPC, times=1)
    made = Store(root, system=replace(SYSTEM, write=fault, clock=lambda: now[0]))
    assert not made.write(NAME, PAYLOAD)
    assert not made.write(NAME, PAYLOAD)
    assert fault.calls == 1
    now[0] += store.PAUSE_SECONDS + 1
    assert made.write(NAME, PAYLOAD)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("function", ["open", "mkdir"])
def test_fault_8_a_folder_that_cannot_be_written_is_reported_once(
    root: Path, function: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = Store(root, system=replace(SYSTEM, **{function: Failing(getattr(os, function), code)}))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not made.write(NAME, PAYLOAD)
    assert len(caplog.records) == 1


def test_fault_8_a_read_only_cache_is_read(root: Path) -> None:
    put(root)
    system = replace(SYSTEM, write=Failing(os.write, errno.EROFS), utime=Failing(os.utime, errno.EROFS))
    assert Store(root, system=system).read(NAME) == PAYLOAD


def test_fault_8_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    def homeless(*_: object, **__: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(platformdirs, "user_cache_path", homeless)
    store._store.cache_clear()
    with knobs.override_knobs(cache="readwrite", cache_dir=""):
        made = store.current_store()
        assert made.mode == "off"
        assert not made.write(NAME, PAYLOAD)
        assert made.read(NAME) is None
        assert made.names(()) == ()
    store._store.cache_clear()


def test_fault_8_a_folder_that_cannot_be_made_is_tried_once() -> None:
    """A system may say that there is no such place although the folder above is there."""

    def nowhere(path: object, mode: int = 0o777) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file or directory", str(path)) from None

    made = Store(Path("/nowhere/at/all"), system=replace(SYSTEM, mkdir=nowhere))
    assert not made.write(NAME, PAYLOAD)
    made = Store(Path("/proc/cache"))  # where nobody can make a folder
    assert not made.write(NAME, PAYLOAD)
    assert made.read(NAME) is None


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EBUSY, errno.EINTR])
@pytest.mark.parametrize("function", ["open", "replace", "stat", "listdir"])
def test_fault_9_what_may_pass_is_tried_twice(root: Path, function: str, code: int) -> None:
    put(root)
    for times in (1, 9):
        fault = Failing(getattr(os, function), code, times)
        made = Store(root, system=replace(SYSTEM, **{function: fault}))
        kept, known, listed = made.write(NAME, PAYLOAD), made.read(NAME), made.names(NAME[:-1])
        if times == 1 and function != "stat":
            assert (kept, known, listed) == (True, PAYLOAD, ("digest",))
        assert known in (None, PAYLOAD)
        assert no_temporaries(root)
    assert Store(root).read(NAME) == PAYLOAD


def test_fault_9_a_file_that_goes_while_it_is_read_is_a_miss(root: Path) -> None:
    put(root)
    assert Store(root, system=replace(SYSTEM, open=Failing(os.open, errno.ENOENT))).read(NAME) is None


def test_fault_10_a_folder_removed_while_in_use_is_made_again(root: Path) -> None:
    import shutil

    made = Store(root)
    for _ in range(2):
        assert made.write(NAME, PAYLOAD)
        shutil.rmtree(root)
        assert made.read(NAME) is None
    assert made.write(NAME, PAYLOAD)
    assert made.read(NAME) == PAYLOAD


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_fault_11_a_folder_that_others_may_write_is_refused(
    root: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    put(root)
    root.chmod(mode)
    made = Store(root)
    with caplog.at_level(logging.WARNING):
        assert made.read(NAME) is None
        assert not made.write(NAME, PAYLOAD)
        assert made.names(()) == ()
    assert len(caplog.records) == 1
    assert "others may write" in caplog.text


def test_fault_11_a_folder_of_somebody_else_is_refused(root: Path) -> None:
    put(root)
    made = Store(root, system=replace(SYSTEM, user=lambda: os.geteuid() + 1))
    assert made.read(NAME) is None
    assert not made.write(NAME, PAYLOAD)


def test_fault_11_a_file_of_somebody_else_in_ones_own_folder_is_refused(root: Path) -> None:
    put(root)

    def foreign(descriptor: int) -> os.stat_result:
        found = list(os.fstat(descriptor))
        found[4] += 1
        return os.stat_result(found)

    assert Store(root, system=replace(SYSTEM, fstat=foreign)).read(NAME) is None


def test_fault_11_a_file_that_others_may_write_is_refused(root: Path) -> None:
    put(root).chmod(0o666)
    assert Store(root).read(NAME) is None


def test_the_folder_and_its_files_are_private(root: Path) -> None:
    before = os.umask(0)
    try:
        path = put(root)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    for parent in (root, *path.parents[: path.parents.index(root)]):
        assert parent.stat().st_mode & 0o777 == 0o700


# --- eviction ----------------------------------------------------------------------------------------------------


def fill(made: Store, count: int, layer: str = "kernel") -> None:
    for n in range(count):
        assert made.write((layer, "family", f"{n:02}"), PAYLOAD)
        os.utime(made.path((layer, "family", f"{n:02}")), (n, n))


def test_what_was_used_longest_ago_goes_first(root: Path) -> None:
    made = Store(root)
    fill(made, 10)
    made.read(("kernel", "family", "00"))  # as old as it is, it is in use
    size = HEADER + len(PAYLOAD)
    swept = eviction.evict(made, 5 * size)
    assert swept is not None
    assert (swept.entries, swept.removed) == (4, 6)
    assert made.names(("kernel", "family")) == ("00", "07", "08", "09")


def test_measurements_go_last(root: Path) -> None:
    made = Store(root)
    fill(made, 3, "tuning")
    fill(made, 3)
    os.utime(made.path(("tuning", "family", "00")), (0, 0))
    eviction.evict(made, 3 * (HEADER + len(PAYLOAD)) + 100)
    assert made.names(("kernel", "family")) == ()
    assert len(made.names(("tuning", "family"))) == 3


def test_fault_14_clocks_that_jump_do_not_stop_eviction(root: Path) -> None:
    made = Store(root)
    fill(made, 6)
    for n, when in enumerate([0, 1 << 40, 5, 1 << 33, 1, 2]):
        os.utime(made.path(("kernel", "family", f"{n:02}")), (when, when))
    past = Store(root, limit=3 * HEADER, system=replace(SYSTEM, clock=lambda: -1e9))
    swept = eviction.evict(past)
    assert swept is not None
    assert swept.bytes <= 3 * HEADER


def test_fault_15_a_limit_below_one_entry_stops_no_write(root: Path) -> None:
    made = Store(root, limit=1)
    for n in range(5):
        assert made.write(("kernel", "family", str(n)), PAYLOAD)
    assert sum(1 for _ in made.walk()) <= 1


def test_writing_sweeps_by_itself(root: Path) -> None:
    made = Store(root, limit=20 * (HEADER + len(PAYLOAD)))
    for n in range(100):
        made.write(("kernel", "family", f"{n:03}"), PAYLOAD)
    assert sum(1 for _ in made.walk()) < 25


def test_fault_16_files_that_do_not_belong_here_disturb_nothing(root: Path) -> None:
    made = Store(root)
    put(root)
    for stray in (root / "README", root / "v2" / "kernel" / "stray", root / "v2" / "kernel" / "family" / "x-atime"):
        stray.write_text("?")
    assert made.write(("kernel", "family", "other"), PAYLOAD)
    assert made.read(NAME) == PAYLOAD
    assert eviction.evict(made) is not None
    assert made.write(NAME, PAYLOAD)


def test_fault_6_leftovers_of_killed_writers_are_removed_after_an_hour(root: Path) -> None:
    made = Store(root)
    put(root)
    old, new = (made.folder(("kernel", "family")) / f".host-1-{n}.tmp" for n in (1, 2))
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (0, 0))
    swept = eviction.evict(made)
    assert swept is not None
    assert swept.leftovers == 1
    assert (old.exists(), new.exists()) == (False, True)
    assert made.names(("kernel", "family")) == ("digest",)


def test_a_sweep_is_not_waited_for(root: Path) -> None:
    import fcntl

    made = Store(root)
    put(root)
    with open(root / "v2" / ".lock", "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert eviction.evict(made) is None
        assert made.write(NAME, PAYLOAD)
    assert eviction.evict(made) is not None


# --- modes -------------------------------------------------------------------------------------------------------


def test_a_cache_that_is_only_read_changes_nothing(root: Path) -> None:
    path = put(root)
    os.utime(path, (1, 1))
    made = Store(root, "read")
    assert made.read(NAME) == PAYLOAD
    assert not made.write(("kernel", "family", "other"), PAYLOAD)
    assert not made.remove(NAME)
    assert path.stat().st_mtime == 1


def test_a_cache_that_is_only_read_is_not_made(root: Path) -> None:
    assert Store(root, "read").read(NAME) is None
    assert not root.exists()


def test_a_cache_that_is_off_touches_nothing(root: Path) -> None:
    made = Store(root, "off")
    assert not made.write(NAME, PAYLOAD)
    assert made.read(NAME) is None
    assert list(made.walk()) == []
    assert not root.exists()


def test_strictness_raises_what_is_otherwise_a_warning(root: Path) -> None:
    path = put(root)
    path.write_bytes(b"damaged")
    with pytest.raises(CacheError, match="passed over"):
        Store(root, strict=True).read(NAME)
    with pytest.raises(CacheError, match="No space"):
        Store(root, strict=True, system=replace(SYSTEM, write=Failing(os.write, errno.ENOSPC))).write(NAME, PAYLOAD)
    assert Store(root, strict=True).read(("kernel", "family", "unknown")) is None


def test_a_home_of_nobody_is_a_name_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store._store.cache_clear()
    with knobs.override_knobs(cache="readwrite", cache_dir="~nobody-here/cache"):
        assert store.current_store().write(NAME, PAYLOAD)
    assert (tmp_path / "~nobody-here" / "cache").is_dir()
    with (
        knobs.override_knobs(cache="readwrite", cache_signing_key="~nobody-here/key"),
        pytest.raises(CacheError, match="cannot be read"),
    ):
        store.current_store()


def test_the_knobs_name_the_store(root: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(SECRET)
    key.chmod(0o600)
    with knobs.override_knobs(
        cache="read", cache_dir=str(root), cache_max_size=77, cache_strict=True, cache_signing_key=str(key)
    ):
        made = store.current_store()
        assert made is store.current_store()
    assert (made.root, made.mode, made.limit, made.strict, made.secret) == (root, "read", 77, True, SECRET)
    with knobs.override_knobs(cache="off"):
        assert store.current_store().mode == "off"


@pytest.mark.parametrize(("content", "mode", "part"), [(b"short", 0o600, "32 or more"), (SECRET, 0o644, "chmod 600")])
def test_a_key_that_is_no_secret_is_refused(tmp_path: Path, content: bytes, mode: int, part: str) -> None:
    key = tmp_path / "key"
    key.write_bytes(content)
    key.chmod(mode)
    with knobs.override_knobs(cache="readwrite", cache_signing_key=str(key)), pytest.raises(CacheError, match=part):
        store.current_store()
    with (
        knobs.override_knobs(cache="readwrite", cache_signing_key=str(tmp_path / "none")),
        pytest.raises(CacheError, match="cannot be"),
    ):
        store.current_store()


def test_sizes_are_written_with_units() -> None:
    assert [knobs.parse_bytes("x", text) for text in ("7", "2k", "3M", "1G")] == [7, 2048, 3 << 20, 1 << 30]
    with pytest.raises(ArgumentError):
        knobs.parse_bytes("x", "-1")


def test_threads_that_write_and_read_one_entry_see_it_whole(root: Path) -> None:
    made, wrong = Store(root), []

    def work(n: int) -> None:
        for _ in range(20):
            made.write(NAME, PAYLOAD * (n + 1))
            known = made.read(NAME)
            if known is None or len(known) % len(PAYLOAD):
                wrong.append(known)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert no_temporaries(root)


def test_a_system_without_owners_is_not_asked_for_them(root: Path) -> None:
    put(root)
    root.chmod(0o777)
    assert Store(root, system=OsFunctions(user=lambda: -1)).read(NAME) == PAYLOAD
