"""Chains of two products of a def as one kernel: two layers, attention; against the reference evaluator."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.errors import CannotLower
from tensor_comprehensions.dispatch.cuda.gpu_kernels import GpuKernel
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.options import TileOptions
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tc_lang.ir import BoundIndex, Inequality
from tensor_comprehensions.tiles.check.check_program import check_program
from tensor_comprehensions.tiles.check.shared_accesses import bank_turns
from tensor_comprehensions.tiles.lower.lower_tiles import lower_program
from tensor_comprehensions.tiles.products.lower_def import (
    DividedDef,
    buffers_of,
    divide_def,
    lower_divided,
    region_program,
)
from tensor_comprehensions.tiles.products.masked_steps import MaskedSteps

from ..helpers.def_products import bind_legalized, count_kernels, cuda_text

needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")
WARPS, GROUPS = TileOptions(instruction="mma"), TileOptions(instruction="wgmma")
TARGETS = (("cuda:sm_80", WARPS), ("cuda:sm_90", GROUPS))

LAYERS = """def f(half(M,K) X, half(N,K) W, half(N) b, half(P,N) V, half(P) c) -> (Y) {
    H(m,n) +=! X(m,k) * W(n,k)
    H(m,n) = fmax(H(m,n) + b(n), 0)
    Y(m,p) +=! H(m,n) * V(p,n)
    Y(m,p) = Y(m,p) + c(p)
}"""
ACROSS = """def f(bfloat16(K,M) X, bfloat16(K,N) W, bfloat16(N,P) V) -> (Y) {
    H(m,n) +=! float(X(k,m)) * float(W(k,n))
    Y(m,p) +=! float(bfloat16(fmax(H(m,n), 0) * 2)) * float(V(n,p))
}"""
SWAPPED = """def f(half(Z,M,K) X, half(Z,N,K) W, half(Z,P,N) V) -> (half(Z,M,P) Y) {
    H(z,n,m) +=! X(z,m,k) * W(z,n,k)
    Y(z,m,p) += H(z,n,m) * V(z,p,n)
}"""
ATTENTION = """def f(half(Z,I,D) Q, half(Z,J,D) K, half(Z,J,E) V) -> (O) {
    score(z,i,j) +=! Q(z,i,d) * K(z,j,d)
    top(z,i) max=! score(z,i,j)
    weight(z,i,j) = exp((score(z,i,j) - top(z,i)) * rsqrt(float(D)))
    total(z,i) +=! weight(z,i,j)
    O(z,i,e) +=! float(half(weight(z,i,j))) * float(V(z,j,e))
    O(z,i,e) = O(z,i,e) / total(z,i)
}"""
HEADS = """def f(bfloat16(B,I,H,D) Q, bfloat16(B,J,H,D) K, bfloat16(B,J,H,D) V) -> (O) {
    score(b,h,i,j) +=! float(Q(b,i,h,d)) * float(K(b,j,h,d))
    top(b,h,i) max=! score(b,h,i,j)
    weight(b,h,i,j) = exp2((score(b,h,i,j) - top(b,h,i)) / 5.5)
    total(b,h,i) +=! weight(b,h,i,j)
    S(b,i,h,d) +=! float(bfloat16(weight(b,h,i,j))) * float(V(b,j,h,d))
    O(b,i,h,d) = bfloat16(S(b,i,h,d) / total(b,h,i))
}"""
CAUSAL = """def f(half(Z,I,D) Q, half(Z,J,D) K, half(Z,J,D) V) -> (O) {
    score(z,i,j) +=! float(Q(z,i,d)) * float(K(z,j,d))
    top(z,i) max=! j <= i ? score(z,i,j) : -inf
    weight(z,i,j) = j <= i ? exp(0.2 * (score(z,i,j) - top(z,i))) : 0
    total(z,i) +=! weight(z,i,j)
    S(z,i,d) +=! float(half(weight(z,i,j))) * float(V(z,j,d))
    O(z,i,d) = half(S(z,i,d) / total(z,i))
}"""
MASKED = CAUSAL.replace(
    "float(half(weight(z,i,j))) * float(V(z,j,d))", "j <= i ? float(half(weight(z,i,j))) * float(V(z,j,d)) : 0"
)
BAND = MASKED.replace("j <= i ?", "j <= i + 3 && j >= i - 40 ?")
TRIANGLE = """def f(half(M,K) X, half(N,K) W, half(P,N) V) -> (Y) {
    H(m,n) +=! X(m,k) * W(n,k)
    Y(m,p) +=! 2 * n >= m ? float(half(H(m,n))) * float(V(p,n)) : 0
}"""
BIASED = """def f(half(Z,I,D) Q, half(Z,J,D) K, half(Z,J,D) V, float(I,J) bias, bool(Z,J) kept) -> (O) {
    score(z,i,j) +=! float(Q(z,i,d)) * float(K(z,j,d))
    score(z,i,j) = kept(z,j) ? score(z,i,j) * 0.25 + bias(i,j) : -inf
    top(z,i) max=! score(z,i,j)
    weight(z,i,j) = exp(score(z,i,j) - top(z,i))
    total(z,i) +=! weight(z,i,j)
    S(z,i,d) +=! float(half(weight(z,i,j))) * float(V(z,j,d))
    O(z,i,d) = half(S(z,i,d) / total(z,i))
}"""

PROBABILITIES = """def f(half(Z,I,D) Q, half(Z,J,D) K, half(Z,J,D) V) -> (O) {
    score(z,i,j) +=! float(Q(z,i,d)) * float(K(z,j,d))
    score(z,i,j) = score(z,i,j) * 0.125
    top(z,i) max=! score(z,i,j)
    weight(z,i,j) = exp(score(z,i,j) - top(z,i))
    total(z,i) +=! weight(z,i,j)
    weight(z,i,j) = weight(z,i,j) / total(z,i)
    O(z,i,d) +=! float(half(weight(z,i,j))) * float(V(z,j,d))
}"""
INLINE = PROBABILITIES.replace("    weight(z,i,j) = weight(z,i,j) / total(z,i)\n", "").replace(
    "half(weight(z,i,j))", "half(weight(z,i,j) / total(z,i))"
)


@dataclass(frozen=True)
class Chain:
    """A def, the sizes and types of its arguments, and the error of results, which the text rounds in between."""

    name: str
    text: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    tolerance: float
    initial: tuple[int, ...] | None = None

    def arguments(self, *, whole: bool = False) -> list[torch.Tensor]:
        r = torch.Generator().manual_seed(7)
        return [_random(s, d, r, whole=whole) for s, d in zip(self.shapes, self.dtypes, strict=True)]

    def initial_values(self) -> dict[str, torch.Tensor]:
        return {} if self.initial is None else {"Y": torch.ones(self.initial).half()}

    def compile(self, options: TileOptions | None, target: str) -> GpuKernel:
        op = tc.define(self.text).f
        kernel = op.compile(*self.arguments(), target=target, options=options, **self.initial_values())
        assert isinstance(kernel, GpuKernel)
        return kernel


def _random(shape: tuple[int, ...], dtype: str, r: torch.Generator, *, whole: bool) -> torch.Tensor:
    if dtype == "bool":
        return torch.rand(shape, generator=r) < 0.7
    found = torch.randint(-2, 3, shape, generator=r) if whole else torch.randn(shape, generator=r)
    return found.to(getattr(torch, dtype))


def halves(name: str, text: str, *shapes: tuple[int, ...], tolerance: float, dtype: str = "float16") -> Chain:
    return Chain(name, text, shapes, (dtype,) * len(shapes), tolerance)


LAYER_CASES = (
    halves("triangle", TRIANGLE, (200, 32), (136, 32), (64, 136), tolerance=0),
    halves("layers", LAYERS, (70, 40), (200, 40), (200,), (48, 200), (48,), tolerance=0),
    halves("across", ACROSS, (64, 72), (64, 136), (136, 64), tolerance=0, dtype="bfloat16"),
    Chain("swapped", SWAPPED, ((3, 33, 64), (3, 72, 64), (3, 40, 72)), ("float16",) * 3, 0, (3, 33, 40)),
)
SOFTMAX_CASES = (
    halves("attention", ATTENTION, (2, 70, 64), (2, 200, 64), (2, 200, 32), tolerance=1e-3),
    halves("heads", HEADS, (2, 33, 3, 64), (2, 150, 3, 64), (2, 150, 3, 64), tolerance=8e-3, dtype="bfloat16"),
    halves("causal", CAUSAL, (3, 80, 32), (3, 100, 32), (3, 100, 32), tolerance=2e-3),
    halves("masked", MASKED, (3, 80, 32), (3, 100, 32), (3, 100, 32), tolerance=2e-3),
    halves("band", BAND, (2, 200, 32), (2, 170, 32), (2, 170, 32), tolerance=2e-3),
    halves("probabilities", PROBABILITIES, (2, 70, 64), (2, 72, 64), (2, 72, 64), tolerance=1e-3),
    halves("inline", INLINE, (2, 70, 64), (2, 72, 64), (2, 72, 64), tolerance=1e-3),
    Chain("biased", BIASED, ((2, 40, 64), (2, 130, 64), (2, 130, 64), (40, 130), (2, 130)),
          ("float16",) * 3 + ("float32", "bool"), 2e-3),
)  # fmt: skip
CASES = (*LAYER_CASES, *SOFTMAX_CASES)


WIDE = halves("wide", LAYERS, (70, 40), (72, 40), (72,), (328, 72), (328,), tolerance=0)
"""More columns than a block has."""


def divide_case(case: Chain, options: TileOptions, target: str) -> DividedDef:
    arguments = [torch.empty(s, dtype=getattr(torch, d)) for s, d in zip(case.shapes, case.dtypes, strict=True)]
    bound = bind_legalized(tc.define(case.text).f, arguments, case.initial_values())
    return divide_def(bound, options, parse_gpu_target(target))


def fitting_options(case: Chain, options: TileOptions, target: str, rng: random.Random) -> TileOptions:
    """Tiles of a chain with all columns, if they fit."""
    warps = rng.choice([4, 8]) if options.instruction == "wgmma" else rng.choice([2, 4])
    found = replace(
        options, tile=(16 * warps, 64, rng.choice([32, 64, 128])), warps=(warps, 1), stages=rng.choice([2, 3])
    )
    try:
        return found if divide_case(case, found, target).regions[0].region.chain else options
    except CannotLower:
        return options


@needs_compiler
@pytest.mark.sampled
@pytest.mark.parametrize(("target", "options"), TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_chains_are_one_kernel_and_equal_the_reference(case: Chain, target: str, options: TileOptions) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    for chosen in (options, fitting_options(case, options, target, random.Random(seed))):
        kernel = case.compile(chosen, target)
        assert count_kernels(kernel) == (1, 0)
        assert ("wgmma" if target == "cuda:sm_90" else "mma.sync") in cuda_text(kernel)
        for whole in (False, True) if case in LAYER_CASES else (False,):
            arguments = case.arguments(whole=whole)
            found = kernel.emulate(*arguments, **case.initial_values()).float()
            wanted = tc.define(case.text).f.reference(*arguments, **case.initial_values()).float()
            tolerance = 0 if whole else max(case.tolerance, 3e-3)
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=10 * tolerance, equal_nan=True)
    if nvrtc.is_nvrtc_available():  # the last, with options that were drawn
        assert kernel.compiled.cubin.binary


@needs_compiler
@pytest.mark.parametrize(("target", "options"), TARGETS)
def test_softmax_of_no_score_and_of_large_ones(target: str, options: TileOptions) -> None:
    """A row without a key is no number, as the def says; large scores do not overflow."""
    case = next(c for c in SOFTMAX_CASES if c.name == "biased")
    q, keys, v, bias, kept = case.arguments()
    kept[0, :] = False
    kept[1, :128] = False  # whole tiles without a score, before the first
    kept[1, 128:] = True
    found = case.compile(options, target).emulate(300 * q, keys, v, bias, kept)
    wanted = tc.define(case.text).f.reference(300 * q, keys, v, bias, kept)
    assert found[0].isnan().all()
    assert wanted[0].isnan().all()
    torch.testing.assert_close(found[1].float(), wanted[1].float(), rtol=2e-3, atol=2e-3)


@needs_compiler
@pytest.mark.parametrize(("target", "options"), TARGETS)
def test_blocks_share_the_columns_of_wide_results(target: str, options: TileOptions) -> None:
    """Each computes the first product for its rows again."""
    warps = (4, 1)
    options = replace(options, warps=warps, tile=(64, 64, 32))
    (piece,) = divide_case(WIDE, options, target).regions
    assert piece.price.blocks == 2 * 6
    kernel = WIDE.compile(options, target)
    assert count_kernels(kernel)[0] == 1
    arguments = WIDE.arguments(whole=True)
    assert torch.equal(kernel.emulate(*arguments), tc.define(WIDE.text).f.reference(*arguments))


@needs_compiler
def test_warpgroups_take_turns_over_several_tiles() -> None:
    case = halves("many", ATTENTION, (140, 66, 32), (140, 72, 32), (140, 72, 32), tolerance=1e-3)
    kernel = case.compile(TileOptions(instruction="wgmma", warps=(8, 1), tile=(128, 32, 32)), "cuda:sm_90")
    assert "turn" in kernel.source("tiles")
    found = kernel.emulate(*case.arguments()).float()
    torch.testing.assert_close(found, tc.define(case.text).f.reference(*case.arguments()).float(), rtol=3e-3, atol=3e-2)


def test_attention_keeps_tensor_cores_busy() -> None:
    """At least three quarters of the time, by the model, for heads of 128 values."""
    case = halves("", ATTENTION, *((64, 4096, 128),) * 3, tolerance=0)
    (piece,) = divide_case(case, TileOptions(), "cuda:sm_90").regions
    gpu, products = parse_gpu_target("cuda:sm_90"), 4 * 64 * 4096**2 * 128
    assert products / (gpu.group_ops * gpu.num_sms) >= 0.75 * piece.price.cycles


@needs_compiler
@pytest.mark.parametrize(("target", "options"), TARGETS)
def test_masked_terms_are_not_read(target: str, options: TileOptions) -> None:
    """Infinite values of keys that a row does not see leave it finite, in blocks that others of them need, too."""
    case = next(c for c in SOFTMAX_CASES if c.name == "masked")
    q, keys, v = case.arguments()
    v[0, 70, 3], v[0, 20, 5] = float("inf"), float("nan")
    v[1, 50], v[1, 79] = -float("inf"), float("inf")
    keys[0, 60], keys[2, 99], q[2, 40] = float("nan"), float("inf"), float("inf")
    found = case.compile(options, target).emulate(q, keys, v).float()
    wanted = tc.define(case.text).f.reference(q, keys, v).float()
    assert wanted[0, :20].isfinite().all()
    assert wanted[1, :50].isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3, equal_nan=True)


def test_steps_without_terms_are_skipped() -> None:
    """Every step with terms is taken, for random domains; the mean is that of the steps taken."""
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(60):
        rows, term = (BoundIndex(n, low := rng.randrange(3), low + rng.randint(1, 60)) for n in "ij")
        boxes = {"i": rng.choice([4, 16]), "j": rng.choice([3, 8, 16])}
        domain = tuple(
            Inequality((("i", rng.choice([-2, -1, 1, 3])), ("j", rng.choice([-2, -1, 1]))), rng.randint(-40, 40))
            for _ in range(rng.randint(1, 2))
        )
        masked = MaskedSteps(domain, (rows,), (term,), boxes)
        taken = [_check_steps(masked, tile) for tile in range(-(-rows.extent // boxes["i"]))]
        assert masked.mean_count() == sum(taken) / len(taken)


def _check_steps(masked: MaskedSteps, tile: int) -> int:
    """The number of steps of a tile of rows, which have all its terms; those that lack some are known as such."""
    (rows,), (term,) = masked.free, masked.terms
    at = {"i": build.const(tile)}
    first, count = (build.integer(e) for e in masked.bounds(at))
    assert first is not None
    assert count is not None
    size, step = masked.boxes["i"], masked.boxes["j"]
    for n in range(-(-term.extent // step)):
        points = [
            all(i * dict(g.terms)["i"] + j * dict(g.terms)["j"] + g.constant >= 0 for g in masked.domain)
            for i in range(rows.lower + tile * size, min(rows.lower + (tile + 1) * size, rows.upper))
            for j in range(term.lower + n * step, min(term.lower + (n + 1) * step, term.upper))
        ]
        assert first <= n < first + count or not any(points)
        assert all(points) or build.is_true(masked.has_partial_terms({**at, "j": build.const(n)}))
    return count


@pytest.mark.parametrize(("target", "least"), [("cuda:sm_80", 1.7), ("cuda:sm_90", 1.6)])
def test_masks_around_the_terms_save_work(target: str, least: float) -> None:
    large = [halves("", text, *((64, 2048, 64),) * 3, tolerance=0) for text in (CAUSAL, MASKED, BAND)]
    found = [divide_case(case, TileOptions(), target) for case in large]
    full, masked, band = (divided.cycles for divided in found)
    assert full > least * masked
    assert masked > 3 * band
    for divided, where in zip(found, ("", "where j <= i", "where j <= i + 3 and i <= j + 40"), strict=True):
        (piece,) = divided.regions
        assert where in str(piece)
        assert bool(where) == ("where" in str(piece))


@pytest.mark.parametrize(("target", "options"), TARGETS)
@pytest.mark.parametrize("case", [*LAYER_CASES[:3], SOFTMAX_CASES[1]], ids=lambda c: c.name)
def test_decompositions_are_proven_without_conflicts(case: Chain, target: str, options: TileOptions) -> None:
    divided, gpu = divide_case(case, options, target), parse_gpu_target(target)
    (piece,) = divided.regions
    program = region_program(piece, buffers_of(divided.function), "f", gpu)
    assert check_program(program) >= 4
    assert bank_turns(lower_program(program)) == 0


@pytest.mark.parametrize(("target", "options"), TARGETS)
def test_interpreter_equals_the_reference(target: str, options: TileOptions) -> None:
    case = halves("attention", ATTENTION, (1, 16, 32), (1, 40, 32), (1, 40, 32), tolerance=1e-3)
    module = lower_divided(divide_case(case, options, target), parse_gpu_target(target))
    given = [*(x.numpy() for x in case.arguments()), np.zeros((1, 16, 32), np.float32)]
    arrays = {b.name: x.reshape(b.shape) for b, x in zip(module.arguments, given, strict=True)}
    assert interpret(module, arrays) == []
    wanted = tc.define(case.text).f.reference(*case.arguments()).numpy()
    np.testing.assert_allclose(arrays[module.arguments[-1].name].reshape(wanted.shape), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "to"),
    [
        ("rsqrt(float(D))", "(0.0 - 1)"),  # the largest score has the least weight
        ("(score(z,i,j) - top(z,i)) *", "(score(z,i,j) - 0.5 * top(z,i)) *"),
        ("top(z,i) max=! score(z,i,j)", "top(z,i) max=! j <= i ? score(z,i,j) : -inf"),  # not of all weights
        ("top(z,i) max=!", "top(z,i) min=!"),
        ("total(z,i) +=! weight(z,i,j)", "total(z,i) +=! weight(z,i,j) * 2"),
        ("/ total(z,i)", "/ top(z,i)"),
        ("half(weight(z,i,j))", "half(weight(z,i,j) * total(z,i))"),
        ("-> (O)", "-> (O, weight)"),
        ("-> (O)", "-> (O, score)"),
    ],
)
def test_what_is_no_softmax_is_no_chain(change: str, to: str) -> None:
    assert change in ATTENTION
    case = halves("changed", ATTENTION.replace(change, to), (2, 64, 64), (2, 64, 64), (2, 64, 64), tolerance=0)
    assert not any(r.region.chain for r in divide_case(case, WARPS, "cuda:sm_80").regions)


@needs_nvrtc
@pytest.mark.sampled  # smaller ones run in the emulator
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90"])
@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        (HEADS, ((2, 2048, 16, 128),) * 3),
        (CAUSAL, ((64, 1024, 64),) * 3),
        (MASKED, ((64, 1024, 64),) * 3),
        (BAND, ((16, 4096, 128),) * 3),
        (LAYERS, ((8192, 128), (512, 128), (512,), (128, 512), (128,))),
        (LAYERS, ((16384, 64), (64, 64), (64,), (512, 64), (512,))),
    ],
    ids=["heads", "causal", "masked", "band", "layers", "wide"],
)
def test_large_chains_by_default(text: str, shapes: tuple[tuple[int, ...], ...], target: str) -> None:
    dtype = torch.bfloat16 if "bfloat16" in text else torch.float16
    kernel = tc.define(text).f.compile(*(torch.empty(s, dtype=dtype) for s in shapes), target=target)
    found = kernel.resources
    assert [found[n] for n in ("kernels", "temporary_bytes", "spill_bytes", "local_bytes")] == [1, 0, 0, 0]
    assert ("wgmma" if target == "cuda:sm_90" else "mma.sync") in cuda_text(kernel)
    assert "after" in kernel.source("schedule")


def test_first_products_of_many_terms_stay_apart() -> None:
    x = torch.empty(2048, 2048, dtype=torch.float16)
    b = torch.empty(2048, dtype=torch.float16)
    kernel = tc.define(LAYERS).f.compile(x, x, b, x, b, target="cuda:sm_80")
    assert count_kernels(kernel)[0] == 2
