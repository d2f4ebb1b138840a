"""The benchmarks: each kernel as a def, its sizes, and the versions that a PyTorch user would write.

Sizes are those of the Tensor Comprehensions paper if it has the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import sources as tc

Outputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Input:
    """A random argument: normal values times `scale`, or integers in [0, below) where `below` is given."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    below: int | None = None
    scale: float = 1.0

    def make(self, generator: torch.Generator) -> Tensor:
        if self.below is not None:
            return torch.randint(self.below, self.shape, generator=generator, dtype=self.dtype)
        return torch.empty(self.shape, dtype=self.dtype).normal_(std=self.scale, generator=generator)


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to write the kernel in torch.

    compiled: whether `torch.compile` of it is a peer as well. prepare: brings the arguments into its preferred layout;
    not timed.
    """

    name: str
    function: Callable[..., Outputs]
    compiled: bool = False
    prepare: Callable[..., tuple[Tensor, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A kernel at one size.

    Attributes:
        name: unique; the command line selects by it.
        family: the group in charts.
        source: one def in the TC language.
        inputs: its arguments in order.
        peers: the same work in torch; the first, on float64 inputs, is the reference.
        goal: the ratio (time of the best peer over ours) to reach.
        tolerance: largest error allowed, relative to the largest element of the reference.
        note: how it differs from its origin.
        flops: floating-point operations, if multiply-adds bound it.
        moved: bytes that it must read and write, if memory bounds it.
        operands: bytes of its arguments and results.
        kernel: what is called, if not the operator of `source`, such as a tile kernel.
    """

    name: str
    family: str
    source: str
    inputs: tuple[Input, ...]
    peers: tuple[Peer, ...]
    goal: float | None = None
    tolerance: float = 1e-4
    note: str = ""
    flops: int = 0
    moved: int = 0
    operands: int = 0
    kernel: Callable[..., Outputs] | None = None

    def arguments(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Fresh arguments, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(i.make(generator) for i in self.inputs)


def floats(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Input, ...]:
    return tuple(Input(shape, dtype) for shape in shapes)


def peers(function: Callable[..., Outputs], **others: Callable[..., Outputs]) -> tuple[Peer, ...]:
    """The obvious formulation, also compiled, and the others under their names."""
    return (Peer("torch", function, compiled=True), *(Peer(name, f) for name, f in others.items()))


# --- contractions ------------------------------------------------------------------------------------------------


def contractions() -> Iterator[Benchmark]:
    mm = peers(torch.mm)
    for n in (256, 512, 777, 1024):
        yield Benchmark(f"matmul_{n}", "matmul", tc.MATMUL, floats((n, n), (n, n)), mm, goal=0.85)
    double = floats((512, 512), (512, 512), dtype=torch.float64)
    yield Benchmark("matmul_f64_512", "matmul", tc.MATMUL_F64, double, mm, tolerance=1e-12)
    tmm = peers(lambda a, b: a @ b.t(), linear=F.linear)
    for m, n, k in ((128, 32, 256), (128, 1024, 1024), (128, 4096, 16384)):
        yield Benchmark(f"tmm_{m}x{n}x{k}", "tmm", tc.TMM, floats((m, k), (n, k)), tmm)
    tbmm = peers(lambda x, y: torch.bmm(x, y.transpose(1, 2)), einsum=lambda x, y: torch.einsum("bnm,bkm->bnk", x, y))
    yield Benchmark("tbmm_500x26x72x26", "tbmm", tc.TBMM, floats((500, 26, 72), (500, 26, 72)), tbmm)
    yield Benchmark("c3_128x1024x1000", "C3", tc.C3, floats((128, 1024), (1000, 1024)), tmm)
    kronecker = peers(kronecker_einsum, matmul=kronecker_matmul, path=kronecker_path)
    factors = floats((16, 16), (16, 16), (16, 16), (256, 16, 16, 16))
    yield Benchmark("kronecker_256x16^3", "kronecker", tc.KRONECKER, factors, kronecker, goal=0.9)


def kronecker_einsum(w0: Tensor, w1: Tensor, w2: Tensor, x: Tensor) -> Tensor:
    t2 = torch.einsum("mabc,zc->mabz", x, w2)
    t1 = torch.einsum("mabz,yb->mayz", t2, w1)
    return torch.einsum("mayz,xa->mxyz", t1, w0)


def kronecker_matmul(w0: Tensor, w1: Tensor, w2: Tensor, x: Tensor) -> Tensor:
    m, n0 = x.shape[:2]
    t2 = x @ w2.t()
    t1 = w1 @ t2
    return (w0 @ t1.reshape(m, n0, -1)).view(m, w0.shape[0], w1.shape[0], w2.shape[0])


def kronecker_path(w0: Tensor, w1: Tensor, w2: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("mabc,xa,yb,zc->mxyz", x, w0, w1, w2)


# --- layers ------------------------------------------------------------------------------------------------------


def layers() -> Iterator[Benchmark]:
    mlp1 = peers(lambda x, w, b: F.relu(F.linear(x, w, b)), in_place=lambda x, w, b: torch.addmm(b, x, w.t()).relu_())
    yield Benchmark("mlp1_128x2000x128", "MLP1", tc.MLP1, floats((128, 2000), (128, 2000), (128,)), mlp1, goal=0.9)
    weights = ((64, 128), (64,), (32, 64), (32,), (2, 32), (2,))
    yield Benchmark(
        "mlp3_128x128x64x32x2", "MLP3", tc.MLP3, floats((128, 128), *weights), peers(mlp3, in_place=mlp3_in_place),
        goal=1.5,
    )  # fmt: skip
    for groups, channels, size in ((32, 16, 14), (32, 4, 56)):
        grouped = ((32, groups, channels, size, size), (groups, channels, channels, 3, 3), (groups, channels))
        name = f"gconv_32x{groups}x{channels}x{size}"
        yield Benchmark(name, "gconv", tc.GCONV, floats(*grouped), peers(gconv, channels_last=gconv_last))
    conv = peers(F.conv2d, channels_last=conv_last)
    for name, shapes in (
        ("conv_8x64x56_3x3x64", ((8, 64, 56, 56), (64, 64, 3, 3), (64,))),
        ("conv_8x256x28_1x1x64", ((8, 256, 28, 28), (64, 256, 1, 1), (64,))),
        ("conv_4x128x14_3x3x128", ((4, 128, 14, 14), (128, 128, 3, 3), (128,))),
    ):
        yield Benchmark(name, "conv2d", tc.CONV2D, floats(*shapes), conv)
    strided = peers(lambda x, w, b: F.conv2d(x, w, b, stride=2))
    first = floats((4, 3, 224, 224), (64, 3, 7, 7), (64,))
    yield Benchmark("conv_4x3x224_7x7x64_s2", "conv2d", tc.CONV2D_STRIDE2, first, strided)
    yield from lookups()


def lookups() -> Iterator[Benchmark]:
    rows, dim, batch, words = 1_000_000, 64, 128, 50
    table, index = Input((rows, dim)), Input((batch, words), torch.int32, rows)
    note = "1e6 rows per table; the paper has 1e7"
    bags = {"index": lambda t, i: t[i].sum(1), "embedding": lambda t, i: F.embedding(i, t).sum(1)}
    one = peers(lambda t, i: F.embedding_bag(i, t, mode="sum"), **bags)
    yield Benchmark("lut1_1e6x64", "1LUT", tc.LUT1, (table, index), one, note=note)
    both = peers(
        lambda t, u, i, j: (F.embedding_bag(i, t, mode="sum"), F.embedding_bag(j, u, mode="sum")),
        index=lambda t, u, i, j: (t[i].sum(1), u[j].sum(1)),
    )
    inputs = (table, table, index, index)
    yield Benchmark("lut2_1e6x64", "2LUT", tc.LUT2, inputs, both, goal=0.9, note=note)


def mlp3(x: Tensor, w2: Tensor, b2: Tensor, w3: Tensor, b3: Tensor, w4: Tensor, b4: Tensor) -> Tensor:
    return F.relu(F.linear(F.relu(F.linear(F.relu(F.linear(x, w2, b2)), w3, b3)), w4, b4))


def mlp3_in_place(x: Tensor, w2: Tensor, b2: Tensor, w3: Tensor, b3: Tensor, w4: Tensor, b4: Tensor) -> Tensor:
    hidden = torch.addmm(b3, torch.addmm(b2, x, w2.t()).relu_(), w3.t()).relu_()
    return torch.addmm(b4, hidden, w4.t()).relu_()


def gconv(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    n, g, c, *size = x.shape
    out = F.conv2d(x.reshape(n, g * c, *size), w.flatten(0, 1), b.flatten(), groups=g)
    return out.view(n, g, -1, *out.shape[2:])


def gconv_last(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    n, g, c, *size = x.shape
    last = x.reshape(n, g * c, *size).contiguous(memory_format=torch.channels_last)
    out = F.conv2d(last, w.flatten(0, 1), b.flatten(), groups=g).contiguous()
    return out.view(n, g, -1, *out.shape[2:])


def conv_last(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(x.contiguous(memory_format=torch.channels_last), w, b).contiguous()


# --- normalizations and reductions -------------------------------------------------------------------------------


def norms() -> Iterator[Benchmark]:
    rows, dim = 4096, 1024
    softmax = peers(lambda x: torch.softmax(x, 1), manual=manual_softmax)
    yield Benchmark("softmax_4096x1024", "softmax", tc.SOFTMAX, floats((rows, dim)), softmax, goal=1.0)
    layer = peers(lambda x, w, b: F.layer_norm(x, w.shape, w, b))
    yield Benchmark(
        "layernorm_4096x1024", "layernorm", tc.LAYERNORM, floats((rows, dim), (dim,), (dim,)), layer, goal=1.0
    )
    gated = peers(
        lambda x, g, w: F.rms_norm(x, w.shape, w, 1e-6) * F.silu(g),
        manual=lambda x, g, w: x * torch.rsqrt(x.square().mean(1, True) + 1e-6) * w * F.silu(g),
    )
    yield Benchmark(
        "rmsnorm_swiglu_4096x1024", "RMSNorm-SwiGLU", tc.RMSNORM_SWIGLU,
        floats((rows, dim), (rows, dim), (dim,)), gated, goal=1.0,
    )  # fmt: skip
    moments = peers(
        var_mean,
        apart=lambda x: (x.mean(1), x.var(1, correction=0)),
        squares=mean_of_squares,
        dot=mean_of_dot,
    )
    yield Benchmark("moments_128x36864", "moments", tc.MOMENTS, floats((128, 36864)), moments, goal=1.0)
    batch = peers(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), manual=manual_batch_norm)
    for shape in ((16, 64, 56, 56), (32, 256, 14, 14)):
        inputs = floats(shape, shape[1:2], shape[1:2])
        yield Benchmark(f"batchnorm_{'x'.join(map(str, shape))}", "batch norm", tc.BATCHNORM, inputs, batch)
    group = peers(group_norm)
    for n, g, d, size in ((4, 32, 16, 12), (8, 32, 8, 56)):
        inputs = floats((n, g, d, size, size), (g, d), (g, d))
        yield Benchmark(f"groupnorm_{n}x{g}x{d}x{size}", "group norm", tc.GROUPNORM, inputs, group)


def manual_softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(1, True))
    return e / e.sum(1, True)


def var_mean(x: Tensor) -> Outputs:
    variance, mean = torch.var_mean(x, 1, correction=0)
    return mean, variance


def mean_of_squares(x: Tensor) -> Outputs:
    mean = x.mean(1)
    return mean, x.square().mean(1) - mean.square()


def mean_of_dot(x: Tensor) -> Outputs:
    mean = x.mean(1)
    return mean, torch.linalg.vector_norm(x, dim=1).square() / x.shape[1] - mean.square()


def manual_batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    scale = torch.rsqrt(variance + 1e-5) * w
    return x * scale[:, None, None] + (b - mean * scale)[:, None, None]


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    n, g, d, *size = x.shape
    return F.group_norm(x.view(n, g * d, *size), g, w.flatten(), b.flatten()).view(x.shape)


# --- movement and pointwise --------------------------------------------------------------------------------------


def movements() -> Iterator[Benchmark]:
    image = (16, 64, 112, 112)
    most = peers(lambda x: F.max_pool2d(x, 2), amax=lambda x: x.unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5)))
    yield Benchmark("maxpool_2x2_16x64x112", "pooling", tc.MAXPOOL, floats(image), most)
    mean = peers(lambda x: F.avg_pool2d(x, 3, 1))
    yield Benchmark("avgpool_3x3_16x64x56", "pooling", tc.AVGPOOL, floats((16, 64, 56, 56)), mean)
    flip = peers(lambda x: x.t().contiguous(), copy=lambda x: x.new_empty(x.shape[::-1]).copy_(x.t()))
    for m, n in ((2048, 2048), (4096, 1024), (512, 512)):
        yield Benchmark(f"transpose_{m}x{n}", "transpose", tc.TRANSPOSE, floats((m, n)), flip, goal=0.95)
    heads = peers(lambda x: x.transpose(1, 2).contiguous())
    yield Benchmark("heads_8x512x16x64", "transpose", tc.HEADS, floats((8, 512, 16, 64)), heads, goal=0.95)
    last = peers(lambda x: x.permute(0, 2, 3, 1).contiguous())
    yield Benchmark("channels_last_16x64x56", "transpose", tc.CHANNELS_LAST, floats((16, 64, 56, 56)), last, goal=0.95)
    clone = peers(torch.clone, copy=lambda x: torch.empty_like(x).copy_(x))
    for m, n in ((2048, 2048), (512, 256)):
        yield Benchmark(f"copy_{m}x{n}", "copy", tc.COPY, floats((m, n)), clone, goal=0.95)


def pointwise() -> Iterator[Benchmark]:
    plane = (2048, 2048)
    gelu = peers(lambda x: F.gelu(x, approximate="tanh"), manual=manual_gelu)
    yield Benchmark("gelu_tanh_2048", "pointwise", tc.GELU_TANH, floats(plane), gelu, goal=1.0)
    residual = peers(lambda x, r: r + F.gelu(x), in_place=lambda x, r: F.gelu(x).add_(r))
    yield Benchmark("gelu_residual_2048", "pointwise", tc.GELU_RESIDUAL, floats(plane, plane), residual, goal=1.0)
    chain = peers(lambda a, b, c: torch.tanh(a * b + c), in_place=lambda a, b, c: torch.addcmul(c, a, b).tanh_())
    yield Benchmark("mul_add_tanh_2048", "pointwise", tc.MUL_ADD_TANH, floats(plane, plane, plane), chain, goal=1.0)
    bias = peers(lambda x, b, r: F.relu(x + b) + r, in_place=lambda x, b, r: torch.add(x, b).relu_().add_(r))
    yield Benchmark("bias_relu_add_2048", "pointwise", tc.BIAS_RELU_ADD, floats(plane, (2048,), plane), bias, goal=1.0)
    add = peers(torch.add)
    yield Benchmark("add_2048", "pointwise", tc.ADD, floats(plane, plane), add, goal=1.0)


def manual_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


BENCHMARKS: tuple[Benchmark, ...] = (*contractions(), *layers(), *norms(), *movements(), *pointwise())


def outputs(value: Any) -> tuple[Tensor, ...]:
    """The results of a call as a tuple, however many there are."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
