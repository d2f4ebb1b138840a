"""PyTorch's own samples of its operators through the backend: `python -m tests.dynamo_backend.operator_database`.

Every operator runs in a process of its own with a time limit, forward and backward, with a kernel in place of every
operation that has a formula. A fault is a result that neither eager nor `aot_eager` gives, or an exception that
`aot_eager` does not raise, and is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import random
import secrets
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

SECONDS = 120.0
"""What an operator may take."""
SAMPLES = 2
"""How many samples of an operator are drawn."""
OURS, OTHER = "tensor_comprehensions", "aot_eager"
RTOL, ATOL = 1e-3, 1e-4
PROGRESS = 100
"""After how many operators it says how far it is."""
UNDEFINED = ("empty", "new_empty")
"""Whose results are whatever lies in memory."""
Result = tuple[list[Any], list[Any]]
"""What a function gives, and its gradients."""


def load_database() -> dict[str, Any]:
    """The operators with samples in float32, by name."""
    if "expecttest" not in sys.modules:  # torch's tests import it, the samples do not need it
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    defined = [op for op in op_db if not op.name.startswith(UNDEFINED)]
    return {op.formatted_name: op for op in defined if torch.float32 in op.supported_dtypes("cpu")}


def force_kernels() -> None:
    """From now on the kernel wins every race, and a single operation is worth one."""
    from tensor_comprehensions.dynamo_backend import backend, kernel_or_eager, race

    kernel_or_eager.kernel_is_faster = lambda ours, theirs: True  # type: ignore[assignment]
    backend.is_profitable = lambda region: True  # type: ignore[assignment]
    race.ROUNDS = (1, 1)
    for name in (OURS, OTHER):  # what is imported here, every process has
        x = torch.randn(3, 4, requires_grad=True)
        torch.compile(lambda x: (x @ x.t()).softmax(1).sum(), backend=name)(x).backward()


def find_faults(op: Any, seed: int, samples: int) -> list[str]:
    """What is wrong with some samples of `op`."""
    torch.manual_seed(seed)
    with torch.no_grad():
        found = list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))
    chosen = random.Random(f"{op.formatted_name} {seed}").sample(range(len(found)), min(samples, len(found)))
    return [f"sample {k}: {fault}" for k in chosen for fault in _faults_of(op, found[k], seed)]


def _faults_of(op: Any, sample: Any, seed: int) -> Iterator[str]:
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [k for k, x in enumerate(leaves) if isinstance(x, Tensor)]
    rest = [None if k in places else x for k, x in enumerate(leaves)]

    def function(*tensors: Tensor) -> Any:
        given = list(rest)
        for k, x in zip(places, tensors, strict=True):
            given[k] = x
        first, args, kwargs = tree_unflatten(given, spec)
        return op(first, *args, **kwargs)

    def attempt(backend: str = "") -> Result | Exception:
        torch._dynamo.reset()
        call = torch.compile(function, backend=backend) if backend else function
        inputs = [_copy_of(leaves[k]) for k in places]
        try:
            return _run(call, inputs, seed)
        except Exception as error:
            return error

    expected = attempt()
    if isinstance(expected, Exception) or not _agree(attempt(), expected):
        return  # not a sample for this machine, or never the same twice
    ours = attempt(OURS)
    if _agree(ours, expected):
        return
    other = attempt(OTHER)
    if isinstance(ours, Exception):
        if not isinstance(other, Exception):
            yield f"raises {type(ours).__name__}: {ours}"
    elif not _agree(ours, other):
        yield f"differs: {_difference(ours, expected)}"


def _copy_of(x: Tensor) -> Tensor:
    copied = x.detach().clone()
    return copied.requires_grad_(x.requires_grad)


def _run(call: Callable[..., Any], inputs: Sequence[Tensor], seed: int) -> Result:
    torch.manual_seed(seed)
    outputs = [x for x in tree_flatten(call(*inputs))[0] if x is not None]
    roots = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    leaves = [x for x in inputs if x.requires_grad]
    if not roots or not leaves:
        return outputs, []
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in roots]
    return outputs, list(torch.autograd.grad(roots, leaves, directions, allow_unused=True))


def _agree(a: Result | Exception, b: Result | Exception) -> bool:
    return not isinstance(a, Exception) and not isinstance(b, Exception) and not _difference(a, b)


def _difference(ours: Result, theirs: Result) -> str:
    """Of the first value that differs, ""  if there is none."""
    for name, a, b in zip(("result", "gradient"), ours, theirs, strict=True):
        if len(a) != len(b):
            return f"{len(a)} {name}s instead of {len(b)}"
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            if not isinstance(x, Tensor) or not isinstance(y, Tensor):
                if x != y and x == x:
                    return f"{name} {k}: {x} instead of {y}"
                continue
            x, y = (v if v.layout is torch.strided else v.to_dense() for v in (x, y))
            finite = y[y.isfinite()].abs() if y.is_floating_point() or y.is_complex() else y.flatten()[:0]
            scale = max(1.0, finite.max().item()) if finite.numel() else 1.0
            try:
                torch.testing.assert_close(x, y, rtol=RTOL, atol=ATOL * scale, equal_nan=True)
            except AssertionError as difference:
                return f"{name} {k}: {' '.join(str(difference).split())}"
    return ""


# --- a process each ----------------------------------------------------------------------------------------------


def check(op: Any, seed: int, samples: int, seconds: float = SECONDS) -> list[str]:
    """What is wrong with `op`, found by a process that may end in any way."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(its, op, seed, samples))
    process.start()
    its.close()
    try:
        if not mine.poll(seconds):
            return [f"takes more than {seconds:.0f} s"]
        found: list[str] = mine.recv()
        return found
    except EOFError:
        process.join()
        return [f"ends with code {process.exitcode}"]
    finally:
        process.kill()
        process.join()


def _answer(pipe: multiprocessing.connection.Connection, op: Any, seed: int, samples: int) -> None:
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    pipe.send(find_faults(op, seed, samples))
    pipe.close()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*", help="which, by name (default: all)")
    parser.add_argument("--count", type=int, help="how many of them, drawn at random")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each operator, drawn at random")
    parser.add_argument("--seconds", type=float, help="start no further operator after so long")
    parser.add_argument("--seed", type=int, help="of what is drawn (default: a fresh one)")
    given = parser.parse_args()
    seed = secrets.randbits(32) if given.seed is None else given.seed
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
    warnings.simplefilter("ignore")
    database = load_database()
    force_kernels()
    names = given.operators or sorted(database)
    chosen = random.Random(seed).sample(names, min(given.count or len(names), len(names)))
    print(f"seed {seed}", flush=True)
    start, faults, done = monotonic(), 0, 0
    for name in chosen:
        if given.seconds is not None and monotonic() - start > given.seconds:
            break
        done += 1
        if done % PROGRESS == 0:
            print(f"{done} operators, {monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        for fault in check(database[name], seed, given.samples):
            faults += 1
            print(f"{name}: {fault}", flush=True)
            print(f"  again: python -m {__spec__.name} {name} --seed {seed} --samples {given.samples}", flush=True)
    print(f"{done} operators, {faults} faults, {monotonic() - start:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
