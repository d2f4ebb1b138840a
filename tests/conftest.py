"""What every test has: checks after every pass, and golden files with one switch to accept what changed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("TC_VERIFY", "1")
os.environ.setdefault("TC_CACHE", "off")
os.environ.setdefault("TC_STRICT", "1")
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
    parser.addoption("--long", action="store_true", help="run a hundred times as many random programs, for hours")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("long", max_examples=100 * settings.default.max_examples)
    if config.getoption("--long"):
        settings.load_profile("long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--examples`, run properties alone, each with so many examples, drawn afresh and not by its name."""
    examples = config.getoption("--examples")
    if not examples:
        return
    items[:] = [item for item in items if getattr(getattr(item, "obj", None), "is_hypothesis_test", False)]
    for test in {getattr(item.obj, "__func__", item.obj) for item in items}:  # type: ignore[attr-defined]
        setattr(
            test, SETTINGS, settings(getattr(test, SETTINGS), max_examples=examples, derandomize=False, database=None)
        )


SETTINGS = "_hypothesis_internal_use_settings"
"""Where hypothesis keeps the settings of a test; it takes none a second time by its decorator."""


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(Path(request.path).parent / "golden", request.config.getoption("--accept"))
