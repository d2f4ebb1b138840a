"""`python -m benchmarks.structured`: measure, print, write the requested files; `--shard` cuts it into short runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

from ..kernels import Benchmark
from ..report import duration, notes, read_json, write_json
from ..runner import OURS, Result, Settings, run
from ..timing import keep_memory
from .contractions import products
from .convolutions import convolutions, pooling
from .memory_bound import copies, norms, reductions, transpositions

HEAD = (
    "kernel",
    "threads",
    "ours",
    "best peer",
    "peer's time",
    "ratio",
    "quartiles",
    "kernel alone",
    "speed",
    "of most",
)
WIDTHS = (38, 7, 8, 14, 11, 6, 13, 12, 12, 7)
LEFT = (0, 3)


def benchmarks() -> tuple[Benchmark, ...]:
    return (*convolutions(), *pooling(), *transpositions(), *copies(), *reductions(), *norms(), *products())


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    chosen = select(benchmarks(), options.kernels, options.shard)
    if options.list:
        print("\n".join(f"{b.name:44} {b.family}" for b in chosen))
        return 0
    if options.load:
        names = {b.name for b in chosen}
        results = [r for path in options.load for r in read_json(path) if r.name in names]
        print(line(HEAD), *(line(row(r)) for r in results), sep="\n")
    else:
        results = measure(chosen, options)
    print(*(f"  {text}" for text in notes(results)), sep="\n")
    print(*summary(results, {b.name: b.goal for b in chosen}), sep="\n")
    if options.plot:
        from .roofline import draw  # matplotlib is an extra

        draw(results, options.plot)
    return 0


def measure(chosen: Sequence[Benchmark], options: argparse.Namespace) -> list[Result]:
    """All results, each printed when it is known."""
    kept = keep_memory()
    settings = Settings(seconds=options.seconds, compiled=not options.no_compile, seed=options.seed)
    results: list[Result] = []
    print(line(HEAD))
    for threads in options.threads:
        for benchmark in chosen:
            results.append(run(benchmark, threads, settings))
            print(line(row(results[-1])), flush=True)
    if options.json:
        write_json(options.json, results, {**asdict(settings), "memory reused": kept})
    return results


def select(
    everything: Sequence[Benchmark], patterns: Sequence[str] | None, shard: tuple[int, int] = (1, 1)
) -> list[Benchmark]:
    """Those whose name or family matches one of the shell patterns; of these every n-th, from the k-th on."""
    wanted = patterns or ["*"]
    found = [b for b in everything if any(fnmatch(text, p) for p in wanted for text in (b.name, b.family))]
    return found[shard[0] - 1 :: shard[1]]


# --- reports -----------------------------------------------------------------------------------------------------


def line(cells: Sequence[str]) -> str:
    pairs = enumerate(zip(cells, WIDTHS, strict=True))
    return "  ".join(c.ljust(w) if n in LEFT else c.rjust(w) for n, (c, w) in pairs).rstrip()


def row(r: Result) -> tuple[str, ...]:
    """The cells of one line under `HEAD`."""
    ours, ratio, limit = r.times.get(OURS), r.ratio, r.limit
    return (
        r.name,
        str(r.threads),
        duration(ours.median) if ours else "-",
        r.best or "-",
        duration(r.times[r.best].median) if r.best else "-",
        f"{ratio.median:.2f}" if ratio else "-",
        f"{ratio.low:.2f} .. {ratio.high:.2f}" if ratio else "-",
        duration(limit.seconds.median) if limit else "-",
        f"{limit.speed * 1e-9:.1f} G{limit.unit}/s" if limit else "-",
        f"{limit.share.median:.0%}" if limit else "-",
    )


def summary(results: Sequence[Result], goals: Mapping[str, float | None]) -> Iterator[str]:
    """For each family and number of threads: the geometric means, the worst ratio, and whether the goal is met."""
    for family, threads in dict.fromkeys((r.family, r.threads) for r in results):
        group = [r for r in results if (r.family, r.threads) == (family, threads)]
        ratios = sorted((r.ratio.median, r.name) for r in group if r.ratio is not None)
        shares = sorted((r.limit.share.median, r.name) for r in group if r.limit is not None)
        if not ratios:
            continue
        mean = geometric(value for value, _ in ratios)
        goal = max((goals.get(name) or 0.0 for _, name in ratios), default=0.0)
        verdict = f"goal {goal:.2f} {'met' if mean >= goal else 'missed'}" if goal else ""
        text = (
            f"{family}, {threads} thread{'s' * (threads > 1)}: {mean:.2f} x the best peer (of {len(ratios)}; {verdict};"
        )
        text += f" least {ratios[0][0]:.2f} {ratios[0][1]})"
        if shares:
            most = geometric(value for value, _ in shares)
            text += f"; {most:.0%} of the machine's most (least {shares[0][0]:.0%} {shares[0][1]})"
        yield text


def geometric(values: Iterator[float]) -> float:
    """The geometric mean."""
    logarithms = [math.log(v) for v in values]
    return math.exp(sum(logarithms) / len(logarithms))


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not 1 <= int(number) <= int(count):
        raise ValueError(text)
    return int(number), int(count)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured", description=__doc__)
    add = parser.add_argument
    add("--kernels", nargs="+", metavar="PATTERN", help="names or families, with shell wildcards; default all")
    add("--shard", type=_shard, default=(1, 1), metavar="K/N", help="only the K-th of N parts of these")
    add("--threads", nargs="+", type=int, default=[1], metavar="N", help="default 1")
    add("--seconds", type=float, default=0.4, help="time per kernel (default 0.4)")
    add("--no-compile", action="store_true", help="peers without torch.compile")
    add("--seed", type=int, default=0, help="of the inputs and of the order of turns")
    add("--json", type=Path, metavar="PATH", help="write everything measured")
    add("--plot", type=Path, metavar="PATH", help="draw the speeds under the machine's roof (.svg or .png)")
    add("--load", nargs="+", type=Path, metavar="PATH", help="measure nothing: show what --json wrote before")
    add("--list", action="store_true", help="list the kernels and stop")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
