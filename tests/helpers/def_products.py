"""Defs with products for tensor cores, their arguments, and what they give by the reference evaluator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.compiler.gpu_passes import CompiledGpuKernel
from tensor_comprehensions.core.knobs import override_knobs
from tensor_comprehensions.dispatch.call_steps import canonical_strides, normalize_arguments, shapes_of, with_strides
from tensor_comprehensions.dispatch.cuda.gpu_kernels import GpuKernel
from tensor_comprehensions.dispatch.cuda.mixed_plan import run_emulated
from tensor_comprehensions.options import TileOptions
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.tc_lang.ir import BoundFunction
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

TARGET = "cuda:sm_80"
SMALL = TileOptions(tile=(32, 32, 32), warps=(2, 1), stages=2)
SEED = 20


@dataclass(frozen=True)
class ProductCase:
    """A def called `f` of one text, for tensors of these sizes; `dtypes` differ from float16 where they are given.

    initial: the sizes of the in/out output. strided: arguments of which every second element is taken.
    """

    name: str
    text: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ()
    initial: tuple[int, ...] | None = None
    strided: tuple[int, ...] = ()
    options: TileOptions = field(default=SMALL)

    def arguments(self) -> list[Tensor]:
        """Small whole numbers, whose products and sums are exact."""
        types = self.dtypes or ("float16",) * len(self.shapes)
        found = [whole(s, d, SEED + n) for n, (s, d) in enumerate(zip(self.shapes, types, strict=True))]
        for n in self.strided:
            wide = torch.empty((*found[n].shape[:-1], 2 * found[n].shape[-1]), dtype=found[n].dtype)
            found[n] = wide[..., ::2].copy_(found[n])
        return found

    def initial_values(self) -> dict[str, Tensor]:
        return {} if self.initial is None else {"C": whole(self.initial, "float16", 1)}

    def compile(self, options: TileOptions | None, target: str = TARGET) -> GpuKernel:
        kernel = self.op.compile(*self.arguments(), options=options, target=target, **self.initial_values())
        assert isinstance(kernel, GpuKernel)
        return kernel

    def bind(self) -> BoundFunction:
        """The def as divisions take it."""
        return bind_legalized(self.op, self.arguments(), self.initial_values())

    @property
    def op(self) -> tc.Op:
        found: tc.Op = tc.define(self.text).f
        return found

    def expected(self) -> Tensor:
        with override_knobs(interpret=True):
            found: Tensor = self.op(*self.arguments(), **self.initial_values())
        return found


def bind_legalized(op: tc.Op, arguments: Sequence[Tensor], initial: Mapping[str, Tensor]) -> BoundFunction:
    """The def that a call compiles, legalized, without compiling it."""
    table = op._kernels
    given = normalize_arguments(table.call_signature, list(arguments), initial)
    bound = table.bind(shapes_of(op.function, given))
    return legalize(with_strides(bound, tuple(map(canonical_strides, given.inputs))))


def cuda_text(kernel: GpuKernel) -> str:
    """The text that NVRTC gets; `source` lowers the def again for it."""
    assert isinstance(kernel.compiled, CompiledGpuKernel)
    return kernel.compiled.code.source


def count_kernels(kernel: GpuKernel) -> tuple[int, int]:
    """The number of kernels and the bytes of temporaries; `resources` assembles the text, too."""
    assert isinstance(kernel.compiled, CompiledGpuKernel)
    return len(kernel.compiled.code.kernels), sum(b.bytes for b in kernel.compiled.temporaries)


def whole(shape: Sequence[int], dtype: str, seed: int) -> Tensor:
    """Small whole numbers."""
    least = 0 if dtype.startswith("u") else -2
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(least, 3, tuple(shape), generator=generator).to(getattr(torch, dtype))


def emulate_all(kernels: Sequence[tuple[ProductCase, GpuKernel]]) -> list[Tensor]:
    """What each kernel gives, by its own text; all of them are compiled together."""
    built = emulator.build_emulated([k.compiled.code for _, k in kernels])  # type: ignore[union-attr]
    results = []
    for (case, kernel), emulated in zip(kernels, built, strict=True):
        bound = kernel.compiled.bound
        (output,) = (bound.tensor(name) for name in bound.returns)
        out = torch.empty(output.shape, dtype=getattr(torch, output.dtype.name))
        for value in case.initial_values().values():
            out.copy_(value)
        assert run_emulated(kernel.compiled, emulated, [*case.arguments(), out]) == (0, 0), case.name  # type: ignore[arg-type]
        results.append(out)
    return results


def random_group_options(rng: Random) -> TileOptions:
    """Legal options for warpgroups of sm_90."""
    groups = rng.choice([1, 1, 2, 3])
    rows = 64 * groups * rng.choice([1, 2])
    tile = (rows, rng.choice([16, 32, 64, 128]), rng.choice([32, 64, 128]))
    warpgroups = rng.choice(["", "together", "staggered"]) if groups == 2 else ""
    return TileOptions(
        tile, (4 * groups, 1), rng.choice([0, 2, 3, 5]), rng.choice([0, 1, 2]), instruction="wgmma",
        cluster=rng.choice([0, 1, 2]), warpgroups=warpgroups,
    )  # fmt: skip


def random_options(rng: Random) -> TileOptions:
    """Legal options with tiles that small sizes have several of."""
    warps = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2)])
    tile = (16 * warps[0] * rng.choice([1, 2]), 8 * warps[1] * rng.choice([1, 2, 4]), rng.choice([32, 64]))
    return TileOptions(tile, warps, stages=rng.choice([0, 2, 3, 4]), group=rng.choice([0, 1, 2, 8]))


def matmul(a: str, b: str, c: str, dtype: str = "float16") -> str:
    """A product of factors with these subscripts."""
    wide = "int32" if "int" in dtype else ""
    left, right = (f"{wide}({x}({s}))" if wide else f"{x}({s})" for x, s in (("A", a), ("B", b)))
    sizes = [s.upper() for s in (a, b)]
    return f"def f({dtype}({sizes[0]}) A, {dtype}({sizes[1]}) B) -> (C) {{ C({c}) +=! {left} * {right} }}"


def same(case: str, text: str, *shapes: tuple[int, ...], dtype: str = "float16") -> ProductCase:
    return ProductCase(case, text, shapes, (dtype,) * len(shapes))


BIAS = """def f(float16(M,K) A, float16(N,K) B, float16(N) b, float16(M,N) R) -> (C) {
    C(m,n) +=! A(m,k) * B(n,k)
    C(m,n) = fmax(C(m,n) + b(n), 0) + R(m,n)
}"""
MLP = """def f(float16(B,M) I, float16(N,M) W, float16(N) b) -> (O) {
    O(i,n) = b(n)
    O(i,n) += I(i,m) * W(n,m)
    O(i,n) = fmax(O(i,n), 0)
}"""
IN_OUT = "def f(float16(M,K) A, float16(K,N) B) -> (float16(M,N) C) { C(m,n) += A(m,k) * B(k,n) }"
SCALED = """def f(int8(M,K) A, int8(N,K) B, float(N) s) -> (C) {
    T(m,n) +=! int32(A(m,k)) * int32(B(n,k))
    C(m,n) = float(T(m,n)) * s(n)
}"""
CONVOLUTION = """def f(float16(B,C,H,W) I, float16(O,C,KH,KW) w) -> (out) {
    out(b,o,h,v) +=! I(b,c,h+kh,v+kw) * w(o,c,kh,kw)
}"""
CHANNELS_LAST = """def f(float16(B,H,W,C) I, float16(O,KH,KW,C) w) -> (out) {
    out(b,h,v,o) +=! I(b,2*h+kh,2*v+kw,c) * w(o,kh,kw,c)
}"""
PADDED = """def f(float16(B,H,W,C) I, float16(O,3,3,C) w) -> (out) {
    out(b,h,v,o) +=! (h+y >= 1 && h+y < H+1 && v+x >= 1 && v+x < W+1 ? I(b,h+y-1,v+x-1,c) : 0) * w(o,y,x,c)
        where h in 0:H, v in 0:W, y in 0:3, x in 0:3
}"""
ROUNDED = """def f(float(I,J) P, float16(J,D) V) -> (O) {
    O(i,d) +=! float(half(P(i,j) * 2)) * float(V(j,d))
}"""
TF32 = """def f(float(M,K) A, float(N,K) B, float(N) b) -> (C) {
    C(m,n) +=! tf32(A(m,k) * 2) * tf32(B(n,k))
    C(m,n) = fmax(C(m,n) + b(n), 0)
}"""
TF32_ACROSS = "def f(float(K,M) A, float16(K,N) B) -> (C) { C(m,n) +=! tf32(A(k,m)) * float(B(k,n)) }"
TF32_TWO = """def f(float(M,K) A, float(N,K) B, float(M,L) D, float(N,L) E) -> (C) {
    C(m,n) +=! tf32(A(m,k)) * tf32(B(n,k))
    C(m,n) += tf32(D(m,l)) * tf32(E(n,l))
}"""
MIXED = """def f(float16(M,K) A, float16(N,K) B, float(M,N) D) -> (C) {
    T(m,n) +=! float(A(m,k)) * float(B(n,k))
    S(m) +=! T(m,n)
    C(m,n) = T(m,n) - S(m) + D(m,n)
}"""
MASKED = """def f(float16(M,K) A, float16(N,K) B) -> (C) {
    T(m,n) +=! float(A(m,k)) * float(B(n,k))
    C(m,n) = m >= n ? T(m,n) * 2 : -1000.0
}"""
TWO = """def f(float16(M,K) A, float16(N,K) B, float16(L,M) D, float16(L,N) E) -> (C) {
    C(m,n) +=! float(A(m,k)) * float(B(n,k))
    C(m,n) += float(D(l,m)) * float(E(l,n))
}"""
GATES = """def f(float16(M,K) A, float16(N,K) B, float16(M,L) D, float16(N,L) E, float(N) b) -> (C) {
    T(m,n) = b(n)
    T(m,n) += float(A(m,k)) * float(B(n,k))
    T(m,n) += float(E(n,k)) * float(D(m,k))
    C(m,n) = half(fmin(T(m,n), 9))
}"""
CHECKED = """def f(float16(R,K) T, uint8(M) I, float16(N,K) W, uint8(N) J) -> (C) {
    X(m,k) = T(I(m),k)
    P(m,n) +=! float(X(m,k)) * float(W(n,k))
    C(m,n) = P(m,J(n))
}"""
CONTRACTION = """def f(float16(A,E,B,F) X, float16(F,D,E) Y) -> (C) {
    C(b,d,a) +=! X(a,e,b,f) * Y(f,d,e)
}"""
VECTOR = "def f(float16(M,K) A, float16(K) x) -> (y) { y(m) +=! A(m,k) * x(k) }"
VECTORS = "def f(float16(Z,K,M) A, float16(Z,K) x) -> (y) { y(z,m) +=! x(z,k) * A(z,k,m) }"
CHECKED_END = """def f(float16(M,K) A, float16(N,K) B, float16(R,N) t, uint8(M) I) -> (C) {
    T(m,n) +=! float(A(m,k)) * float(B(n,k))
    S(m,n) = T(m,n) * 0.5
    C(m,n) = S(m,n) + float(t(I(m),n))
}"""
CHECKED_START = """def f(float16(M,K) A, float16(N,K) B, float16(R,N) t, uint8(M) I) -> (C) {
    T(m,n) = float(t(I(m),n))
    T(m,n) += float(A(m,k)) * float(B(n,k))
    C(m,n) = T(m,n) * 0.5
}"""
SWIGLU = """def f(float16(M,K) X, float16(N,K) W, float16(N,K) V) -> (O) {
    G(m,n) +=! float(X(m,k)) * float(W(n,k))
    H(m,n) +=! float(X(m,k)) * float(V(n,k))
    O(m,n) = half(fmax(G(m,n),0) * H(m,n))
}"""
HALVES = """def f(float16(M,K) X, float16(K,N) W, float16(K,N) V, float16(N) b) -> (O) {
    G(i,n) +=! X(i,k) * W(k,n)
    G(i,n) = fmin(G(i,n) + b(n), 20)
    H(m,j) = b(j)
    H(m,j) += X(m,l) * V(l,j)
    O(m,n) = fmax(G(m,n),0) + H(m,n)
}"""
THREE = """def f(float16(Z,M,K) X, float16(Z,N,K) W, float16(Z,N,K) V, float16(Z,N,K) U, float(M) s) -> (O) {
    G(z,m,n) +=! float(X(z,m,k)) * float(W(z,n,k))
    H(z,m,n) +=! float(X(z,m,k)) * float(V(z,n,k))
    H(z,m,n) = G(z,m,n) - H(z,m,n)
    I(z,m,n) +=! float(X(z,m,k)) * float(U(z,n,k))
    O(z,m,n) = I(z,m,n) + H(z,m,n) * s(m)
}"""
ELSE = """def f(float16(M,K) X, float16(N,K) W, float16(N,K) V) -> (O) {
    G(m,n) +=! float(X(m,k)) * float(W(n,k))
    H(m,n) +=! float(X(m,k)) * float(V(n,k))
    P(m,n) = G(m,n) * H(m,n)
    O(m,n) = P(m,n) + G(m,N-1-n)
}"""

ANY_TARGET = (
    same("swiglu", SWIGLU, (70, 64), (48, 64), (48, 64)),
    same("halves", HALVES, (70, 64), (64, 48), (64, 48), (48,)),
    ProductCase(
        "three", THREE, ((2, 70, 64), (2, 48, 64), (2, 48, 64), (2, 48, 64), (70,)), ("float16",) * 4 + ("float32",)
    ),
    same("elsewhere", ELSE, (70, 64), (48, 64), (48, 64)),
    same("row", matmul("m,k", "n,k", "m,n"), (1, 64), (72, 64)),
    same("vector", VECTOR, (70, 64), (64,)),
    same("vectors", VECTORS, (3, 64, 72), (3, 64)),
    *(
        ProductCase(name, text, ((70, 64), (48, 64), (5, 48), (70,)), ("float16",) * 3 + ("uint8",))
        for name, text in (("checked_end", CHECKED_END), ("checked_start", CHECKED_START))
    ),
)

GELU = """def f(bfloat16(M,K) A, bfloat16(N,K) B, bfloat16(N) b, bfloat16(M,N) R) -> (C) {
    S(m,n) +=! float(A(m,k)) * float(B(n,k))
    T(m,n) = S(m,n) + float(b(n))
    C(m,n) = bfloat16(0.5 * T(m,n) * (1 + erf(T(m,n) * 0.70710678)) + float(R(m,n)))
}"""

CASES = (
    *ANY_TARGET,
    same("nt", matmul("m,k", "n,k", "m,n"), (70, 40), (50, 40)),
    same("tn", matmul("k,m", "k,n", "m,n"), (40, 64), (40, 48)),
    same("nn_odd", matmul("m,k", "k,n", "m,n"), (33, 37), (37, 35)),
    same("tt_bfloat16", matmul("k,m", "n,k", "n,m", "bfloat16"), (40, 24), (50, 40), dtype="bfloat16"),
    same("batch", matmul("z,m,k", "z,k,n", "z,n,m"), (3, 20, 19), (3, 19, 33)),
    same("batch_of_one_factor", matmul("z,m,k", "k,n", "z,m,n"), (3, 5, 24), (24, 16)),
    same("unit_dimensions", matmul("m,k,y,z", "z,n,k,y", "z,m,n,y"), (16, 16, 1, 1), (1, 16, 16, 1)),
    same("int8", matmul("m,k", "n,k", "m,n", "int8"), (33, 70), (20, 70), dtype="int8"),
    same("uint8_across", matmul("k,m", "k,n", "m,n", "uint8"), (64, 32), (64, 24), dtype="uint8"),
    ProductCase("int8_scaled", SCALED, ((40, 64), (24, 64), (24,)), ("int8", "int8", "float32")),
    ProductCase("strided", matmul("m,k", "n,k", "m,n"), ((30, 20), (20, 20)), strided=(0,)),
    same("epilogue", BIAS, (40, 32), (48, 32), (48,), (40, 48)),
    same("mlp", MLP, (20, 33), (40, 33), (40,)),
    ProductCase("in_out", IN_OUT, ((33, 40), (40, 50)), initial=(33, 50)),
    same("convolution", CONVOLUTION, (2, 4, 9, 9), (5, 4, 3, 3)),
    same("channels_last", CHANNELS_LAST, (2, 9, 9, 8), (16, 3, 3, 8)),
    same("padded", PADDED, (2, 5, 5, 8), (16, 3, 3, 8)),
    ProductCase("tf32", TF32, ((33, 40), (50, 40), (50,)), ("float32",) * 3),
    ProductCase("tf32_across", TF32_ACROSS, ((40, 36), (40, 24)), ("float32", "float16")),
    ProductCase("tf32_products", TF32_TWO, ((20, 33), (24, 33), (20, 40), (24, 40)), ("float32",) * 4),
    ProductCase("rounded", ROUNDED, ((20, 24), (24, 16)), ("float32", "float16")),
    ProductCase("mixed", MIXED, ((33, 40), (50, 40), (33, 50)), ("float16", "float16", "float32")),
    same("masked", MASKED, (33, 40), (50, 40)),
    same("two_products", TWO, (40, 50), (48, 50), (33, 40), (33, 48)),
    ProductCase("gates", GATES, ((40, 50), (48, 50), (40, 34), (48, 34), (48,)), ("float16",) * 4 + ("float32",)),
    ProductCase("checked", CHECKED, ((5, 40), (33,), (20, 40), (20,)), ("float16", "uint8", "float16", "uint8")),
    same("contraction", CONTRACTION, (6, 5, 7, 4), (4, 9, 5)),
    ProductCase("split", matmul("m,k", "n,k", "m,n"), ((20, 256), (24, 256)), options=TileOptions(split=2)),
)

SLICED = """def f(float16(M,K) A, float16(N,L) B, float16(P,Q) r) -> (float16(M,N) C) {
    C(m,n) +=! A(m,k) * B(n,k+16) where k in 0:64
    C(m,n) = half(fmin(C(m,n), 40) * 0.5 + float(r(m+2,n+8)))
}"""
SAME_WAY = """def f(bfloat16(M,K) A, bfloat16(N,K) B, bfloat16(M,L) D, bfloat16(N,L) E, float(N) b) -> (C) {
    T(m,n) = b(n)
    T(m,n) += float(A(m,k)) * float(B(n,k))
    T(m,n) += float(E(n,k)) * float(D(m,k))
    C(m,n) = bfloat16(fmin(T(m,n), 9))
}"""
WINDOW = """def f(float16(B,H,W,C) I, float16(O,KH,KW,C) w) -> (out) {
    out(b,h,v,o) +=! I(b,h+kh,v+kw,c) * w(o,kh,kw,c)
}"""
STRIDED_WINDOW = WINDOW.replace("h+kh,v+kw", "2*h+kh,2*v+kw")
SEVERAL = """def f(float16(A,B,E,F) X, float16(D,E,G,F) Y) -> (C) { C(b,a,d,g) +=! X(a,b,e,f) * Y(d,e,g,f) }"""
DIAGONAL = """def f(float16(Z,Z,M,K) A, float16(Z,N,K) B) -> (C) { C(m,z,n) +=! A(z,z,m,k) * B(z,n,k) }"""

COMPUTED = """def f(float(M,K) P, float16(N,K) V, float(M) s) -> (O) {
    O(m,n) +=! float(half(P(m,k) * s(m))) * float(V(n,k))
}"""
PADDED_WINDOW = """def f(float16(B,H,W,C) I, float16(O,3,3,C) w) -> (out) {
    out(b,h,v,o) +=! (h+y >= 1 && h+y < H+1 && v+x >= 1 && v+x < W+1 ? I(b,h+y-1,v+x-1,c) : 0) * w(o,y,x,c)
        where h in 0:H, v in 0:W, y in 0:3, x in 0:3
}"""
MIXED_BYTES = matmul("m,k", "n,k", "m,n", "int8").replace("int8(N", "uint8(N")

GROUP_CASES = (
    *ANY_TARGET,
    same("nt", matmul("m,k", "n,k", "m,n"), (200, 72), (88, 72)),
    same("int8", matmul("m,k", "n,k", "m,n", "int8"), (130, 80), (72, 80), dtype="int8"),
    ProductCase("mixed_bytes", MIXED_BYTES, ((70, 80), (40, 80)), ("int8", "uint8")),
    ProductCase("int8_scaled", SCALED, ((70, 160), (40, 160), (40,)), ("int8", "int8", "float32")),
    same("nn_bfloat16", matmul("m,k", "k,n", "m,n", "bfloat16"), (130, 136), (136, 80), dtype="bfloat16"),
    same("tn", matmul("k,m", "k,n", "m,n"), (72, 136), (72, 64)),
    same("tt", matmul("k,m", "n,k", "m,n"), (72, 136), (40, 72)),
    same("odd", matmul("m,k", "n,k", "m,n"), (33, 64), (35, 64)),
    same("batch", matmul("z,m,k", "z,k,n", "z,m,n"), (3, 70, 40), (3, 40, 48)),
    same("diagonal", DIAGONAL, (3, 3, 70, 64), (3, 48, 64)),
    same("several", SEVERAL, (6, 16, 3, 64), (9, 3, 8, 64)),
    same("window", WINDOW, (2, 10, 10, 64), (24, 3, 3, 64)),
    same("strided_window", STRIDED_WINDOW, (2, 13, 15, 64), (24, 3, 3, 64)),
    same("sliced", SLICED, (100, 80), (56, 80), (103, 72)),
    same("epilogue", BIAS, (100, 64), (56, 64), (56,), (100, 56)),
    ProductCase("in_out", IN_OUT, ((70, 64), (64, 56)), initial=(70, 56)),
    ProductCase(
        "same_way", SAME_WAY, ((70, 64), (48, 64), (70, 96), (48, 96), (48,)), ("bfloat16",) * 4 + ("float32",)
    ),
    ProductCase("mixed", MIXED, ((70, 64), (48, 64), (70, 48)), ("float16", "float16", "float32")),
    ProductCase("masked", MASKED, ((70, 64), (72, 64))),
    ProductCase("computed", COMPUTED, ((70, 72), (48, 72), (70,)), ("float32", "float16", "float32")),
    same("padded_window", PADDED_WINDOW, (2, 6, 7, 64), (24, 3, 3, 64)),
    ProductCase("many_tiles", matmul("m,k", "n,k", "m,n"), ((1024, 64), (144, 64))),
)
"""Those that warpgroups of sm_90 take, whatever the tile."""
