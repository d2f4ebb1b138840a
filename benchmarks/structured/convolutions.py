"""Convolutions and pooling: of the structured-code-generation paper, of ResNet-50, MobileNet, ResNeXt and others.

No convolution is padded at its borders; `size` is that of the output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import Benchmark, Peer, floats

SIZES = json.loads((Path(__file__).parent / "sizes.json").read_text())
FLOAT = 4
CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@dataclass(frozen=True, slots=True)
class Convolution:
    """One convolution of `batch` images.

    Attributes:
        channels, filters: of the input and of the output, over all groups. groups equal to both: depthwise.
        size, window: one extent per spatial dimension.
        last: channels are the last dimension of images and filters the last of weights (NHWC and HWCF).
        finish: adds a bias and takes the positive part.
    """

    family: str
    batch: int
    channels: int
    filters: int
    size: tuple[int, ...]
    window: tuple[int, ...]
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    last: bool = False
    finish: bool = False

    @property
    def depthwise(self) -> bool:
        return self.groups == self.channels == self.filters

    @property
    def name(self) -> str:
        sizes = [self.channels, *(() if self.depthwise else (self.filters,))]
        parts = [self.family, f"{self.batch}x{'x'.join(map(str, self.size))}", "x".join(map(str, sizes))]
        parts.append("k" + "x".join(map(str, self.window)))
        parts += [f"g{self.groups}"] if 1 < self.groups < self.channels else []
        parts += [f"s{self.stride}"] if self.stride > 1 else []
        return "_".join(parts + ([f"d{self.dilation}"] if self.dilation > 1 else []))

    @property
    def image(self) -> tuple[int, ...]:
        """Spatial extents of the input."""
        pairs = zip(self.size, self.window, strict=True)
        return tuple((n - 1) * self.stride + (k - 1) * self.dilation + 1 for n, k in pairs)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the input, of the weights, and of the bias if there is one."""
        if self.depthwise:
            weights = (*self.window, self.channels) if self.last else (self.channels, *self.window)
        elif self.groups > 1:
            weights = (self.groups, self.filters // self.groups, self.channels // self.groups, *self.window)
        elif self.last:
            weights = (*self.window, self.channels, self.filters)
        else:
            weights = (self.filters, self.channels, *self.window)
        return self._tensor(self.channels, self.image), weights, *(((self.filters,),) if self.finish else ())

    def _tensor(self, channels: int, size: tuple[int, ...]) -> tuple[int, ...]:
        if self.last:
            return (self.batch, *size, channels)
        if self.groups > 1 and not self.depthwise:
            return (self.batch, self.groups, channels // self.groups, *size)
        return (self.batch, channels, *size)

    @property
    def source(self) -> str:
        axes = "whd"[: len(self.size)][::-1]
        outer, taps = list(axes), [f"k{a}" for a in axes]
        images = [f"{_times(self.stride, a)} + {_times(self.dilation, k)}" for a, k in zip(outer, taps, strict=True)]
        if self.depthwise:
            group, filters, channels = [], ["c"], ["c"]
            weights = [*taps, "c"] if self.last else ["c", *taps]
        else:
            group = ["g"] if self.groups > 1 else []
            filters, channels = ["f"], ["c"]
            weights = [*taps, "c", "f"] if self.last else [*group, "f", "c", *taps]
        output = ["n", *outer, *filters] if self.last else ["n", *group, *filters, *outer]
        read = ["n", *images, *channels] if self.last else ["n", *group, *channels, *images]
        return self._text(output, f"I({', '.join(read)}) * W({', '.join(weights)})", len(weights))

    def _text(self, output: list[str], product: str, rank: int) -> str:
        out = f"O({', '.join(output)})"
        kinds = [f"float({', '.join(f'{t}{d}' for d in range(n))})" for t, n in (("I", len(output)), ("W", rank))]
        if not self.finish:
            return f"def convolution({kinds[0]} I, {kinds[1]} W) -> (O) {{ {out} +=! {product} }}"
        body = f"{out} = B(f) {out} += {product} {out} = fmaxf({out}, 0)"
        return f"def convolution({kinds[0]} I, {kinds[1]} W, float(F) B) -> (O) {{ {body} }}"

    # --- torch ---

    def _torch(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """On torch's order of dimensions."""
        out = CONVOLVE[len(self.size)](x, w, b, self.stride, 0, self.dilation, self.groups)
        return torch.relu(out) if self.finish else out

    def _run(self, x: Tensor, w: Tensor, *b: Tensor) -> Tensor:
        """On images as ours takes them and weights in torch's order."""
        if self.last:
            return self._torch(x.movedim(-1, 1), w, *b).movedim(1, -1)
        if self.groups > 1 and not self.depthwise:
            out = self._torch(x.flatten(1, 2), w, *b)
            return out.view(out.shape[0], self.groups, -1, *out.shape[2:])
        return self._torch(x, w, *b)

    def _weights(self, w: Tensor) -> Tensor:
        if self.depthwise:
            return (w.movedim(-1, 0) if self.last else w).unsqueeze(1).contiguous()
        if self.last:
            return w.movedim((-1, -2), (0, 1)).contiguous()
        return w.flatten(0, 1) if self.groups > 1 else w

    def _prepared(self, x: Tensor, w: Tensor, *b: Tensor) -> tuple[Tensor, ...]:
        return x, self._weights(w), *b

    def _prepared_last(self, x: Tensor, w: Tensor, *b: Tensor) -> tuple[Tensor, ...]:
        return x, self._weights(w).contiguous(memory_format=LAST[len(self.size)]), *b

    @property
    def benchmark(self) -> Benchmark:
        peers = [Peer("torch", self._run, compiled=self.finish, prepare=self._prepared)]
        if self.last and len(self.size) in LAST:
            peers.append(Peer("weights last", self._run, prepare=self._prepared_last))
        output = self._tensor(self.filters, self.size)
        flops = 2 * prod(output) * prod(self.window) * self.channels // self.groups
        operands = FLOAT * sum(map(prod, (*self.shapes, output)))
        # A depthwise convolution does too little with each byte to be bound by multiply-adds.
        flops, moved = (0, operands) if self.depthwise else (flops, 0)
        return Benchmark(
            self.name, self.family, self.source, floats(*self.shapes), tuple(peers),
            goal=1.15 if self.finish else 1.0, flops=flops, moved=moved, operands=operands,
        )  # fmt: skip


def _times(factor: int, index: str) -> str:
    return index if factor == 1 else f"{factor} * {index}"


def convolutions() -> Iterator[Benchmark]:
    for case in (*_paper(), *_networks(), *_list_fused()):
        yield case.benchmark


def _paper() -> Iterator[Convolution]:
    """The sizes of the structured-code-generation paper, all with channels last."""
    for w, c, k, f, s, d in SIZES["conv_1d"]:
        yield Convolution("conv1d_nwc", 1, c, f, (w,), (k,), s, d, last=True)
    for w, c, k, f, s, d in SIZES["conv_2d"]:
        yield Convolution("conv2d_nhwc", 1, c, f, (w, w), (k, k), s, d, last=True)
    for level, widths in (("L1", (16, 32, 55, 128)), ("L2", (32, 64, 128)), ("L3", (256, 640, 2048))):
        for w, c, k, s, d in SIZES["depthwise_1d"][level]:
            if w in widths:
                yield Convolution("depthwise1d_nwc", 1, c, c, (w,), (k,), s, d, c, last=True)
    for w, c, k, s, d in SIZES["depthwise_2d"]:
        for last in (True, False):
            family = "depthwise2d_nhwc" if last else "depthwise2d_nchw"
            yield Convolution(family, 1, c, c, (w, w), (k, k), s, d, c, last=last)


def _networks() -> Iterator[Convolution]:
    """Layers of ResNet-50, ResNeXt, DeepLab, WaveNet-like and 3-D networks, mostly NCHW."""
    for c, f, size, k, s in (
        (64, 64, 56, 3, 1), (128, 128, 28, 3, 1), (256, 256, 14, 3, 1), (512, 512, 7, 3, 1), (128, 128, 28, 3, 2),
        (64, 256, 56, 1, 1), (256, 64, 56, 1, 1), (512, 128, 28, 1, 1), (256, 512, 28, 1, 2), (512, 2048, 7, 1, 1),
        (3, 64, 112, 7, 2), (32, 64, 55, 3, 1),
    ):  # fmt: skip
        for batch in (1, 8):
            yield Convolution("conv2d_nchw", batch, c, f, (size, size), (k, k), s)
    for c, f, size, k, s in ((64, 64, 56, 3, 1), (256, 64, 56, 1, 1), (256, 256, 14, 3, 1), (3, 64, 112, 7, 2)):
        yield Convolution("conv2d_nhwc", 4, c, f, (size, size), (k, k), s, last=True)
    for c, f, size, k, s, d in ((64, 64, 1000, 3, 1, 1), (64, 128, 500, 9, 1, 1), (128, 128, 256, 3, 2, 1),
                                (32, 32, 4000, 3, 1, 8), (1, 64, 8000, 16, 8, 1)):  # fmt: skip
        yield Convolution("conv1d_ncw", 4, c, f, (size,), (k,), s, d)
    for c, f, depth, size in ((3, 32, 8, 56), (32, 32, 8, 28), (64, 64, 8, 14)):
        yield Convolution("conv3d_ncdhw", 1, c, f, (depth, size, size), (3, 3, 3))
    yield Convolution("conv3d_ndhwc", 1, 32, 32, (8, 28, 28), (3, 3, 3), last=True)
    for c, groups, size in ((128, 32, 56), (256, 32, 28), (512, 32, 14), (64, 2, 28)):
        yield Convolution("grouped", 4, c, c, (size, size), (3, 3), groups=groups)
    for c, size, d in ((256, 28, 2), (128, 33, 6), (64, 56, 2)):
        yield Convolution("dilated", 1, c, c, (size, size), (3, 3), 1, d)
    for c, size, k, s in ((32, 112, 3, 1), (144, 56, 3, 2), (240, 28, 5, 1), (960, 7, 3, 1)):
        yield Convolution("depthwise2d_nchw", 4, c, c, (size, size), (k, k), s, groups=c)


def _list_fused() -> Iterator[Convolution]:
    for c, f, size, k, s in ((64, 64, 56, 3, 1), (256, 64, 28, 1, 1), (3, 64, 112, 7, 2), (128, 128, 28, 3, 1)):
        yield Convolution("conv_bias_relu", 4, c, f, (size, size), (k, k), s, finish=True)
    yield Convolution("conv_bias_relu", 1, 32, 64, (32, 32), (3, 3), last=True, finish=True)


# --- pooling -----------------------------------------------------------------------------------------------------


def pooling() -> Iterator[Benchmark]:
    """Largest and mean values of windows."""
    for k, s, shape, last in (
        (2, 2, (4, 64, 112, 112), False), (3, 2, (4, 64, 113, 113), False), (3, 1, (4, 128, 28, 28), False),
        (2, 2, (4, 112, 112, 64), True), (3, 2, (4, 57, 57, 128), True),
    ):  # fmt: skip
        yield _pool("max", k, s, shape, last)
        yield _pool("mean", k, s, shape, last)
    for last in (False, True):
        yield _whole_image((8, 7, 7, 2048) if last else (8, 2048, 7, 7), last)
    yield _whole_image((8, 64, 56, 56), False)


def _pool(kind: str, k: int, s: int, shape: tuple[int, ...], last: bool) -> Benchmark:
    out = "n, h, w, c" if last else "n, c, h, w"
    rows = f"{_times(s, 'h')} + kh, {_times(s, 'w')} + kw"
    read = f"x(n, {rows}, c)" if last else f"x(n, c, {rows})"
    value = f"max=! {read}" if kind == "max" else f"+=! {read} * {1 / k**2!r}"
    source = f"def pool(float(A,B,C,D) x) -> (y) {{ y({out}) {value} where kh in 0:{k}, kw in 0:{k} }}"
    pool: Callable[..., Tensor] = F.max_pool2d if kind == "max" else F.avg_pool2d
    peer = Peer("torch", lambda x: _images(pool, x, last, k, s), compiled=True)
    size = [(n - k) // s + 1 for n in (shape[1:3] if last else shape[2:])]
    results = prod((shape[0], shape[3 if last else 1], *size))
    moved = FLOAT * (prod(shape) + results)
    name = f"{kind}_{'x'.join(map(str, shape))}_k{k}_s{s}" + ("_nhwc" if last else "")
    return Benchmark(name, "pooling", source, floats(shape), (peer,), goal=1.0, moved=moved, operands=moved)


def _images(pool: Callable[..., Tensor], x: Tensor, last: bool, k: int, s: int) -> Tensor:
    return pool(x.movedim(-1, 1), k, s).movedim(1, -1) if last else pool(x, k, s)


def _whole_image(shape: tuple[int, ...], last: bool) -> Benchmark:
    read = "x(n, h, w, c)" if last else "x(n, c, h, w)"
    count = shape[1] * shape[2] if last else shape[2] * shape[3]
    source = f"def pool(float(A,B,C,D) x) -> (y) {{ y(n, c) +=! {read} * {1 / count!r} }}"
    peer = Peer("torch", lambda x: x.mean((1, 2) if last else (2, 3)), compiled=True)
    moved = FLOAT * (prod(shape) + shape[0] * shape[3 if last else 1])
    name = f"mean_{'x'.join(map(str, shape))}_whole" + ("_nhwc" if last else "")
    return Benchmark(name, "pooling", source, floats(shape), (peer,), goal=1.0, moved=moved, operands=moved)
