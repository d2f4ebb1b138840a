"""Attention through `torch.compile` beside torch's own: `python -m benchmarks.attention`.

For each size, mask and type: the time of torch's `scaled_dot_product_attention` over that of our kernels, forward and
backward apart; the largest error against float64, in units of torch's error; and the bytes of temporaries. Kernels are
used even if torch is faster, and with one thread, times are processor times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tensor_comprehensions.core.single_flight import SingleFlightCache
from tensor_comprehensions.dynamo_backend import backend, kernel_or_eager
from tensor_comprehensions.dynamo_backend.kernel_or_eager import KernelOrEager

from .timing import interleave, keep_memory, ratios

GOAL = 1.2
SIZES = {"L": (4, 8, 1024, 64), "S": (2, 4, 128, 64), "M": (1, 8, 512, 64), "B": (128, 2, 64, 64)}
"""Batch, heads, queries (as many as keys), and elements of a query."""
MASKS = ("none", "bool", "add", "causal")
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LEAST_ROUNDS = 3
"""Torch's backward takes seconds in bfloat16."""


@dataclass(frozen=True, slots=True)
class Result:
    """Torch's time over ours, our error over torch's, and the most bytes that kernels keep between them."""

    forward: float
    backward: float
    error: float
    gradient_error: float
    temporary_bytes: int


def make_mask(kind: str, size: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """The mask, shared by all heads; None if there is none, or if a flag stands for it."""
    batch, _, rows, _ = size
    if kind == "bool":
        kept = torch.rand(batch, 1, rows, rows) > 0.3
        kept[..., 0] = True
        return kept
    return torch.randn(batch, 1, rows, rows).to(dtype) if kind == "add" else None


def attend(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)


def compute_error(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).abs().max().item()


def use_kernels(compiled: list[Any]) -> None:
    """Make the kernel win each race, and append it to `compiled`."""
    kernel_or_eager.kernel_is_faster = lambda ours, theirs: True
    choose = KernelOrEager._choose

    def choose_kernel(self: KernelOrEager, inputs: tuple[Tensor, ...]) -> None:
        choose(self, inputs)
        if self.uses_kernel:
            compiled.append(self.op.compile(*inputs))

    setattr(KernelOrEager, "_choose", choose_kernel)  # noqa: B010 - a method is no attribute to assign for mypy


def measure(size: str, kind: str, dtype: str, seconds: float, compiled: list[Any]) -> Result:
    """Compare ours with torch's. Raises RuntimeError if the forward or the backward runs no kernel."""
    torch.manual_seed(0)
    torch.compiler.reset()
    compiled.clear()
    backend._kernels = SingleFlightCache(backend.LIMIT)  # forget the races of equal regions
    inputs = [torch.randn(SIZES[size], dtype=TYPES[dtype], requires_grad=True) for _ in range(3)]
    upstream = torch.randn(SIZES[size]).to(TYPES[dtype])
    mask = make_mask(kind, SIZES[size], TYPES[dtype])
    eager: Callable[..., Tensor] = partial(attend, mask, kind == "causal")
    ours: Callable[..., Tensor] = torch.compile(eager, backend="tensor_comprehensions")
    exact_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = attend(exact_mask, kind == "causal", *exact_inputs)
    exact_gradients = torch.autograd.grad(exact, exact_inputs, upstream.double())

    outputs = {"ours": ours(*inputs), "torch": eager(*inputs)}

    def run_backward(who: str) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs[who], inputs, upstream, retain_graph=True)

    gradients = {who: run_backward(who) for who in outputs}
    if len(compiled) < 2:
        raise RuntimeError(f"{size} {kind} {dtype}: torch runs the forward or the backward")
    units = compute_error(outputs["torch"], exact)
    pairs = zip(*gradients.values(), exact_gradients, strict=True)
    worst = max(compute_error(a, e) / compute_error(b, e) for a, b, e in pairs)
    forward: dict[str, Callable[[], object]] = {"ours": partial(ours, *inputs), "torch": partial(eager, *inputs)}
    backward: dict[str, Callable[[], object]] = {who: partial(run_backward, who) for who in outputs}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    taken = [interleave(x, seconds=seconds, clock=clock, least=LEAST_ROUNDS).seconds for x in (forward, backward)]
    speedups = [ratios(x["torch"], x["ours"]).median for x in taken]
    kept = max(k.resources["temporary_bytes"] for k in compiled)
    return Result(*speedups, compute_error(outputs["ours"], exact) / units, worst, kept)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to measure each (default 2)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--masks", nargs="*", default=list(MASKS), choices=MASKS)
    parser.add_argument("--types", nargs="*", default=list(TYPES), choices=TYPES)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    keep_memory()
    compiled: list[Any] = []
    use_kernels(compiled)
    print(f"| size | mask | type | forward | backward | error | of gradients | MB | (goal {GOAL})")
    for size in chosen.sizes:
        for kind in chosen.masks:
            for dtype in chosen.types:
                r = measure(size, kind, dtype, chosen.seconds, compiled)
                print(
                    f"| {size} | {kind} | {dtype} | {r.forward:.2f} | {r.backward:.2f} | {r.error:.1f} "
                    f"| {r.gradient_error:.1f} | {r.temporary_bytes / 1e6:.1f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
