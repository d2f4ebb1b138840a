from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import tensor_comprehensions
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.core.knobs import Knobs


def test_nothing_set_gives_the_defaults() -> None:
    assert Knobs.read({}) == Knobs()


def test_every_field_is_read_from_its_variable() -> None:
    environment = {"TC_INTERPRET": "1", "TC_DUMP": "/there", "TC_LOGS": "code, cache,code", "TC_VERIFY": "true"}
    environment |= {"TC_CACHE": "read", "TC_CACHE_DIR": "/here", "TC_CACHE_STRICT": "1", "TC_CACHE_MAX_SIZE": "3M"}
    environment |= {"TC_CACHE_SIGNING_KEY": "/secret", "TC_TUNE": "auto", "TC_TARGET": "haswell"}
    environment |= {"TC_STRICT": "1"}
    expected = Knobs(
        interpret=True, dump="/there", logs=("code", "cache"), verify=True, cache="read", cache_dir="/here",
        cache_strict=True, cache_max_size=3 << 20, cache_signing_key="/secret", tune="auto", target="haswell",
        strict=True,
    )  # fmt: skip
    assert Knobs.read(environment) == expected


def test_all_topics() -> None:
    assert Knobs.read({"TC_LOGS": "all"}).logs == tuple(knobs.TOPICS)


@pytest.mark.parametrize(
    ("variable", "text", "part"),
    [
        ("TC_VERIFY", "yes", "0 or 1"),
        ("TC_LOGS", "shedule", "did you mean 'schedule'?"),
        ("TC_CACHE", "on", "'off' or 'read' or 'readwrite'"),
        ("TC_TUNE", "always", "'' or 'auto'"),
        ("TC_TARGET", "i386", "or 'nehalem' or"),
        ("TC_CACHE_MAX_SIZE", "2T", "such as 500M"),
        ("TC_CACHE_MAX_SIZE", "M", "such as 500M"),
    ],
)
def test_a_meaningless_value_is_reported_with_its_variable(variable: str, text: str, part: str) -> None:
    with pytest.raises(ArgumentError, match=variable) as caught:
        Knobs.read({variable: text})
    assert part in str(caught.value)


def test_paths_stay_where_they_were_when_the_variables_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read = Knobs.read({"TC_CACHE_DIR": "cache", "TC_DUMP": "../dump", "TC_CACHE_SIGNING_KEY": "~/key"})
    assert read.cache_dir == str(tmp_path / "cache")
    assert read.dump == str(tmp_path.parent / "dump")
    assert read.cache_signing_key == str(Path.home() / "key")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert Knobs.read({"TC_CACHE_DIR": "cache"}).cache_dir == "cache"


def test_override_ends_with_its_block() -> None:
    before = knobs.current_knobs()
    with knobs.override_knobs(dump="folder") as inside:
        assert knobs.current_knobs() is inside
        assert inside.dump == "folder"
    assert knobs.current_knobs() == before


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    with knobs.override_knobs(dump=tmp_path) as inside:
        assert inside.dump == str(tmp_path)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"verfy": True}, "there is no setting 'verfy'\n  help: did you mean 'verify'?"),
        ({"verify": 1}, "the setting verify is 1\n  expected: True or False"),
        ({"verify": None}, "the setting verify is None"),
        ({"cache": "write"}, "expected: 'off' or 'read' or 'readwrite'"),
        ({"cache": ["off"]}, "expected: 'off' or 'read' or 'readwrite'\n  found: ['off'] of the type list"),
        ({"cache_dir": 3}, "the setting cache_dir is 3"),
        ({"dump": b"x"}, "the setting dump is b'x'"),
        ({"cache_max_size": -1}, "expected: at least 0"),
        ({"cache_max_size": True}, "expected: a whole number\n  found: True of the type bool"),
        ({"logs": "passes"}, "expected: a tuple, such as ('graph',)"),
        ({"logs": ("passes", "pases")}, "did you mean 'passes'?"),
        ({"target": "z80"}, "the setting target is 'z80'"),
    ],
    ids=str,
)
def test_an_override_checks_names_and_values(values: dict[str, Any], part: str) -> None:
    before = knobs.current_knobs()
    with pytest.raises(ArgumentError) as caught, knobs.override_knobs(**values):
        pass
    assert part in str(caught.value)
    assert knobs.current_knobs() == before


def test_every_knob_says_what_it_is_for() -> None:
    assert all(f.metadata["help"] and f.metadata["variable"].startswith("TC_") for f in fields(Knobs))


def test_no_other_module_reads_settings_from_the_environment() -> None:
    """`os.environ` and `os.getenv` occur in `knobs.py` only."""
    package = Path(tensor_comprehensions.__file__).parent
    texts = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    readers = {
        name
        for name, text in texts.items()
        if re.search(r"\b(environ|getenv)\b", text)  # parsing all takes seconds
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert readers == {"core/knobs.py"}


def test_a_meaningless_value_is_reported_on_use_not_on_import() -> None:
    program = """
import sys
import tensor_comprehensions as tc
from tensor_comprehensions.cli.main import main
try:
    tc.define("def f(float(N) x) -> (y) { y(i) = x(i) }").f([1.0])
except tc.ArgumentError as error:
    print(error)
sys.exit(main(["doctor"]))
"""
    environment = {**os.environ, "TC_CACHE": "maybe"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "TC_CACHE is 'maybe'" in done.stdout
    assert done.returncode > 0
    assert "TC_CACHE is 'maybe'" in done.stderr
    assert "Traceback" not in done.stderr
