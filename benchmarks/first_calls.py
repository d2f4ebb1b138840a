"""Processor time of the first training step of a network in a new process: `python -m benchmarks.first_calls`.

Each round starts three processes in turn: torch's `aot_eager`, which captures and differentiates the same graph but
compiles nothing, this backend with an empty cache, and again with the cache that it filled. Load of other programs
changes the processor time of all three alike, so the ratios are those of the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

BASELINE, OURS = "aot_eager", "tensor_comprehensions"
WARM_GOAL = 1.5
"""The most that a first call from the cache may take, as a multiple of the baseline."""


class Block(nn.Module):
    """The basic block of a ResNet, with a projection where the size changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm, self.last = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut.append(nn.Conv2d(before, after, 1, stride, bias=False)).append(nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.second(torch.relu(self.norm(self.first(x)))))
        return torch.relu(y + self.shortcut(x))


def make_encoder() -> tuple[nn.Module, Tensor]:
    """Three layers of a transformer encoder of width 256, and 4 x 64 tokens."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3), torch.randn(4, 64, 256)


def make_resnet18() -> tuple[nn.Module, Tensor]:
    """ResNet-18, and 4 images of 64 x 64."""
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Block(before, after, after // before) for before, after in pairwise(widths)]
    start = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return nn.Sequential(*start, *blocks, *end), torch.randn(4, 3, 64, 64)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"encoder": make_encoder, "resnet18": make_resnet18}


def time_first_step(name: str, backend: str) -> float:
    """Seconds of processor time of the first step, forward and backward, after one without a compiler."""
    torch.set_num_threads(1)
    network, x = NETWORKS[name]()
    network.train()
    network(x).square().mean().backward()
    start = time.process_time()
    torch.compile(network, backend=backend)(x).square().mean().backward()
    return time.process_time() - start


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of processor time of the three processes of a round."""

    baseline: float
    cold: float
    warm: float


def measure_round(name: str) -> Round:
    """Run the three processes of a round."""
    with tempfile.TemporaryDirectory() as folder:
        return Round(*(_run_process(name, backend, folder) for backend in (BASELINE, OURS, OURS)))


def _run_process(name: str, backend: str, folder: str) -> float:
    command = [sys.executable, "-m", __spec__.name, name, "--only", backend]
    environment = os.environ | {"TC_CACHE": "readwrite", "TC_CACHE_DIR": folder}
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def report(names: Sequence[str], repeat: int) -> Iterator[str]:
    yield f"{'network':10} {BASELINE:>10} {'no cache':>10} {'ratio':>6} {'cached':>8} {'ratio':>6}   goal {WARM_GOAL}"
    for name in names:
        rounds = [measure_round(name) for _ in range(repeat)]
        cold = statistics.median(r.cold / r.baseline for r in rounds)
        warm = statistics.median(r.warm / r.baseline for r in rounds)
        seconds = [statistics.median(s) for s in zip(*((r.baseline, r.cold, r.warm) for r in rounds), strict=True)]
        yield (
            f"{name:10} {seconds[0]:8.1f} s {seconds[1]:8.1f} s {cold:6.2f} {seconds[2]:6.1f} s {warm:6.2f}   "
            f"{'met' if warm <= WARM_GOAL else 'missed'}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_calls", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NETWORKS), metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--repeat", type=int, default=3, help="rounds of each network (default 3)")
    parser.add_argument("--only", metavar="BACKEND", help="print the seconds of one network with this backend alone")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in NETWORKS]:
        parser.error(f"there is no network {unknown[0]!r}")
    if options.only:
        print(time_first_step(options.names[0], options.only))
        return 0
    for text in report(options.names, options.repeat):
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
