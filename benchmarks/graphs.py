"""What `torch.compile(backend="tensor_comprehensions")` gains on whole graphs: `python -m benchmarks.graphs`.

Beside torch eager and, unless `--without-inductor`, torch's own compiler; without gradients, after all have compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .timing import interleave

OURS, EAGER, INDUCTOR = "tensor_comprehensions", "eager", "inductor"
CLOSE = 1e-4


def gate(x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6) * F.silu(g)


class FeedForward(nn.Module):
    """RMSNorm and SwiGLU around a residual."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    """A block with four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projection, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(self.first(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.layers(self.second(x))


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.last(self.second(F.relu(self.norm(self.first(x))))))


def _perceptron() -> nn.Module:
    sizes = (256, 512, 512, 10)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


r = torch.randn
CASES: dict[str, Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...]]]] = {
    "gate 4096 x 1024": lambda: (gate, (r(4096, 1024), r(4096, 1024), r(1024))),
    "gate 512 x 1024": lambda: (gate, (r(512, 1024), r(512, 1024), r(1024))),
    "feed-forward 128 x 256 x 512": lambda: (FeedForward(256, 512), (r(128, 256),)),
    "transformer 4 x 64 x 256": lambda: (Transformer(256), (r(4, 64, 256),)),
    "residual 4 x 32 x 28 x 28": lambda: (Residual(32).eval(), (r(4, 32, 28, 28),)),
    "perceptron 64": lambda: (_perceptron(), (r(64, 256),)),
}


@torch.no_grad()
def measure(name: str, seconds: float, *, inductor: bool = True) -> dict[str, float]:
    """How many times as long as ours the others take, by their names. Raises ValueError where results differ."""
    function, inputs = CASES[name]()
    calls: dict[str, Any] = {EAGER: function, OURS: torch.compile(function, backend=OURS)}
    if inductor:
        calls[INDUCTOR] = torch.compile(function)
    expected = function(*inputs)
    for who, call in calls.items():
        if not torch.allclose(call(*inputs), expected, rtol=CLOSE, atol=CLOSE):
            raise ValueError(f"{name}: {who} differs from eager")
    ready = {who: (lambda call=call: call(*inputs)) for who, call in calls.items()}
    taken = interleave(ready, seconds=seconds).seconds
    others = (who for who in taken if who != OURS)
    return {
        who: torch.tensor([a / b for a, b in zip(taken[who], taken[OURS], strict=True)]).median().item()
        for who in others
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="run only cases that start so")
    parser.add_argument("--seconds", type=float, default=2.5, help="for each case (default 2.5)")
    parser.add_argument("--without-inductor", action="store_true")
    options = parser.parse_args(arguments)
    for name in CASES:
        if not options.names or name.startswith(tuple(options.names)):
            torch.compiler.reset()
            ratios = measure(name, options.seconds, inductor=not options.without_inductor)
            print(f"{name:<30}", "  ".join(f"{who} {ratio:.2f}" for who, ratio in ratios.items()), flush=True)


if __name__ == "__main__":
    main()
