"""`tensorc cache`: inspect the cache, exchange entries with others, limit its size."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

from ..cache import eviction, import_export, measurement_store, remote_measurements, stored_kernels
from ..cache.key import Key
from ..cache.measurement_store import Measurement
from ..cache.store import KERNEL, LAYERS, TUNING, Name, Store, current_store
from ..cache.stored_kernels import StoredKernel
from ..core import knobs
from ..core.errors import ArgumentError, CacheError
from ..dispatch.cache_entry import CacheEntry

Namespace = argparse.Namespace
EntryOf = Callable[[Namespace], CacheEntry]
"""Returns the cache entry for the def and sizes on the command line."""


def add_cache_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_def: Callable[[argparse.ArgumentParser], None],
    entry_of: EntryOf,
) -> None:
    """Add `cache` and its commands. add_def: adds the arguments that `entry_of` reads."""
    parser = commands.add_parser(
        "cache", help="list, explain, verify, merge and clear the cache of kernels and measurements"
    )
    parser.add_argument(
        "--dir", type=Path, help="folder of the cache (default: TC_CACHE_DIR, or the user's cache folder)"
    )
    inner = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[Namespace], int], help: str) -> argparse.ArgumentParser:
        command = inner.add_parser(name, help=help)
        command.set_defaults(command=run)
        return command

    add("ls", _list, "list kernels and measurements")
    add("show", _show, "everything about one entry").add_argument(
        "digest", help="the name of the entry, or a prefix of it"
    )
    explain = add(
        "explain",
        lambda given: _print_explanation(entry_of(given)),
        "the key of a call, and whether the cache has its kernel",
    )
    add_def(explain)
    verify = add("verify", _verify, "read every entry; the exit code is 1 where one is damaged")
    verify.add_argument("--remove", action="store_true", help="remove damaged entries")
    merge = add("merge", _merge, "add the measurements of other caches, or of exported files")
    merge.add_argument("source", nargs="+", help="a folder, a file, or the URL to which shards write")
    export = add("export", _export, "write all measurements to a file that can be shared")
    export.add_argument(
        "file", type=Path, help=f"its name ends in {import_export.SUFFIX}, which is added to one without"
    )
    export.add_argument(
        "--code", action="store_true", help="copy signed code to a folder instead; needs TC_CACHE_SIGNING_KEY"
    )
    import_ = add("import", _merge_one, "add the measurements of an exported file")
    import_.add_argument("file", type=Path)
    import_.add_argument("--code", action="store_true", help="copy signed code from a folder instead")
    collect = add("gc", _evict, "remove leftovers and the least recently used entries")
    collect.add_argument("--limit", default="", metavar="SIZE", help="bytes to keep: 500M (default: TC_CACHE_MAX_SIZE)")
    clear = add("clear", _clear, "remove everything, or one layer")
    clear.add_argument("--layer", choices=LAYERS, help="the layer to clear (default: all)")


def _open_store(arguments: Namespace, mode: str = "readwrite") -> Store:
    """The cache that a command works on. Raises CacheError if there is no folder, or none to read."""
    base = current_store()
    root = arguments.dir if arguments.dir is not None else base.root
    if root is None:
        with knobs.override_knobs(cache="readwrite"):
            root = current_store().root
    if root is None:
        raise CacheError("there is no folder for a cache", suggestion="set TC_CACHE_DIR")
    if mode == "read" and not root.exists():
        raise CacheError(f"there is no cache at {root}")
    return Store(root, mode, strict=base.strict, limit=base.limit, secret=base.secret)


# --- inspect -----------------------------------------------------------------------------------------------------


def _list(arguments: Namespace) -> int:
    store = _open_store(arguments, "read")
    size = 0
    for name in stored_kernels.kernel_entry_names(store):
        found = stored_kernels.read_kernel(store, name)
        if found is not None:
            size += len(found.data)
            what = "by hand" if found.metadata.get("injected") else found.key["kind"]
            print(f"{name[-1][:12]}  {what:<8}  {len(found.data):>8} bytes  {_shapes(found.key)}  {_title(found.key)}")
    for key, measurements in measurement_store.all_measurements(store).items():
        best = f"{measurements[0].seconds * 1e6:.1f} us" if measurements else "nothing"
        print(f"{key.digest[:12]}  tuning    {len(measurements):>8} ways   {_shapes(key)}  {_title(key)}  best {best}")
    print(f"{store.root}: {size} bytes of code")
    return 0


def _title(key: Key) -> str:
    """The def up to `->`; for an entry without def, the name of the target."""
    return key["def"].partition("->")[0].strip() or key["target.name"] or "?"


def _shapes(key: Key) -> str:
    return key["shapes"].replace(" ", "")


def _show(arguments: Namespace) -> int:
    store = _open_store(arguments, "read")
    matching = [found for found in _all_entries(store) if found[0].digest.startswith(arguments.digest)]
    if not matching:
        raise ArgumentError(f"the cache has no entry {arguments.digest!r}", suggestion="tensorc cache ls lists them")
    if len(matching) > 1:
        digests = ", ".join(key.digest[:12] for key, _ in matching)
        raise ArgumentError(f"{len(matching)} entries begin with {arguments.digest!r}", found=digests)
    ((key, content),) = matching
    print(f"{'digest':<31}{key.digest}")
    for name, text in key.parts:
        print(f"{name:<31}{text}")
    if isinstance(content, StoredKernel):
        print(f"{'code':<31}{len(content.data)} bytes")
        for name, value in content.metadata.items():
            print(f"{name:<31}{value}")
    else:
        for line in map(_line, content):
            print(line)
    return 0


def _all_entries(store: Store) -> Iterator[tuple[Key, StoredKernel | tuple[Measurement, ...]]]:
    for name in stored_kernels.kernel_entry_names(store):
        found = stored_kernels.read_kernel(store, name)
        if found is not None:
            yield found.key, found
    yield from measurement_store.all_measurements(store).items()


def _line(m: Measurement) -> str:
    made = datetime.fromtimestamp(m.time, timezone.utc).strftime("%Y-%m-%d")
    notes = ["" if m.validated else "not validated", "" if m.is_current else "by other versions"]
    return f"  {m.seconds * 1e6:10.1f} us  {made}  {m.options}  {', '.join(filter(None, notes))}".rstrip()


def _print_explanation(entry: CacheEntry) -> int:
    print(entry.explain())
    for line in map(_line, entry.measurements[:3]):
        print(line)
    return 0 if entry.kernel is not None else 1


def _verify(arguments: Namespace) -> int:
    store = _open_store(arguments, "readwrite" if arguments.remove else "read")
    fine, damaged = 0, []
    for name in store.walk():
        if _is_sound(store, name):
            fine += 1
        else:
            damaged.append(name)
    for name in damaged:
        removed = ", removed" if arguments.remove and store.remove(name) else ""
        print(f"damaged: {store.path(name)}{removed}")
    print(f"{fine} entries are sound, {len(damaged)} are not")
    return 1 if damaged else 0


def _is_sound(store: Store, name: Name) -> bool:
    """Whether an entry is intact and matches the key in its name."""
    payload = store.read(name)
    if payload is None:
        return False
    if name[0] in (KERNEL, "injected"):
        found = stored_kernels.kernel_from_bytes(payload)
        return found is not None and found.key.digest == name[-1]
    if name[0] == TUNING:
        known = measurement_store.measurements_from_bytes(payload)
        return known is not None and known[0].digest == name[-2]
    return True


# --- exchange ----------------------------------------------------------------------------------------------------


def _merge(arguments: Namespace) -> int:
    store = _open_store(arguments)
    for source in arguments.source:
        found = (
            remote_measurements.download_measurements(source)
            if remote_measurements.is_url(source)
            else import_export.read_measurements(Path(source))
        )
        fresh = import_export.add_measurements(store, found)
        print(f"{source}: {fresh} new measurements")
    return 0


def _merge_one(arguments: Namespace) -> int:
    if not arguments.code:
        arguments.source = [str(arguments.file)]
        return _merge(arguments)
    store = _open_store(arguments)
    given = Store(arguments.file, "read", secret=store.secret, system=import_export.ANYBODY)  # signed: any owner
    print(f"{import_export.copy_code(given, store)} kernels copied")
    return 0


def _export(arguments: Namespace) -> int:
    store = _open_store(arguments, "read")
    if arguments.code:
        print(f"{import_export.copy_code(store, Store(arguments.file, secret=store.secret))} kernels copied")
    else:
        file = arguments.file if arguments.file.suffix else arguments.file.with_suffix(import_export.SUFFIX)
        print(f"{import_export.write_measurements(store, file)} keys written to {file}")
    return 0


# --- evict -------------------------------------------------------------------------------------------------------


def _evict(arguments: Namespace) -> int:
    store = _open_store(arguments)
    limit = knobs.parse_bytes("--limit", arguments.limit) if arguments.limit else None
    swept = eviction.evict(store, limit)
    if swept is None:
        print("another process is at it, or the cache cannot be written")
        return 1
    print(f"{swept.removed} entries and {swept.leftovers} leftovers removed")
    print(f"{swept.entries} entries of {swept.bytes} bytes are left")
    return 0


def _clear(arguments: Namespace) -> int:
    store = _open_store(arguments)
    names = [name for name in store.walk() if arguments.layer in (None, name[0])]
    print(f"{sum(map(store.remove, names))} entries removed")
    return 0
