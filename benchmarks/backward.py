"""What the backward of derived gradients costs beside torch's: `python -m benchmarks.backward`.

The backward alone: the forward has run, and its graph is kept. Both see the same contiguous gradient of the output, and
freed memory is used again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

import tensor_comprehensions as tc

from .timing import Quartiles, interleave, keep_memory

GOAL = 1.2


@dataclass(frozen=True, slots=True)
class Case:
    """A def, the shapes of its inputs, and the same function in torch."""

    source: str
    shapes: tuple[tuple[int, ...], ...]
    torch: Callable[..., Tensor]


def _swiglu(x: Tensor, g: Tensor, u: Tensor, v: Tensor) -> Tensor:
    z = functional.rms_norm(x, (x.shape[1],), g, 1e-5)
    return functional.silu(z @ u.t()) * (z @ v.t())


CASES = {
    "matmul": Case(
        "def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }", ((512, 512),) * 2, torch.matmul
    ),
    "conv2d": Case(
        """def conv2d(float(N,C,H,W) I, float(M,C,KH,KW) F) -> (O) {
            O(n,m,h,w) +=! I(n,c,h+kh,w+kw) * F(m,c,kh,kw)
        }""",
        ((4, 32, 30, 30), (32, 32, 3, 3)),
        functional.conv2d,
    ),
    "softmax": Case(
        """def softmax(float(N,D) x) -> (y) {
            m(n) max=! x(n,d)
            e(n,d) = exp(x(n,d) - m(n))
            t(n) +=! e(n,d)
            y(n,d) = e(n,d) / t(n)
        }""",
        ((1024, 512),),
        lambda x: torch.softmax(x, 1),
    ),
    "layernorm": Case(
        """def layernorm(float(N,D) x, float(D) w, float(D) b) -> (y) {
            mean(n) +=! x(n,d)
            mean(n) = mean(n) / D
            var(n) +=! (x(n,d) - mean(n)) * (x(n,d) - mean(n))
            r(n) = rsqrt(var(n) / D + 1e-5)
            y(n,d) = (x(n,d) - mean(n)) * r(n) * w(d) + b(d)
        }""",
        ((1024, 512), (512,), (512,)),
        lambda x, w, b: functional.layer_norm(x, (x.shape[1],), w, b),
    ),
    "swiglu": Case(
        """def swiglu(float(N,D) x, float(D) g, float(H,D) U, float(H,D) V) -> (y) {
            s(n) +=! x(n,d) * x(n,d)
            z(n,d) = x(n,d) * rsqrt(s(n) / D + 1e-5) * g(d)
            u(n,h) +=! z(n,d) * U(h,d)
            v(n,h) +=! z(n,d) * V(h,d)
            y(n,h) = u(n,h) * sigmoid(u(n,h)) * v(n,h)
        }""",
        ((128, 256), (256,), (512, 256), (512, 256)),
        _swiglu,
    ),
    "attention": Case(
        """def attention(float(B,Q,E) q, float(B,K,E) k, float(B,K,E) v) -> (o) {
            s(b,i,j) +=! q(b,i,e) * k(b,j,e)
            s(b,i,j) = s(b,i,j) / sqrt(float(E))
            m(b,i) max=! s(b,i,j)
            p(b,i,j) = exp(s(b,i,j) - m(b,i))
            t(b,i) +=! p(b,i,j)
            p(b,i,j) = p(b,i,j) / t(b,i)
            o(b,i,e) +=! p(b,i,j) * v(b,j,e)
        }""",
        ((8, 128, 64),) * 3,
        functional.scaled_dot_product_attention,
    ),
}


def backward(call: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> Callable[[], object]:
    """The backward of one call of `call`, again and again."""
    y = call(*inputs)
    return lambda: torch.autograd.grad(y, inputs, upstream, retain_graph=True)


def measure(name: str, seconds: float) -> Mapping[str, Quartiles]:
    """Seconds of one backward, ours and torch's, after they have been compared. Raises AssertionError."""
    torch.manual_seed(0)
    case = CASES[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in case.shapes]
    upstream = torch.randn_like(case.torch(*inputs))
    op: Callable[..., Tensor] = list(tc.define(case.source))[-1]
    contenders = {"ours": backward(op, inputs, upstream), "torch": backward(case.torch, inputs, upstream)}
    torch.testing.assert_close(contenders["ours"](), contenders["torch"](), atol=1e-2, rtol=1e-3)
    return {who: Quartiles.of(v) for who, v in interleave(contenders, seconds=seconds).seconds.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backward", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to measure each (default 2)")
    parser.add_argument("names", nargs="*", default=[], help=f"some of {', '.join(CASES)} (default: all)")
    chosen = parser.parse_args(arguments)
    keep_memory()
    for name in chosen.names or CASES:
        times = measure(name, chosen.seconds)
        ours, theirs = times["ours"].median, times["torch"].median
        print(f"{name:10} ours {ours * 1e6:9.1f} us  torch {theirs * 1e6:9.1f} us  {ours / theirs:5.2f} (goal {GOAL})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
