"""Run every def of `examples/*.tc` at realistic sizes, check it against torch, and time both.

Usage: python examples/demo.py [--rounds N] [NAME ...]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tensor_comprehensions as tc

HERE = Path(__file__).parent
Result = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One def: its file, its name, its arguments, and the same computation in torch."""

    file: str
    name: str
    arguments: tuple[Tensor | float, ...]
    torch: Callable[..., Result]
    initial: dict[str, Tensor] = field(default_factory=dict)


def cases() -> Iterator[Case]:
    """The defs with realistic sizes."""
    r = torch.randn
    yield Case("matmul.tc", "matmul", (r(512, 512), r(512, 512)), torch.matmul)
    c = r(256, 384)
    yield Case(
        "matmul.tc", "gemm", (r(256, 128), r(128, 384), 0.5, 2.0),
        lambda a, b, alpha, beta: torch.addmm(c, a, b, alpha=alpha, beta=beta), {"C": c},
    )  # fmt: skip
    yield Case("fcrelu.tc", "fcrelu", (r(128, 512), r(1024, 512), r(1024)), lambda x, w, b: F.relu(F.linear(x, w, b)))
    layers = (r(128, 200), r(128), r(64, 128), r(64), r(32, 64), r(32))
    yield Case("fcrelu.tc", "mlp3", (r(128, 200), *layers), _mlp3)
    yield Case("softmax.tc", "softmax", (r(4096, 1024),), lambda x: torch.softmax(x, 1))
    yield Case(
        "norms.tc", "layernorm", (r(4096, 1024), r(1024), r(1024)), lambda x, w, b: F.layer_norm(x, (1024,), w, b, 1e-5)
    )
    yield Case(
        "norms.tc", "rmsnorm_swiglu", (r(4096, 1024), r(4096, 1024), r(1024)),
        lambda x, gate, w: F.rms_norm(x, (1024,), w, 1e-6) * F.silu(gate),
    )  # fmt: skip
    yield Case(
        "norms.tc", "groupnorm", (r(8, 8, 4, 32, 32), r(8, 4), r(8, 4)),
        lambda x, w, b: F.group_norm(x.flatten(1, 2), 8, w.flatten(), b.flatten()).view_as(x),
    )  # fmt: skip
    yield Case("norms.tc", "moments", (r(128, 36864),), lambda x: (x.mean(1), x.square().mean(1)))
    yield Case("convolution.tc", "conv2d", (r(8, 16, 34, 34), r(32, 16, 3, 3), r(32)), F.conv2d)
    yield Case(
        "convolution.tc", "group_convolution", (r(8, 4, 16, 30, 30), r(4, 16, 16, 3, 3), r(4, 16)),
        lambda x, w, b: F.conv2d(x.flatten(1, 2), w.flatten(0, 1), b.flatten(), groups=4).unflatten(1, (4, 16)),
    )  # fmt: skip
    yield Case("convolution.tc", "maxpool", (r(8, 16, 64, 64), 3, 2), F.max_pool2d)
    words = torch.randint(10000, (256, 20))
    yield Case("lookup.tc", "embedding_sum", (r(10000, 64), words), lambda t, w: F.embedding_bag(w, t, mode="sum"))
    yield Case(
        "lookup.tc", "weighted_bag", (r(10000, 64), words, r(256, 20)),
        lambda t, w, scale: F.embedding_bag(w, t, mode="sum", per_sample_weights=scale),
    )  # fmt: skip
    yield Case(
        "lookup.tc", "histogram", (torch.randint(100, (100000,), dtype=torch.int32),),
        lambda v: torch.bincount(v, minlength=100).int(), {"count": torch.zeros(100, dtype=torch.int32)},
    )  # fmt: skip
    yield Case(
        "kronecker.tc", "kronecker3", (r(16, 16), r(16, 16), r(16, 16), r(64, 16, 16, 16)),
        lambda a, b, c, x: torch.einsum("xn,yo,zp,mnop->mxyz", a, b, c, x),
    )  # fmt: skip
    heads = (r(2, 8, 128, 64), r(2, 8, 128, 64), r(2, 8, 128, 64))
    yield Case("attention.tc", "attention", heads, F.scaled_dot_product_attention)
    yield Case(
        "causal_attention.tc", "causal_attention", heads,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    )  # fmt: skip
    machine = (r(256, 200), 0.5, r(200), r(200, 16))
    yield Case("factorization.tc", "factorization_machine", machine, _factorization_machine)
    taps = (r(32, 32, 2), r(32), r(32, 32, 2), r(32), r(32, 32), r(32), r(64, 32), r(64))
    yield Case("wavenet.tc", "wavenet", (r(4, 32, 2000), *taps, 4), _wavenet)
    cell = (r(64, 128), r(64, 256), r(64, 256), 0.1 * r(4, 256, 128), 0.1 * r(4, 256, 256), r(4, 256))
    yield Case("lstm.tc", "lstm_cell", cell, _lstm_cell)
    yield Case("movement.tc", "transpose", (r(2048, 2048),), lambda x: x.t().contiguous())
    yield Case("movement.tc", "gelu_residual", (r(2048, 2048), r(2048, 2048)), lambda x, residual: residual + F.gelu(x))
    before = r(1024, 1024)
    yield Case("wave.tc", "wave", (r(1024, 1024), 0.1), lambda now, c: _wave(now, c, before), {"next": before})


def _wave(now: Tensor, c: float, before: Tensor) -> Tensor:
    kernel = torch.tensor([[0, c, 0], [c, 2 - 4 * c, c], [0, c, 0]])
    inner = F.conv2d(now[None, None], kernel[None, None])[0, 0] - before[1:-1, 1:-1]
    return torch.cat([before[:1], torch.cat([before[1:-1, :1], inner, before[1:-1, -1:]], 1), before[-1:]])


def _mlp3(x: Tensor, *layers: Tensor) -> Tensor:
    for weight, bias in zip(layers[::2], layers[1::2], strict=True):
        x = F.relu(F.linear(x, weight, bias))
    return x


def _factorization_machine(x: Tensor, bias: float, weight: Tensor, factor: Tensor) -> Tensor:
    pairs = (x @ factor).square() - x.square() @ factor.square()
    return bias + x @ weight + 0.5 * pairs.sum(1)


def _wavenet(x: Tensor, f: Tensor, fb: Tensor, g: Tensor, gb: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    residual, residual_bias, skip, skip_bias, dilation = rest
    z = torch.tanh(F.conv1d(x, f, fb, dilation=dilation)) * torch.sigmoid(F.conv1d(x, g, gb, dilation=dilation))
    carried = F.conv1d(z, residual.unsqueeze(-1), residual_bias) + x[:, :, dilation:]
    return carried, F.conv1d(z, skip.unsqueeze(-1), skip_bias)


def _lstm_cell(x: Tensor, h: Tensor, c: Tensor, wx: Tensor, wh: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.lstm_cell(
        x, (h, c), wx.flatten(0, 1), wh.flatten(0, 1), bias.flatten(), torch.zeros_like(bias.flatten())
    )


def error(ours: Result, theirs: Result) -> float:
    """The largest difference, relative to the largest magnitude of torch's result."""
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    worst = 0.0
    for a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf
        scale = max(1.0, b.abs().max().item())
        worst = max(worst, (a.double() - b.double()).abs().max().item() / scale)
    return worst


def seconds(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """The median time of each of `calls`, interleaved so that other load disturbs all of them alike."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            start = perf_counter()
            call()
            taken.append(perf_counter() - start)
    return [median(taken) for taken in times]


def run(case: Case, rounds: int) -> bool:
    """Compile, check and time one case; print its row of the table."""
    op = getattr(tc.define((HERE / case.file).read_text()), case.name)
    start = perf_counter()
    ours = op(*case.arguments, **case.initial)
    first = perf_counter() - start
    wrong = error(ours, case.torch(*case.arguments))
    mine, torchs = seconds([lambda: op(*case.arguments, **case.initial), lambda: case.torch(*case.arguments)], rounds)
    good = wrong < 1e-4
    print(
        f"{case.name:<22}{first * 1e3:>10.0f} ms{mine * 1e3:>10.3f} ms{torchs * 1e3:>10.3f} ms"
        f"{torchs / mine:>8.2f} x   {wrong:.1e}{'' if good else '   WRONG'}",
        flush=True,
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="run only these")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved runs of each (default 15)")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(f"{torch.get_num_threads()} threads, medians of {options.rounds} interleaved runs")
    print(f"{'op':<22}{'first call':>13}{'ours':>13}{'torch':>13}{'speed-up':>10}   error")
    good = [run(case, options.rounds) for case in cases() if not options.names or case.name in options.names]
    print(f"{sum(good)} of {len(good)} agree with torch")
    return 0 if good and all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
