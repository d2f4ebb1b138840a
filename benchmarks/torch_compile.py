"""What `torch.compile(backend="tensor_comprehensions")` gains on whole graphs: `python -m benchmarks.torch_compile`.

Beside torch eager and, unless `--without-inductor`, torch's own compiler, after all have compiled; without gradients,
or with `--training` a step forward and backward. The share is that of the floating-point work that kernels do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_comprehensions.dynamo_backend.backend import observers
from tensor_comprehensions.dynamo_backend.kernel_or_eager import kernel_flops

from .timing import interleave

OURS, EAGER, INDUCTOR = "tensor_comprehensions", "eager", "inductor"
CLOSE = 1e-4
Ratios = dict[str, float]


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


class Cell(nn.LSTMCell):
    """A step of an LSTM, with both of its states in one tensor."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat(super().forward(x), 1)


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
    "lstm cell 64 x 128 x 256": lambda: (Cell(128, 256), (r(64, 128),)),
}


def measure(name: str, seconds: float, *, inductor: bool = True, training: bool = False) -> tuple[Ratios, float]:
    """How many times as long as ours the others take, by their names, and the share of the work that kernels do.

    Raises ValueError if results differ.
    """
    function, inputs = CASES[name]()
    if training:
        inputs = tuple(x.requires_grad_() for x in inputs)
    graphs: list[tuple[torch.fx.GraphModule, int]] = []
    observers.append(lambda graph, work: graphs.append((graph, work)))
    try:
        with torch.set_grad_enabled(training):
            calls: dict[str, Any] = {EAGER: function, OURS: torch.compile(function, backend=OURS)}
            if inductor:
                calls[INDUCTOR] = torch.compile(function)
            return _compare_calls(name, calls, inputs, seconds, training), _share(graphs)
    finally:
        observers.pop()


def _compare_calls(
    name: str, calls: dict[str, Any], inputs: tuple[Tensor, ...], seconds: float, training: bool
) -> Ratios:
    run = _step if training else _call
    expected = run(calls[EAGER], inputs)
    for who, call in calls.items():
        for found, wanted in zip(run(call, inputs), expected, strict=True):
            if not torch.allclose(found, wanted, rtol=CLOSE, atol=CLOSE * max(1.0, wanted.abs().max().item())):
                raise ValueError(f"{name}: {who} differs from eager")
    ready = {who: (lambda call=call: run(call, inputs)) for who, call in calls.items()}
    taken = interleave(ready, seconds=seconds).seconds
    others = (who for who in taken if who != OURS)
    return {
        who: torch.tensor([a / b for a, b in zip(taken[who], taken[OURS], strict=True)]).median().item()
        for who in others
    }


def _call(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (function(*inputs),)


def _step(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The result, and its gradients by the inputs. Those by the parameters are made, too."""
    for x in inputs:
        x.grad = None
    result = function(*inputs)
    result.backward(torch.ones_like(result))
    return (result.detach(), *(x.grad for x in inputs if x.grad is not None))


def _share(graphs: Sequence[tuple[torch.fx.GraphModule, int]]) -> float:
    return sum(kernel_flops(graph) for graph, _ in graphs) / max(1, sum(work for _, work in graphs))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="run only cases that start so")
    parser.add_argument("--seconds", type=float, default=2.5, help="for each case (default 2.5)")
    parser.add_argument("--without-inductor", action="store_true")
    parser.add_argument("--training", action="store_true", help="time a step forward and backward")
    options = parser.parse_args(arguments)
    for name in CASES:
        if not options.names or name.startswith(tuple(options.names)):
            torch.compiler.reset()
            ratios, share = measure(
                name, options.seconds, inductor=not options.without_inductor, training=options.training
            )
            shown = "  ".join(f"{who} {ratio:.2f}" for who, ratio in ratios.items())
            print(f"{name:<30} {shown}  share {share:.2f}", flush=True)


if __name__ == "__main__":
    main()
