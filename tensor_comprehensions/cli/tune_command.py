"""`tensorc tune`: work off a job file, on this machine or as one of many shards."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from ..autotuner.jobs import parse_shard, read_job, run_job, shard_tasks
from ..autotuner.op_api import store_of
from ..autotuner.progress import progress_listener
from ..autotuner.report import write_report
from ..autotuner.session import parse_seconds
from ..cache import remote_measurements
from ..cache.store import Store


def add_tune_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tune` and its arguments."""
    parser = commands.add_parser(
        "tune",
        help="search for fast options for the defs and sizes of a job file",
        description=__doc__,
        epilog="A killed job resumes when it is run again. Ctrl-C ends the search with the best result so far.",
    )
    parser.set_defaults(command=run_tune)
    parser.add_argument("job", type=Path, help="a TOML or JSON file; docs/tuning.md has an example")
    parser.add_argument("--budget", help="time for each def and size, instead of that of the job file: 90s, 2min")
    parser.add_argument("--seed", type=int, help="seed of the search, instead of that of the job file")
    parser.add_argument("--shard", default="0/1", metavar="N/COUNT", help="run part N of COUNT, counted from 0")
    parser.add_argument("--store", metavar="PATH_OR_URL", help="where to write results, instead of the cache")
    parser.add_argument(
        "--journal", type=Path, help="file that records the progress of the job (default: beside the job file)"
    )
    parser.add_argument("--report", type=Path, help="an HTML page, and JSON beside it (default: beside the job file)")


def run_tune(options: argparse.Namespace) -> int:
    """Run the job. Returns 0, or 1 if a task failed or was interrupted."""
    job = read_job(options.job)
    shard = parse_shard(options.shard)
    tasks = shard_tasks(job.tasks, shard)
    if options.budget is not None:
        tasks = tuple(replace(t, effort=replace(t.effort, seconds=parse_seconds(options.budget))) for t in tasks)
    if options.seed is not None:
        tasks = tuple(replace(t, effort=replace(t.effort, seed=options.seed)) for t in tasks)
    suffix = "" if shard[1] == 1 else f".{shard[0]}of{shard[1]}"
    journal = options.journal or options.job.with_suffix(f"{suffix}.journal")
    place = options.store if options.store is not None else job.store
    with tempfile.TemporaryDirectory() as folder, progress_listener() as seen:
        url = place if place is not None and remote_measurements.is_url(place) else None
        store = Store(Path(folder, "store")) if url is not None else store_of(place)
        found = run_job(tasks, job.devices, store, journal, seen)
        if url is not None:
            print(f"results: {remote_measurements.upload_measurements(store, url)}")
    if found:
        page, _ = write_report(
            _choose_report_path(options.report or options.job.with_suffix(f"{suffix}.html"), options.job), found
        )
        print(f"report: {page}")
    return 0 if len(found) == len(tasks) and not any(f.interrupted for _, f in found) else 1


def _choose_report_path(page: Path, job: Path) -> Path:
    """`page`, or a similar name if the JSON file beside it would replace the job file."""
    return page.with_suffix(".report.html") if page.with_suffix(".json") == job else page
