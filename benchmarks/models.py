"""Whole networks under `torch.compile(backend="tensor_comprehensions")`: `python -m benchmarks.models`.

Each is run in inference, in training (forward and backward, with dropout) and in inference under autocast to bfloat16,
for several batch sizes. First it is checked:

- without dropout, results and gradients are compared with those in float64. Our error may be twice that of eager;
- with dropout, a step with one seed is compared with eager's.

Then it is timed beside eager and, with `--inductor`, torch's own compiler, alternately; one thread by its processor
time, in which other load does not show. Most networks are those of the
package `transformers`: `pip install 'tensor-comprehensions[models]'`.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tensor_comprehensions.dynamo_backend.backend import observers
from tensor_comprehensions.dynamo_backend.kernel_or_eager import kernel_flops

from .networks import NETWORKS, Inputs, make_network
from .timing import interleave

OURS, EAGER, INDUCTOR = "tensor_comprehensions", "eager", "inductor"
MODES = ("inference", "training", "bfloat16")
BATCHES = (1, 4, 16)
ROUNDING = {"inference": 3e-6, "training": 1e-5, "bfloat16": 2e-2}
"""Errors, relative to the largest element, that are no more than rounding of the type."""
SAME_STEP = 2e-3
"""How far apart, relative to the largest element, gradients of one step may be: its sums are in another order."""
DRAWS = 3
"""Inputs that must all show a difference before it counts."""


@dataclass(frozen=True, slots=True)
class Row:
    """A network in a mode.

    Attributes:
        error, eager_error: largest differences from float64, relative to the largest element of a tensor.
        ratios: the time of each peer divided by ours; empty if the results are wrong.
        share: of the floating-point work, what our kernels do.
        compile_seconds: of processor time, for the first call.
        problem: the fault found by a check; "" if there is none.
    """

    network: str
    mode: str
    batch: int
    error: float
    eager_error: float
    ratios: dict[str, float]
    share: float
    compile_seconds: float
    problem: str = ""


def measure_network(name: str, mode: str, batch: int, *, seconds: float, inductor: bool = False) -> Row:
    """Check a network, and time it if its results are right. seconds: of timing; 0 checks only."""
    torch.compiler.reset()
    torch.manual_seed(1)
    inputs = NETWORKS[name].inputs(batch)
    network = make_network(name).train(mode == "training")
    compiled: dict[str, Any] = {EAGER: network, OURS: torch.compile(copy.deepcopy(network), backend=OURS)}
    with _recorded_graphs() as graphs:
        began = time.process_time()
        run_network(compiled[OURS], inputs, mode)
        taken = time.process_time() - began
    share = sum(kernel_flops(graph) for graph, _ in graphs) / max(1, sum(work for _, work in graphs))
    problem = _compare_step(name, compiled, batch) if mode == "training" else ""
    error, eager_error = _errors(name, inputs, mode)
    if error > max(2 * eager_error, ROUNDING[mode]):
        problem = problem or f"error {error:.1e}, eager's is {eager_error:.1e}"
    ratios: dict[str, float] = {}
    if seconds and not problem:
        if inductor:
            compiled[INDUCTOR] = torch.compile(copy.deepcopy(network))
        calls = {who: (lambda f=f: run_network(f, inputs, mode)) for who, f in compiled.items()}
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        samples = interleave(calls, seconds=seconds, clock=clock).seconds
        ratios = {
            who: statistics.median(a / b for a, b in zip(samples[who], samples[OURS], strict=True))
            for who in samples
            if who != OURS
        }
    return Row(name, mode, batch, error, eager_error, ratios, share, taken, problem)


def run_network(network: Callable[..., Tensor], inputs: Inputs, mode: str) -> tuple[Tensor, ...]:
    """The result of a network, and in training its gradients by all parameters, in order."""
    if mode == "training":
        torch.manual_seed(2)
        parameters = list(network.parameters())  # type: ignore[attr-defined]
        for x in parameters:
            x.grad = None
        result = network(**inputs)
        result.backward(torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape))
        return (result.detach(), *(x.grad for x in parameters if x.grad is not None))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mode == "bfloat16"):
        return (network(**inputs),)


def _compare_step(name: str, compiled: dict[str, Any], batch: int) -> str:
    """Differences of a step with dropout from eager's, if several inputs show some; else "".

    An activation that rounding carries across the kink of a ReLU changes a gradient by far more than rounding.
    """
    apart = []
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        inputs = NETWORKS[name].inputs(batch)
        expected, found = (run_network(compiled[who], inputs, "training") for who in (EAGER, OURS))
        apart.append(_largest_error(found, expected))
        if apart[-1] <= SAME_STEP:
            return ""
    return f"a step with dropout differs from eager's by {min(apart):.1e}"


def _errors(name: str, inputs: Inputs, mode: str) -> tuple[float, float]:
    """The errors of our results and of eager's without dropout, by those in float64."""
    network = make_network(name).eval()
    exact = copy.deepcopy(network).double()
    wide = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    expected = run_network(exact, wide, "training" if mode == "training" else "inference")
    ours = run_network(torch.compile(copy.deepcopy(network), backend=OURS), inputs, mode)
    return _largest_error(ours, expected), _largest_error(run_network(network, inputs, mode), expected)


def _largest_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Infinity where a value is not finite and should be, or results are missing."""
    if len(found) != len(expected):
        return float("inf")
    largest = max(x.abs().max().item() for x in expected)  # gradients that are 0 but for rounding count by the others
    worst = 0.0
    for x, y in zip(found, expected, strict=True):
        scale = max(y.abs().max().item(), 1e-3 * largest, 1e-30)
        error = (x.double() - y.double()).abs().max().item() / scale
        worst = max(worst, error if error == error else float("inf"))
    return worst


@contextmanager
def _recorded_graphs() -> Iterator[list[tuple[torch.fx.GraphModule, int]]]:
    graphs: list[tuple[torch.fx.GraphModule, int]] = []
    observers.append(lambda graph, work: graphs.append((graph, work)))
    try:
        yield graphs
    finally:
        observers.pop()


def format_row(row: Row) -> str:
    """A row as a line of text."""
    times = "  ".join(f"{who} {ratio:.2f}" for who, ratio in row.ratios.items()) or "not timed"
    return (
        f"{row.network:<16} {row.mode:<10} {row.batch:>3}  error {row.error:.1e} (eager {row.eager_error:.1e})  "
        f"{times}  share {row.share:.2f}  compiled in {row.compile_seconds:.1f} s  {row.problem}".rstrip()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)}; all without")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, metavar="N")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing a row (default 3); 0 checks only")
    parser.add_argument(
        "--inductor", action="store_true", help="time torch's own compiler, too; it needs a C++ compiler"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in NETWORKS]:
        parser.error(f"there is no network {unknown[0]!r}")
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for name in options.names or NETWORKS:
        for mode in options.modes:
            for batch in options.batches:
                row = measure_network(name, mode, batch, seconds=options.seconds, inductor=options.inductor)
                rows.append(row)
                print(format_row(row), flush=True)
    for mode in options.modes:
        for who in (EAGER, INDUCTOR):
            if ratios := [row.ratios[who] for row in rows if row.mode == mode and who in row.ratios]:
                mean = statistics.geometric_mean(ratios)
                print(f"{mode}: {who} / ours: geometric mean {mean:.2f}, least {min(ratios):.2f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    return int(any(row.problem for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
