"""`python -m benchmarks`: measure all kernels, print a table, and write JSON and charts on request."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

import torch

from .kernels import BENCHMARKS, Benchmark
from .report import HEAD, line, notes, read_json, row, table, write_json
from .runner import Result, Settings, run
from .timing import keep_memory


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    chosen = select(options.kernels)
    if options.load:
        loaded = [result for path in options.load for result in read_json(path)]
        show([r for r in loaded if r.name in {b.name for b in chosen}], options.plot)
        return 0
    if options.list:
        print("\n".join(f"{b.name:28} {b.family}" for b in chosen))
        return 0
    settings = Settings(
        seconds=options.seconds or (0.2 if options.quick else 1.5),
        compiled=not (options.quick or options.no_compile),
        ours=not options.peers_only,
        seed=options.seed,
    )
    results, kept = measure(chosen, options, settings)
    print(*(f"  {text}" for text in notes(results)), sep="\n")
    if options.json:
        write_json(options.json, results, {**asdict(settings), "memory reused": kept})
    if options.plot:
        plot(results, options.plot)
    return 0


def measure(chosen: Sequence[Benchmark], options: argparse.Namespace, settings: Settings) -> tuple[list[Result], bool]:
    """All results, each printed when it is known, and whether freed memory was reused."""
    kept = not options.fresh_pages and keep_memory()
    threads = options.threads or sorted({1, torch.get_num_threads()})
    results: list[Result] = []
    print(line(HEAD).rstrip())
    for count in threads:
        for benchmark in chosen:
            results.append(run(benchmark, count, settings))
            print(line(row(results[-1])).rstrip(), flush=True)
    return results, kept


def show(results: Sequence[Result], picture: Path | None) -> None:
    """Print results measured before, and draw them where asked to."""
    print(*table(results), *(f"  {text}" for text in notes(results)), sep="\n")
    if picture:
        plot(results, picture)


def plot(results: Sequence[Result], path: Path) -> None:
    from .plot import draw  # matplotlib is an extra

    draw(results, path)


def select(patterns: Sequence[str] | None) -> list[Benchmark]:
    """The kernels whose name or family matches one of the shell patterns; all without patterns."""
    if not patterns:
        return list(BENCHMARKS)
    return [b for b in BENCHMARKS if any(fnmatch(n.lower(), p.lower()) for p in patterns for n in (b.name, b.family))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--kernels", nargs="+", metavar="PATTERN", help="names or families, with shell wildcards; default all")
    add("--threads", nargs="+", type=int, metavar="N", help=f"default 1 and all ({os.cpu_count()})")
    add("--quick", action="store_true", help="little time per kernel, no torch.compile")
    add("--no-compile", action="store_true", help="peers without torch.compile")
    add("--peers-only", action="store_true", help="leave our kernels out")
    add("--fresh-pages", action="store_true", help="let every call pay for the page faults of its outputs")
    add("--seconds", type=float, help="time per kernel and number of threads (default 1.5)")
    add("--seed", type=int, default=0, help="of the inputs and of the order of turns")
    add("--json", type=Path, metavar="PATH", help="write everything measured")
    add("--plot", type=Path, metavar="PATH", help="write a chart of the ratios (.svg or .png)")
    add("--load", nargs="+", type=Path, metavar="PATH", help="measure nothing: show what --json wrote before")
    add("--list", action="store_true", help="list the kernels and stop")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
