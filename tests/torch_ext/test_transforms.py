"""Ops under torch.func, autocast, fake tensors, the profiler, threads and processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import tensor_comprehensions as tc
from tests.helpers import differentiable as defs

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own forward mode

OPS = tc.define("\n".join((defs.MATMUL, defs.SOFTMAX, defs.GEMM, defs.GATHER, defs.POOL, defs.CONV2D)))
A, B = torch.randn(4, 5, dtype=torch.float32), torch.randn(5, 3)


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def torch_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, 1)


# --- torch.func ----------------------------------------------------------------------------------------------------

Map = Callable[..., Any]
func: Any = torch.func
TRANSFORMS: dict[str, Callable[[Map], Any]] = {
    "grad": lambda f: func.grad(lambda a, b: f(a, b).square().sum(), (0, 1))(A, B),
    "grad of grad": lambda f: func.grad(lambda b: func.grad(lambda a: f(a, b).square().sum())(A).square().sum())(B),
    "vjp": lambda f: func.vjp(f, A, B)[1](torch.ones(4, 3)),
    "jvp": lambda f: func.jvp(f, (A, B), (A + 1, B - 1)),
    "jvp by one input": lambda f: func.jvp(lambda b: f(A, b), (B,), (B - 1,)),
    "jacrev": lambda f: func.jacrev(f)(A, B),
    "jacfwd": lambda f: func.jacfwd(f, 1)(A, B),
    "vmap": lambda f: func.vmap(f)(torch.stack([A, 2 * A]), torch.stack([B, B + 1])),
    "vmap of one": lambda f: func.vmap(f, (2, None))(torch.stack([A, 2 * A], 2), B),
    "vmap of vmap": lambda f: func.vmap(func.vmap(f, (None, 0)), (0, None))(A[None], torch.stack([B, B + 1])),
    "vmap of grad": lambda f: func.vmap(func.grad(lambda a, b: f(a, b).square().sum()), (0, None))(A[None], B),
    "grad of vmap": lambda f: func.grad(lambda a: func.vmap(f, (0, None))(a, B).square().sum())(A[None]),
    "empty batch": lambda f: func.vmap(f, (0, None))(torch.empty(0, 4, 5), B),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_transforms_a_product(name: str) -> None:
    close(TRANSFORMS[name](OPS.matmul), TRANSFORMS[name](torch.matmul))


@pytest.mark.parametrize("transform", [func.jacfwd, func.jacrev, func.hessian])
def test_torch_func_transforms_a_chain_of_statements(transform: Callable[[Map], Map]) -> None:
    x = torch.randn(2, 5)
    close(transform(OPS.softmax)(x), transform(torch_softmax)(x))


def test_vmap_of_what_is_not_a_plain_tensor() -> None:
    """Initial values, indices and scalars may differ within a batch; a number that is part of the kernel stays one."""
    C, alpha, words = torch.randn(2, 4, 3), torch.tensor([1.0, 2.0]), torch.tensor([[1, 4], [0, 0]])
    found = func.vmap(lambda c, a: OPS.gemm(A, B, a, 0.5, C=c))(C, alpha)
    close(found, torch.stack([0.5 * c + a * (A @ B) for c, a in zip(C, alpha, strict=True)]))
    close(func.vmap(OPS.gather, (None, 0))(A, words % 4), A[words % 4])
    close(func.vmap(lambda x: OPS.pool(x, 2, 2))(A), torch.stack([OPS.pool(x, 2, 2) for x in A]))


def test_an_output_that_does_not_depend_on_the_batch() -> None:
    op = tc.define("def f(float(N) x, float(N) y) -> (a, b) { a(i) = 2 * x(i)\n b(i) = x(i) * y(i) }").f
    x, y = torch.randn(3), torch.randn(2, 3)
    close(func.vmap(op, (None, 0), (None, 0))(x, y), (2 * x, x * y))


@pytest.mark.parametrize("over", ["initial", "inputs", "both"])
def test_vmap_of_in_out_outputs(over: str) -> None:
    """Of the initial value alone, whose sizes are inferred, or of what is added to it, or of both."""
    op = tc.define("def add(float(N) x, float a) -> (y) { y(i) += a * x(i) }").add
    rows, one = torch.randn(3, 5), torch.randn(5)
    call = lambda x, y: op(x, 2.0, y=y)  # noqa: E731
    x, y = (one if over == "initial" else rows), (one if over == "inputs" else rows)
    dimensions = (None if x is one else 0, None if y is one else 0)
    close(func.vmap(call, dimensions)(x, y), y + 2 * x)
    close(func.grad(lambda y: func.vmap(call, dimensions)(x, y).sum())(y), torch.full_like(y, 3 if y is one else 1))


def test_vmap_and_forward_mode_with_a_given_gradient() -> None:
    square = "def square(float(N) x) -> (y) { y(i) = x(i) * x(i) }"
    text = "def backward(float(N) x, float(N) d_y) -> (d_x) { d_x(i) = 3 * d_y(i) * x(i) }"
    written = tc.define(square, {"square": text}).square
    python = tc.define(square, {"square": lambda inputs, outputs, gradients: [3 * gradients[0] * inputs[0]]}).square
    x = torch.randn(2, 4)
    for op in (written, python):
        close(func.vmap(func.grad(lambda x, op=op: op(x).sum()))(x), 3 * x)
        assert func.vmap(op)(x[:0]).shape == (0, 4)
    close(func.jvp(written, (x[0],), (x[1],))[1], 3 * x[0] * x[1])
    with pytest.raises(tc.ArgumentError, match="forward mode"):
        func.jvp(python, (x[0],), (x[1],))


def test_dual_numbers() -> None:
    with forward_ad.dual_level():
        dual = OPS.matmul(forward_ad.make_dual(A, A + 1), B)
        close(forward_ad.unpack_dual(dual).tangent, (A + 1) @ B)


def test_dual_numbers_in_a_kernel() -> None:
    kernel = OPS.matmul.compile(A, B)
    with forward_ad.dual_level():
        close(forward_ad.unpack_dual(kernel(forward_ad.make_dual(A, A + 1), B)).tangent, (A + 1) @ B)
        with pytest.raises(tc.ArgumentError, match="has a tangent"):
            kernel(forward_ad.make_dual(A, A + 1), B, out=torch.empty(4, 3))
        close(kernel(A, B, out=torch.empty(4, 3)), A @ B)


def test_given_destinations_get_neither_tangents_nor_batches() -> None:
    """Once silently zero, once an error of torch's own."""

    def write(a: Tensor) -> Any:
        return OPS.matmul(a, B, out=torch.empty(4, 3))

    with pytest.raises(tc.ArgumentError, match="has a tangent"):
        func.jvp(write, (A,), (A,))
    with pytest.raises(tc.ArgumentError, match="'out' cannot be batched"):
        func.vmap(write)(A[None])


@pytest.mark.parametrize("name", ["MATMUL", "SOFTMAX", "CONV2D", "CHAIN", "PARTS", "GATHER"])
def test_forward_mode_agrees_with_finite_differences(name: str) -> None:
    op = list(tc.define(getattr(defs, name).replace("float(", "double(").replace("float ", "double ")))[-1]
    shapes: dict[str, Sequence[tuple[int, ...]]] = {
        "MATMUL": ((2, 3), (3, 2)), "SOFTMAX": ((2, 3),), "CONV2D": ((1, 2, 4, 4), (2, 2, 2, 2)),
        "CHAIN": ((3, 2), ()), "PARTS": ((3,), (3,)), "GATHER": ((5, 2),),
    }  # fmt: skip
    inputs: list[Tensor] = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes[name]]
    rest = [torch.tensor([1, 4, 1])] if name == "GATHER" else []
    assert torch.autograd.gradcheck(
        op, (*inputs, *rest), check_forward_ad=True, check_backward_ad=False, check_batched_forward_grad=True
    )


@pytest.mark.parametrize("before", [False, True], ids=["at first", "after a plain call"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_trace_of_torch_jit_has_the_operator_in_it(before: bool) -> None:
    """And not the values of the call that was traced."""
    op = tc.define(f"def f(float(M,K) A, float(K,N) B) -> (C) {{ C(m,n) +=! A(m,k) * B(k,n) + {int(before)} }}").f
    kernel = op.compile(A, B)
    for _ in range(3 * before):
        op(A, B), kernel(A, B)
    traced: Any = torch.jit.trace(lambda a: op(a, B) + a[:, :3], (A,))
    close(traced(2 * A), op(2 * A, B) + 2 * A[:, :3])
    with pytest.raises(tc.ArgumentError, match="is traced by torch"):
        torch.jit.trace(lambda a: kernel(a, B) + a[:, :3], (A,))


# --- modes ---------------------------------------------------------------------------------------------------------


def test_autocast_casts_to_what_the_def_declares() -> None:
    half = A.bfloat16()
    with pytest.raises(tc.ArgumentError, match="bfloat16"):
        OPS.matmul(half, B)
    x = B.clone().requires_grad_()
    for call in (OPS.matmul, OPS.matmul.overload):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call(half, x)
            with pytest.raises(tc.ArgumentError, match="float64"):
                call(half, B.double())
        close(y, half.float() @ B)
        y.sum().backward()
    assert x.grad is not None
    close(x.grad, 2 * half.float().t() @ torch.ones(4, 3))


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    arguments = (torch.randn(2, 3, 9, 9), torch.randn(4, 3, 2, 3))
    row = A[0]
    with FakeTensorMode() as mode:
        fake = OPS.conv2d(*map(mode.from_tensor, arguments))
        assert isinstance(fake, FakeTensor)
        assert OPS.pool(mode.from_tensor(row), 2, 2).shape == (2,)
        with pytest.raises(tc.ArgumentError, match="another size"):
            OPS.conv2d(*map(mode.from_tensor, (arguments[0], torch.randn(4, 2, 2, 3))))
        with pytest.raises(tc.ArgumentError, match="float64"):
            OPS.pool(mode.from_tensor(row).double(), 2, 2)
    real = OPS.conv2d(*arguments)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_symbolic_sizes_stay_symbolic() -> None:
    symbolic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    image, kernel = torch.randn(6, 3, 9, 8), torch.randn(4, 3, 2, 3)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = mode.from_tensor(image, symbolic_context=symbolic)
        y = OPS.conv2d(x, mode.from_tensor(kernel, static_shapes=True))
        assert [isinstance(n, torch.SymInt) for n in y.shape] == [True, False, True, False]
        assert [int(n) for n in y.shape] == [6, 4, 8, 6]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.10, of its own default
def test_the_profiler_names_the_operator() -> None:
    OPS.matmul(A, B)
    with torch.profiler.profile() as profile:
        OPS.matmul(A, B)
    assert f"tc::{OPS.matmul.overload._opname}" in {e.name for e in profile.events()}


# --- threads and processes -----------------------------------------------------------------------------------------


def test_eight_threads_with_many_shapes() -> None:
    op = tc.define(defs.MATMUL).matmul
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for n in range(40):
            a, b = torch.ones(1 + (seed + n) % 7, 4), torch.full((4, 3), float(seed))
            for call in (op, op.overload):
                if not torch.equal(call(a, b), a @ b):
                    wrong.append((seed, n))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


class Rows(torch.utils.data.Dataset[Tensor]):
    """Rows that an operator makes, in whatever process asks for them."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, n: int) -> Tensor:
        row: Tensor = OPS.matmul.overload(A[:1] * n, B)[0]
        return row


def test_workers_of_a_data_loader() -> None:
    OPS.matmul(A, B)  # the workers inherit kernels
    loader = torch.utils.data.DataLoader(Rows(), batch_size=3, num_workers=2, multiprocessing_context="fork")
    close(torch.cat(list(loader)), torch.arange(6.0)[:, None] * (A[:1] @ B))
