"""Tile kernels of the language: equal to torch in the emulator, compiled without spills, mistakes explained."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions import tiles as t
from tensor_comprehensions.layouts import Layout
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.loop_ir.nodes import Space
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.tiles import specs
from tensor_comprehensions.tiles.builder.tile_views import enumerate_tv
from tensor_comprehensions.tiles.check.check_program import check_program
from tensor_comprehensions.tiles.library.layers import lstm, mlp
from tensor_comprehensions.tiles.library.product import gemm80
from tensor_comprehensions.tiles.library.rows import layernorm
from tensor_comprehensions.tiles.lower.match_atoms import find_move

SEED = 20
needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")
TARGET = "cuda:sm_80"


def halves(*shape: int, seed: int = SEED, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def check_gemm(m: int, n: int, k: int, **parameters: Any) -> None:
    a, b = halves(m, k), halves(n, k, seed=SEED + 1)
    kernel = gemm80.compile(a, b, target=TARGET, **parameters)
    expected = (a.float() @ b.float().T).half()
    assert torch.equal(kernel.emulate(a, b), expected), f"{(m, n, k)} {parameters} seed {SEED}"


SMALL = {"tile": (64, 32, 32), "warps": (2, 1), "depth": 2}


@needs_compiler
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 64), (65, 34, 40), (33, 31, 20), (70, 40, 37)])
def test_gemm_equals_torch(m: int, n: int, k: int) -> None:
    check_gemm(m, n, k, **SMALL)


def random_choice(rng: random.Random) -> tuple[tuple[int, int, int], dict[str, Any]]:
    warps = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2)])
    tile = (16 * warps[0] * rng.choice([1, 2]), 8 * warps[1] * rng.choice([1, 2, 3, 4]), rng.choice([16, 32, 64]))
    sizes = rng.randint(1, 2 * tile[0]), rng.randint(1, 2 * tile[1]), rng.choice([rng.randint(1, 150), 64, 96])
    return sizes, {"tile": tile, "warps": warps, "depth": rng.randint(2, 4)}


@needs_compiler
def test_random_tiles_equal_torch() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(4):
        sizes, parameters = random_choice(rng)
        check_gemm(*sizes, **parameters)


@needs_nvrtc
@pytest.mark.parametrize(
    ("target", "size", "parameters"),
    [("cuda:sm_80", 1024, {}), ("cuda:sm_90", 1024, {}), ("cuda:sm_90", 1000, {}), ("cuda:sm_80", 77, SMALL)],
)
def test_gemm_has_no_spills_and_no_conflicts(target: str, size: int, parameters: dict[str, Any]) -> None:
    a = torch.empty(size, size, dtype=torch.float16)
    found = gemm80.compile(a, a, target=target, **parameters).resources
    assert (found["spill_bytes"], found["local_bytes"]) == (0, 0)
    assert found["bank_turns"] == 0 or size == 77  # whose rows begin at odd addresses: each element alone


def test_sources() -> None:
    a = torch.empty(256, 64, dtype=torch.float16)
    kernel = gemm80.compile(a, a, target=TARGET)
    tiles = kernel.source("tiles")
    assert "%acc:[128,128].fp32.RF <- MatMul<<<#[(2,2):(64,32)].[32:1].thread>>>(%sA:[(128,32):(32,1)]" in tiles
    assert "// ldmatrix_x4" in tiles
    assert "// cp.async 16" in tiles
    assert "mma_m16n8k16_f32_f16" in kernel.source("cuda")
    assert "copy_async" in kernel.source("loops")
    with pytest.raises(tc.ArgumentError, match="there is no source 'ptx'"):
        kernel.source("ptx")


# --- the other kernels of the library ----------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(("n", "d"), [(8, 256), (5, 300), (3, 33)])
def test_layernorm_equals_torch(n: int, d: int) -> None:
    x, g, b = halves(n, d) / 2, halves(d, seed=1), halves(d, seed=2)
    found = layernorm.compile(x, g, b, target=TARGET).emulate(x, g, b)
    expected = torch.nn.functional.layer_norm(x.float(), (d,), g.float(), b.float())
    torch.testing.assert_close(found, expected.half(), rtol=2e-3, atol=2e-3)


@needs_compiler
@pytest.mark.parametrize(("batch", "width"), [(64, 64), (40, 32)])
def test_mlp_equals_torch(batch: int, width: int) -> None:
    keep = torch.rand(3, width, width, generator=torch.Generator().manual_seed(SEED)) < 0.2
    x, weights, biases = halves(batch, width), halves(3, width, width, seed=1) * keep, halves(3, width, seed=2)
    found = mlp.compile(x, weights, biases, target=TARGET, rows=32, bk=32, depth=2).emulate(x, weights, biases)
    for w, b in zip(weights, biases, strict=True):
        x = torch.relu(x.float() @ w.float().T + b.float()).half()
    assert torch.equal(found, x)


@needs_compiler
@pytest.mark.parametrize(("batch", "units", "inputs"), [(64, 32, 32), (33, 19, 21)])
def test_lstm_equals_torch(batch: int, units: int, inputs: int) -> None:
    x, h, c = halves(batch, inputs), halves(batch, units, seed=1), halves(batch, units, seed=2).float()
    w, r = halves(4, units, inputs, seed=3) / 16, halves(4, units, units, seed=4) / 16
    b = halves(4, units, seed=5).float()
    kernel = lstm.compile(x, h, c, w, r, b, target=TARGET, tile=(64, 16, 16), depth=2)
    hidden, cell = kernel.emulate(x, h, c, w, r, b)
    z = torch.einsum("bi,gui->gbu", x.float(), w.float()) + torch.einsum("bi,gui->gbu", h.float(), r.float())
    i, f, g, o = (z + b[:, None]).unbind()
    new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    torch.testing.assert_close(cell, new, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden, (torch.sigmoid(o) * torch.tanh(new)).half(), rtol=1e-3, atol=1e-3)


@needs_nvrtc
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90"])
def test_the_library_has_no_spills_and_no_conflicts(target: str) -> None:
    def half(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float16)

    kernels = [
        layernorm.compile(half(4096, 4096), half(4096), half(4096), target=target),
        mlp.compile(half(4096, 128), half(20, 128, 128), half(20, 128), target=target),
        lstm.compile(
            half(256, 512), half(256, 512), half(256, 512).float(), half(4, 512, 512), half(4, 512, 512),
            half(4, 512).float(), target=target,
        ),
    ]  # fmt: skip
    for kernel in kernels:
        found = kernel.resources
        assert (found["spill_bytes"], found["local_bytes"], found["bank_turns"]) == (0, 0, 0)


# --- the language ------------------------------------------------------------------------------------------------


@tc.tile_kernel("C:[M,N].bf16 <- A:[M,K].bf16, B:[K,N].bf16")
def small_product(k: Any, C: Any, A: Any, B: Any, twice: bool = False) -> None:
    """B is K x N in memory, and goes to the product transposed: `ldmatrix.trans`."""
    (m, n), warp = k.blocks(C.tile(32, 16)), k.threads(64).tile(32)
    sA, sB = k.shared("sA", (32, 16), A.dtype), k.shared("sB", (16, 16), B.dtype)
    acc = k.accumulator("acc", (32, 16), A, B, by=warp)
    for first in (False, True) if twice else (True,):
        k.move(sA, A.tile(32, 16)[m, 0])
        k.move(sB, B.tile(16, 16)[0, n])
        k.commit()
        k.wait_copies(0)
        k.sync()
        if not first:
            k.init(acc, 5)
        k.matmul(acc, sA, sB.T, by=warp, first=first)
        k.sync()
    k.move(C.tile(32, 16)[m, n], acc)


@needs_compiler
def test_transposed_factors_and_first_products() -> None:
    a, b = halves(40, 16, dtype=torch.bfloat16), halves(16, 24, seed=1, dtype=torch.bfloat16)
    kernel = small_product.compile(a, b, target=TARGET, twice=True)
    assert "ldmatrix_x4_trans" in kernel.source("cuda")
    assert torch.equal(kernel.emulate(a, b), (a.float() @ b.float()).bfloat16())


@tc.tile_kernel("Y:[N,D].fp32 <- X:[N,D].fp32")
def wrong_rows(k: Any, Y: Any, X: Any, mistake: str = "") -> None:
    warp = k.threads(100 if mistake == "threads" else 64).tile(32)
    (i,) = k.blocks(X.tile(1, None))
    x = X.tile(1, None)[i]
    if mistake == "vector":
        k.registers("v", x.shape, X.dtype, by=k.threads(64))
    v = k.move(k.registers("v", x.shape, X.dtype, by=warp), x)
    if mistake == "axis":
        k.reduce("+", v, axis=2)
    if mistake == "product":
        k.accumulator("acc", (32, 16), X, X, by=warp)
        k.matmul(k.accumulator("acc", (32, 16), X, X, by=warp), X.tile(32, 16)[0, 0], X.tile(16, 16)[0, 0])
    if mistake == "warps":
        k.accumulator("acc", (24, 16), X, X, by=warp)
    if mistake == "ring":
        k.ring(4, 1, lambda s, i: None, lambda s, i: None)
    if mistake == "blocks":
        k.blocks(X.tile(1, None))
    if mistake == "index":
        h = k.fragment("h", (32, 64), X.dtype, "A", by=warp)
        for j in k.loop(2):
            h.tile(None, 32)[j]
    if mistake == "shared":
        k.move(k.shared("s", (1, 65536), X.dtype), X.tile(1, 65536)[0, 0])
    if mistake == "result":
        k.map(lambda a: "a", v)
    if mistake == "sizes":
        k.map(lambda a, b: a + b, v, X.tile(1, 3)[0, 0])
    k.move(Y.tile(1, None)[i], v)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("threads", "asks for 100 threads"),
        ("vector", "cannot spread v"),
        ("axis", "cannot reduce %v"),
        (
            "product",
            r"no tensor-core instruction of sm_80 does %acc_2.*\n  expected: factors of one type, fp16 or bf16",
        ),
        ("warps", r"cannot divide sums of 24 x 16\n  expected: multiples of 32 rows"),
        ("ring", "a ring needs stages"),
        ("blocks", r"cannot map blocks(.|\n)*found: blocks are mapped already"),
        ("index", "index of a tile of %h.* is only known in the run"),
        ("shared", "a kernel of wrong_rows needs 262144 bytes of shared memory"),
        ("result", "a pointwise function gives no number"),
        ("sizes", "sizes of a pointwise function's tiles disagree"),
    ],
)
def test_mistakes_are_explained(mistake: str, message: str) -> None:
    with pytest.raises(tc.ArgumentError, match=message):
        wrong_rows.compile(torch.empty(4, 64), target=TARGET, mistake=mistake)


def test_calls_are_checked() -> None:
    a, b = halves(32, 16), halves(16, 24)
    with pytest.raises(tc.ArgumentError, match=r"sizes of B disagree(.|\n)*found: B:\[16,24\]"):
        gemm80.compile(a, b, target=TARGET)
    with pytest.raises(tc.ArgumentError, match=r"A has another type(.|\n)*found: torch.float32"):
        gemm80.compile(a.float(), a, target=TARGET)
    with pytest.raises(tc.ArgumentError, match="takes 2 tensors"):
        gemm80.compile(a, target=TARGET)
    with pytest.raises(tc.ArgumentError, match=r"no parameter 'stages'(.|\n)*expected: tile, warps, depth"):
        gemm80.compile(a, a, target=TARGET, stages=3)
    with pytest.raises(tc.ArgumentError, match="need sm_80 or newer"):
        gemm80.compile(a, a, target="cuda:sm_75")
    with pytest.raises(tc.ArgumentError, match="takes tensors on one CUDA device"):
        gemm80(a, a)
    with pytest.raises(tc.ArgumentError, match="compiled for other tensors"):
        gemm80.compile(a, a, target=TARGET, **SMALL).emulate(a, b)


def test_headers_are_checked() -> None:
    with pytest.raises(tc.ArgumentError, match=r"'fp12' is no type(.|\n)*\^"):
        tc.tile_kernel("C:[M].fp12 <- A:[M].fp16")(lambda k, C, A: None)
    with pytest.raises(tc.ArgumentError, match=r"takes other tensors(.|\n)*expected: \(k, C, A\)"):
        tc.tile_kernel("C:[M].fp16 <- A:[M].fp16")(lambda k, A, C: None)


def test_quarters_in_the_wrong_order_are_no_ldmatrix() -> None:
    left = Layout(((4, 8), (2, 2, 2)), ((32, 1), (16, 8, 128)))
    right, wrong = (Layout(((8, 2, 2), 8), (lanes, 16)) for lanes in ((1, 8, 128), (1, 128, 8)))
    to = enumerate_tv(left)
    assert find_move("A", to, enumerate_tv(right), Space.SHARED, "sm_80").name == "ldmatrix_x4"
    with pytest.raises(tc.ArgumentError, match=r"no instruction does A(.|\n)*ldmatrix_x4: lane 0, value 2 gets"):
        find_move("A", to, enumerate_tv(wrong), Space.SHARED, "sm_80")


# --- proofs of decompositions ------------------------------------------------------------------------------------


def test_decompositions_are_proven() -> None:
    def half(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float16)

    def single(*shape: int) -> torch.Tensor:
        return torch.empty(shape)

    assert gemm80.compile(half(256, 64), half(128, 64), target=TARGET).check() == 12
    assert gemm80.compile(half(65, 37), half(34, 37), target=TARGET, **SMALL).check() > 0
    assert mlp.compile(half(40, 64), half(2, 64, 64), half(2, 64), target=TARGET, rows=32, bk=32).check() > 0
    cell = half(50, 24), half(50, 40), single(50, 40), half(4, 40, 24), half(4, 40, 40), single(4, 40)
    assert lstm.compile(*cell, target=TARGET, tile=(64, 16, 16)).check() > 0
    assert layernorm.compile(half(5, 300), half(300), half(300), target=TARGET).check() == 4
    assert small_product.compile(half(40, 16).bfloat16(), half(16, 24).bfloat16(), target=TARGET).check() == 8


def plant_fault(node: specs.Node, change: Callable[[tuple[specs.Leaf, ...]], tuple[specs.Leaf, ...]], kind: str) -> Any:
    """The program with the leaves of one kind changed."""
    if isinstance(node, (specs.Loop, specs.When)) or (isinstance(node, specs.Spec) and node.body):
        own = tuple(n for n in node.body if isinstance(n, specs.Leaf) and n.kind == kind)
        rest = tuple(n for n in node.body if n not in own)
        body = tuple(plant_fault(n, change, kind) for n in rest)
        return replace(node, body=(*body, *change(own)) if own else body)
    return node


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("MatMul", lambda leaves: leaves[1:], r"\(m, n, k\) = \(0, 0, \d+\) is met 0 times"),
        ("MatMul", lambda leaves: (*leaves, leaves[0]), "is met 2 times"),
        ("Move", lambda leaves: leaves[1:], "holds another element"),
        (
            "Move",
            lambda leaves: (*leaves, replace(leaves[0], statement=move_row(leaves[0].statement))),
            "another element",
        ),
    ],
)
def test_planted_faults_are_found(
    kind: str, change: Callable[[tuple[specs.Leaf, ...]], tuple[specs.Leaf, ...]], message: str
) -> None:
    a = torch.empty(64, 32, dtype=torch.float16)
    traced = gemm80.compile(a, a, target=TARGET, tile=(64, 32, 16), warps=(2, 1), depth=2).traced
    faulty = replace(traced, body=tuple(plant_fault(n, change, kind) for n in traced.body))
    check_program(traced)
    with pytest.raises(tc.InternalError, match=message):
        check_program(faulty)


def move_row(s: ir.Stmt) -> ir.Stmt:
    """A copy to the row below."""
    if isinstance(s, ir.Block):
        return replace(s, body=tuple(map(move_row, s.body)))
    if not isinstance(s, ir.Invoke) or s.name != "copy_async":
        return s
    (to, (row, *rest)), source = s.operands
    return replace(s, operands=((to, (row, build.mod(build.add(rest[0], 1), 32), *rest[1:])), source))


def misuse(name: str) -> Any:
    """A kernel whose function does something wrong once it has its blocks and threads."""

    def body(k: Any, C: Any, A: Any) -> None:
        (i,) = k.blocks(C.tile(32))
        k.threads(32)
        match name:
            case "name":
                k.shared(5, (32,), t.fp32)
            case "shape":
                k.shared("s", (32, 0), t.fp32)
            case "words in a shape":
                k.shared("s", ("x",), t.fp32)
            case "type":
                k.shared("s", (32,), "fp32")
            case "groups":
                k.wait_copies("x")
            case "steps":
                list(k.loop(-3))
            case "condition":
                with k.when(5):
                    pass
            case "functions":
                k.ring(3, 2, 5, 6)
            case "blocks":
                k.blocks(5)
            case "own error":
                raise ValueError("mine")
            case "operators":
                A + C
            case "index":
                C[i + 0.5]

    return tc.tile_kernel("C:[M].fp32 <- A:[M].fp32")(body)


MISUSES = {
    "name": "a tensor needs a name",
    "shape": "s has no such shape",
    "words in a shape": "s has no such shape",
    "type": "s has no such type",
    "groups": "cannot wait for copies",
    "steps": "cannot loop",
    "condition": "cannot branch",
    "functions": "filled and used by functions",
    "blocks": "cannot map blocks to 5",
    "own error": "the function of body raised ValueError: mine",
    "operators": "the function of body raised TypeError",
    "index": "the function of body raised TypeError",
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_of_the_builder(name: str) -> None:
    with pytest.raises(tc.ArgumentError, match=MISUSES[name]):
        misuse(name).compile(torch.randn(64), target="cuda:sm_80")


@tc.tile_kernel("Y:[M,N].fp32 <- X:[M,N].fp32")
def shifted_rows(k: Any, Y: Any, X: Any, guarded: bool = True) -> None:
    """Rows move up by one; the last one becomes zero."""
    (i,), warp = k.blocks(Y.tile(4, None)), k.threads(32).tile(32)
    rows, last = Y.shape[0], X.shape[1]
    for j in k.loop(4):
        y = Y.tile(1, None)[4 * i + j]
        v = k.init(k.registers("v", (1, last), t.fp32, by=warp), 0)
        if guarded:
            with k.when((4 * i + j + 1 < rows) & (j >= 0)):
                k.move(v, X.tile(1, None)[i * 4 + (j + 1)])
        else:
            k.move(v, X.tile(1, None)[i * 4 + (j + 1)])
        k.move(y, v)


@needs_compiler
def test_indices_have_arithmetic() -> None:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(SEED))
    found = shifted_rows.compile(x, target=TARGET).emulate(x)
    assert torch.equal(found, torch.cat([x[1:], torch.zeros(1, 40)]))
    with pytest.raises(tc.ArgumentError, match=r"shifted_rows reaches beyond a tensor(.|\n)*dimension 0 of X\[8, 40\]"):
        shifted_rows.compile(x, target=TARGET, guarded=False)


def test_misuse_of_the_decorator_and_of_parameters() -> None:
    with pytest.raises(tc.ArgumentError, match="made of a function"):
        tc.tile_kernel("C:[M].fp16 <- A:[M].fp16")(5)  # type: ignore[arg-type]
    a, b = torch.randn(64, 64).half(), torch.randn(64, 64).half()
    with pytest.raises(tc.ArgumentError, match="C has no elements"):
        gemm80.compile(a[:0], b, target="cuda:sm_80")
    with pytest.raises(tc.ArgumentError, match="sA has no such shape"):
        gemm80.compile(a, b, target="cuda:sm_80", depth=0)
    with pytest.raises(tc.ArgumentError, match="the function of gemm80 raised ValueError"):
        gemm80.compile(a, b, target="cuda:sm_80", tile="x")
    with pytest.raises(tc.ArgumentError, match="takes tensors on one CUDA device"):
        gemm80.compile(a, b)
