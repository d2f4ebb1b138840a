"""A sample of the operators in PyTorch's own tests, another in every run: `python -m tools.fuzz operators` runs all."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

SECONDS = 8


def test_operators_agree_with_eager() -> None:
    """Forward and backward, each in a process of its own; what fails is printed with the command that repeats it."""
    seed = secrets.randbits(32)
    command = [sys.executable, "-m", "tests.dynamo_backend.operator_database", "--samples=1"]
    run = subprocess.run(
        [*command, f"--seconds={SECONDS}", f"--seed={seed}"],
        cwd=Path(__file__).parents[2], env=os.environ | {"TC_STRICT": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert int(run.stdout.splitlines()[-1].split()[0]) > 0
