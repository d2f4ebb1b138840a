"""What every test has: checks after every pass, and golden files with one switch to accept what changed."""

from __future__ import annotations

import gc
import os
import secrets
from collections import defaultdict
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("TC_VERIFY", "1")
os.environ.setdefault("TC_CACHE", "off")
os.environ.setdefault("TC_STRICT", "1")
os.environ.setdefault("TC_EINSUM", "kernel")
# Torch's cache of graphs names gradients by their content, which an earlier state of the code may have made otherwise.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")


@dataclass(frozen=True)
class Golden:
    """A folder of expected texts, `golden/` beside the test."""

    folder: Path
    accept: bool

    def check(self, name: str, actual: str) -> None:
        """Compare `actual` with the file `name`; with `--accept`, write it instead. A missing file fails."""
        path = self.folder / name
        if self.accept:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(actual)
        assert path.exists(), f"no golden file {path}: read the output, then run pytest --accept"
        assert actual == path.read_text(), f"{path} differs: if the change is meant, run pytest --accept"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="rewrite the golden files with what the tests now produce")
    parser.addoption("--examples", type=int, help="so many random programs for each property, whatever a test says")
    parser.addoption("--every-case", action="store_true", help="run every case of slow tests")
    parser.addoption("--fast", action="store_true", help="run one case of a slow test, or none if a case is slow")
    parser.addoption("--long", action="store_true", help="run a hundred times as many random programs, for hours")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sampled: its cases are alike; a run draws SAMPLE seconds of them")
    config.addinivalue_line("markers", "every_case: no run leaves out a case")
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    if is_whole and not (config.getoption("--every-case") or hasattr(config, "workerinput")):
        os.environ.setdefault(SEED, str(secrets.randbits(32)))  # the processes of a parallel run inherit it
    # No test asserts a time: the machine may be busy.
    anyhow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("suite", anyhow)
    settings.register_profile("long", anyhow, max_examples=100 * settings.default.max_examples)
    settings.load_profile("long" if config.getoption("--long") else "suite")


def pytest_report_header() -> str:
    seed = os.environ.get(SEED)
    return "every case of every test" if seed is None else f"cases drawn by {SEED}={seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = list(items)
    if seed := os.environ.get(SEED):
        items[:] = _draw_cases(items, seed)
    if config.getoption("--fast"):
        items[:] = _select_fast(items)
    if examples := config.getoption("--examples"):
        _draw_examples(items, examples)
    if hasattr(config, "workerinput"):  # one of several processes: none waits for another's long test at the end
        average = _read_slow_tests()
        items.sort(key=lambda item: -(average.get(_name_of(item), 0) // LONG_CASE))
    kept = set(items)
    config.hook.pytest_deselected(items=[item for item in found if item not in kept])


def pytest_collection_finish() -> None:
    """Exempt the tests and torch, which live for the whole run, from garbage collection, and collect more rarely.

    It took 7 % of the time, and then 5 %.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 20, 50)


def _draw_cases(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """Of each slow test as many cases as take `SAMPLE` seconds, and `LEAST_SHARE` of them unless they are alike."""
    average = _read_slow_tests()
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if _name_of(item) in average and not item.get_closest_marker("every_case"):
            cases[_name_of(item)].append(item)
    left_out: set[pytest.Item] = set()
    for name, own in cases.items():
        share = 0 if own[0].get_closest_marker("sampled") else LEAST_SHARE
        quick = round(SAMPLE / average[name]) if average[name] else len(own)
        count = max(1, quick, ceil(share * len(own)))
        left_out |= set(own) - set(Random(seed + name).sample(own, min(count, len(own))))
    return [item for item in items if item not in left_out]


def _select_fast(items: list[pytest.Item]) -> list[pytest.Item]:
    """All cases of most tests, and the first one of those in the table of slow tests unless each is slow."""
    average = _read_slow_tests()
    fast, seen = [], set()
    for item in items:
        name = _name_of(item)
        if average.get(name, 0) <= FAST_CASE and not (name in average and name in seen):
            fast.append(item)
        seen.add(name)
    return fast


def _read_slow_tests() -> dict[str, float]:
    """The seconds of a case of each slow test, on average."""
    rows = (line.split("\t") for line in SLOW_TESTS.read_text().splitlines())
    return {name: float(seconds) for name, _, seconds in rows}


def _name_of(item: pytest.Item) -> str:
    """The name of a test in the table of slow tests."""
    return item.nodeid.split("[")[0].replace("/", ".").replace(".py::", ".").replace("::", ".")


def _draw_examples(items: list[pytest.Item], examples: int) -> None:
    """Leave the properties alone, each with so many examples, drawn afresh and not by its name."""
    items[:] = [item for item in items if getattr(getattr(item, "obj", None), "is_hypothesis_test", False)]
    for test in {getattr(item.obj, "__func__", item.obj) for item in items}:  # type: ignore[attr-defined]
        setattr(
            test, SETTINGS, settings(getattr(test, SETTINGS), max_examples=examples, derandomize=False, database=None)
        )


SEED = "TC_TEST_SEED"
"""The variable that draws the cases of slow tests. Tests named on the command line run all of theirs."""
SLOW_TESTS = Path(__file__).parent / "slow_tests.tsv"
"""Made by `tools/slow_tests.py`."""
SAMPLE = 1.0
"""Seconds for the cases of a slow test."""
LEAST_SHARE = 0.2
"""Of the cases of a slow test that are not alike, such as programs that were wrong once, what a run takes at least."""
FAST_CASE = 0.15
"""Seconds of a case that a fast run takes."""
LONG_CASE = 5.0
"""Seconds of a case that starts before others in a parallel run."""
SETTINGS = "_hypothesis_internal_use_settings"
"""Where hypothesis keeps the settings of a test; it takes none a second time by its decorator."""


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(Path(request.path).parent / "golden", request.config.getoption("--accept"))
