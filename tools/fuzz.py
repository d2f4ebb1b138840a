"""Run the random suites for long, with fresh seeds: `python -m tools.fuzz --examples 20000`.

Every round is a pytest run with a number of random programs and one seed. A failing round prints its seed, and can be
repeated: `python -m tools.fuzz SUITE --examples 200 --seed 123`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROUND = 200
"""Programs of a round: its process frees its memory afterwards, and a failure shows early."""
SUITES = {
    "wide": "tests/core/test_wide_programs.py::test_compiled",
    "interpreted": "tests/core/test_wide_programs.py::test_interpreted_after_every_pass",
    "schedules": "tests/polyhedral/test_random_programs.py",
    "emulated": "tests/gpu/test_random_programs.py",
    "llvm": "tests/codegen/test_llvm_random.py",
    "digits": "tests/loop_ir/test_digits.py",
    "layouts": "tests/layouts",
    "tiles": "tests/tiles",
    "passes": "tests/loop_ir/test_passes.py",
    "gradients": "tests/api/test_autograd.py::test_random_programs",
    "texts": "tests/tc_lang/test_fuzz.py",
    "calls": "tests/api/test_fuzz.py",
    "files": "tests/autotuner/test_file_fuzz.py",
    "tensor-files": "tests/sparse/test_file_fuzz.py",
    "command-files": "tests/cli/test_file_fuzz.py",
    "sparse": "tests/sparse/test_random_sparse.py::test_programs",
    "sparse-gpu": "tests/sparse/test_random_sparse_gpu.py",
    "einsum": "tests/einsum_frontend/test_einsum.py",
    "graphs": "tests/dynamo_backend/test_random_graphs.py",
    "operators": "-m tests.dynamo_backend.operator_database",
}
"""Tests by what they draw; `-m` is a program of its own, which draws from a list and by default takes all of it."""
SECONDS = 3600
"""The time limit of a round, which takes minutes on an idle machine, and may run beside many others."""
LINES = 60
"""Most lines printed of a failing round."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("suite", nargs="*", choices=[[], *SUITES], help=f"which (default: all): {', '.join(SUITES)}")
    parser.add_argument("--examples", type=int, help=f"random programs for each property of each suite ({ROUND})")
    parser.add_argument("--seed", type=int, help="of the first round; those that follow count up (default: fresh ones)")
    parser.add_argument("--log", type=Path, help="where the whole output of rounds that fail is added")
    given = parser.parse_args()
    chosen = given.suite or list(SUITES)
    failed = []
    examples = given.examples or ROUND
    for done in range(0, examples, ROUND):
        for name in chosen:
            seed = secrets.randbits(32) if given.seed is None else given.seed + done // ROUND
            count = min(ROUND, examples - done)
            if SUITES[name].startswith("-m"):
                if done:
                    continue
                count = given.examples or 0
            start = time.monotonic()
            passed, said = run(SUITES[name], count, seed)
            state = "ok" if passed else "FAILED"
            print(
                f"{name:<12} seed {seed:<11} {done + count:>6} {time.monotonic() - start:6.0f} s  {state}", flush=True
            )
            if not passed:
                failed.append((name, seed))
                print("\n".join(said.splitlines()[-LINES:]), flush=True)
                if given.log is not None:
                    with given.log.open("a") as log:
                        log.write(f"# {name}, seed {seed}\n{said}\n")
    for name, seed in failed:
        print(f"again: python -m tools.fuzz {name} --examples {min(ROUND, examples)} --seed {seed}")
    return 1 if failed else 0


def run(tests: str, examples: int, seed: int) -> tuple[bool, str]:
    """Whether a round passes, and the output of pytest."""
    if tests.startswith("-m"):
        command = [sys.executable, *tests.split(), f"--seed={seed}", *([f"--count={examples}"] if examples else [])]
    else:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", tests]
        command += [f"--examples={examples}", f"--hypothesis-seed={seed}", f"--timeout={SECONDS}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    made = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return made.returncode == 0, made.stdout


if __name__ == "__main__":
    sys.exit(main())
