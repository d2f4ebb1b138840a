"""Gradients of operators, against finite differences and against torch."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.utils.checkpoint import checkpoint

import tensor_comprehensions as tc
from tests.helpers import differentiable as defs
from tests.helpers.programs import Program, programs

Shape = tuple[int, ...]


def define_double(source: str) -> tc.Op:
    """The def of a text in double precision. A temporary of literals alone is a `float` unless these are cast."""
    text = source.replace("float(", "double(").replace("float ", "double ")
    try:
        return list(tc.define(text))[-1]
    except tc.CheckError:
        return list(tc.define(re.sub(r"(?<![\w.])\d+\.\d+", r"double(\g<0>)", text)))[-1]


def leaf(shape: Shape) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def check(op: tc.Op, *values: Any, second: bool = False, **initial: Shape) -> None:
    """gradcheck, on random values for those that are given as shapes."""
    torch.manual_seed(0)
    inputs = [leaf(x) if isinstance(x, tuple) else x for x in values]
    starts = {name: leaf(shape) for name, shape in initial.items()}

    def call(*everything: Any) -> Any:
        n = len(inputs)
        return op(*everything[:n], **dict(zip(starts, everything[n:], strict=True)))

    assert torch.autograd.gradcheck(call, (*inputs, *starts.values()))
    if second:
        assert torch.autograd.gradgradcheck(call, (*inputs, *starts.values()))


CASES: dict[str, tuple[Any, ...]] = {
    "MATMUL": ((3, 4), (4, 5)),
    "SOFTMAX": ((3, 5),),
    "LAYERNORM": ((3, 5), (5,), (5,)),
    "SWIGLU": ((3, 4), (4,), (5, 4), (5, 4)),
    "ATTENTION": ((1, 3, 2), (1, 4, 2), (1, 4, 2)),
    "FCRELU": ((3, 4), (5, 4), (5,)),
    "CONV1D": ((7,), (3,)),
    "CONV2D": ((1, 2, 5, 5), (2, 2, 3, 2)),
    "STRIDED": ((8,), (3,)),
    "STRIDED2D": ((1, 2, 6, 8), (2, 2, 2, 2)),
    "DEPTHWISE": ((1, 2, 4, 5), (2, 2, 3), (2,)),
    "AVERAGED": ((6,),),
    "MAXPOOL": ((2, 4, 5),),
    "POOL": ((9,), 3, 2),
    "GATHER": ((5, 3), torch.tensor([1, 4, 1])),
    "PRODUCT": ((3, 4),),
    "BLUR": ((7,),),
    "PADDED": ((5,),),
    "DIAGONAL": ((4, 4),),
    "GUARDED": ((4,), torch.tensor([2, -1, 2, 0])),
    "CHAIN": ((3, 4), ()),
    "PARTS": ((3,), (3,)),
    "TRANSPOSE": ((3, 3),),
    "SCATTER": ((4,), torch.tensor([1, 4, 1, 0])),
    "EXTREMA": ((5,), (5,)),
    "IDLE": ((3, 2), (3,)),
    "ELSEWHERE": ((3,), (3, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    check(define_double(getattr(defs, name)), *CASES[name])


def test_initial_values_have_gradients() -> None:
    check(define_double(defs.GEMM), (3, 4), (4, 2), (), (), C=(3, 2))
    check(define_double(defs.SHIFTED), (5,), b=(5,))
    check(define_double(defs.GOES_ON), (3, 4), p=(3,))


def test_gradients_have_gradients() -> None:
    check(define_double(defs.MATMUL), (2, 3), (3, 2), second=True)
    check(define_double(defs.SOFTMAX), (2, 3), second=True)
    check(define_double(defs.LAYERNORM), (2, 3), (3,), (3,), second=True)
    text = "def f(float(N) x, float(N) y) -> (z) { z(i) = tanh(x(i)) * y(i) / (1 + x(i) * x(i)) }"
    check(define_double(text), (3,), (3,), second=True)


UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt cbrt sin cos tan asin acos atan sinh cosh tanh asinh atanh erf "
    "erfc abs relu sigmoid floor rint nearbyint logb"
)
BINARY = "pow atan2 hypot fmin fmax copysign fdim min max"


def test_builtins_have_gradients() -> None:
    unary = "\n".join(f"y{n}(i) = {f}(x(i))" for n, f in enumerate(UNARY.split()))
    returns = ", ".join(f"y{n}" for n in range(len(UNARY.split())))
    op = define_double(f"def f(double(N) x) -> ({returns}) {{ {unary} }}")
    x = torch.tensor([0.2, 0.45, 0.8], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(op, (x,))
    binary = "\n".join(f"y{n}(i) = {f}(x(i), z(i))" for n, f in enumerate(BINARY.split()))
    returns = ", ".join(f"y{n}" for n in range(len(BINARY.split()))) + ", u"
    op = define_double(
        f"def f(double(N) x, double(N) z) -> ({returns}) {{ {binary}\n"
        "u(i) = fma(x(i), z(i), x(i)) + acosh(1 + x(i)) + pow(x(i), 3) + pow(2, z(i)) + fmod(x(i), z(i))"
        " + remainder(x(i), 2.1 * z(i)) }"
    )
    assert torch.autograd.gradcheck(
        op, (x, torch.tensor([0.5, -0.3, 0.7], dtype=torch.float64, requires_grad=True).abs())
    )


# --- ties ----------------------------------------------------------------------------------------------------------


def gradient(f: Callable[..., torch.Tensor], *values: list[float]) -> list[list[float]]:
    xs = [torch.tensor(v, requires_grad=True) for v in values]
    f(*xs).sum().backward()  # type: ignore[no-untyped-call]
    return [x.grad.tolist() for x in xs if x.grad is not None]


def test_ties_are_shared_as_torch_does() -> None:
    ops = tc.define("""
def largest(float(N,K) x) -> (y) { y(i) max=! x(i,k) }
def smaller(float(N) x, float(N) z) -> (y) { y(i) = min(x(i), z(i)) }
def second(float(N) x, float(N) z) -> (y) { y(i) = fmax(x(i), z(i)) }
def rectified(float(N) x) -> (y) { y(i) = relu(x(i)) }
def factors(float(N) x) -> (y) { y *=! x(i) }
""")
    tied: Any = [[1.0, 3.0, 3.0], [2.0, 1.0, 0.0]]
    assert gradient(ops.largest, tied) == gradient(lambda x: x.amax(1), tied)
    pair = [1.0, 2.0, 3.0], [1.0, 5.0, 2.0]
    assert gradient(ops.smaller, *pair) == gradient(torch.minimum, *pair)
    assert gradient(ops.second, *pair) == [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]  # torch's `fmax` depends on its version
    assert gradient(ops.rectified, [-1.0, 0.0, 2.0]) == gradient(torch.relu, [-1.0, 0.0, 2.0])
    for zeros in ([2.0, 0.0, 3.0], [0.0, 4.0, 0.0]):
        assert gradient(ops.factors, zeros) == gradient(torch.prod, zeros)


# --- how a call behaves --------------------------------------------------------------------------------------------


def test_empty_tensors_have_gradients() -> None:
    for name in ("MATMUL", "SOFTMAX", "PRODUCT"):
        op = define_double(getattr(defs, name))
        inputs = [leaf((2, 0)), leaf((0, 3))][: len(op.function.parameters)]
        torch.as_tensor(op(*inputs)).sum().backward()  # type: ignore[no-untyped-call]
        assert [x.grad.shape for x in inputs if x.grad is not None] == [x.shape for x in inputs]


def test_a_gradient_that_is_too_large_is_refused() -> None:
    op = tc.define(f"def f(float(N) x) -> (y) {{ y(i) = {' * '.join(['sin(x(i))'] * 100)} }}").f
    with pytest.raises(tc.CheckError, match="too large"):
        op(torch.ones(3, requires_grad=True))


def test_a_sum_of_many_terms_has_a_gradient() -> None:
    groups = ["(" + " + ".join(f"{k} * x(i)" for k in range(n, n + 30)) + ")" for n in range(0, 300, 30)]
    op = tc.define(f"def f(float(N) x) -> (y) {{ y(i) = {' + '.join(groups)} }}").f
    x = torch.ones(3, requires_grad=True)
    op(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 300 * 299 / 2))


def test_only_what_requires_a_gradient_gets_one() -> None:
    op = tc.define(defs.MATMUL).matmul
    A, B = torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)
    C = op(A, B)
    assert C.requires_grad
    (C * 2).sum().backward()
    assert A.grad is None
    assert B.grad is not None
    assert torch.allclose(B.grad, 2 * A.t() @ torch.ones(3, 5))
    assert not op(A, B.detach()).requires_grad
    with torch.no_grad():
        assert not op(A, B).requires_grad


def test_a_call_is_recorded_whatever_came_before() -> None:
    op = tc.define(defs.MATMUL).matmul
    A, B = torch.randn(3, 4), torch.randn(4, 5)
    for requires in (False, True, False, True):
        assert op(A.clone().requires_grad_(requires), B).requires_grad is requires


def test_a_kernel_is_recorded_too() -> None:
    A, B = torch.randn(3, 4), torch.randn(4, 5)
    kernel = tc.define(defs.MATMUL).matmul.compile(A, B)
    assert kernel(A.requires_grad_(), B).requires_grad


def test_a_layer_learns() -> None:
    torch.manual_seed(0)
    op = tc.define(defs.FCRELU).fcrelu
    x, truth = torch.randn(64, 4), torch.randn(3, 4)
    target = torch.relu(x @ truth.t() + 0.5)
    W, b = torch.nn.Parameter(truth + 0.3 * torch.randn(3, 4)), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([W, b], lr=0.05)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (op(x, W, b) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.02 * losses[0]


def test_half_floats_have_gradients_of_their_type() -> None:
    op = tc.define("def f(half(N,K) a, float(K) w) -> (half(N) y) { y(i) +=! float16(a(i,k) * w(k)) }").f
    a = torch.randn(3, 4, dtype=torch.float16, requires_grad=True)
    w = torch.randn(4, requires_grad=True)
    op(a, w).float().sum().backward()
    assert a.grad is not None
    assert w.grad is not None
    assert a.grad.dtype == torch.float16
    assert w.grad.dtype == torch.float32
    assert torch.allclose(a.grad.float(), w.detach().expand(3, 4), atol=1e-2)
    assert torch.allclose(w.grad, a.detach().float().sum(0), atol=1e-2)


def test_integer_outputs_have_no_gradient() -> None:
    op = tc.define("def f(float(N) x) -> (n, y) { n(i) = int32(x(i))\n y(i) = x(i) * n(i) }").f
    x = torch.tensor([1.5, 2.5], requires_grad=True)
    n, y = op(x)
    assert not n.requires_grad
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 2.0]


def test_a_call_without_floating_outputs_is_not_recorded() -> None:
    op = tc.define("def f(float(N) x) -> (n) { n(i) = int32(x(i)) }").f
    assert op(torch.tensor([1.5, 2.5], requires_grad=True)).tolist() == [1, 2]


def test_the_diagonal_of_a_rectangle_has_a_gradient() -> None:
    op = define_double("def f(float(N,M) a) -> (b) { b(i) = a(i,i) * a(i,i) }")
    check(op, (3, 4))
    check(op, (4, 3))


def test_a_changed_input_is_noticed_where_its_values_count() -> None:
    op = tc.define("def f(float(N) x, float(N) y) -> (z) { z(i) = x(i) * 2 + y(i) * y(i) }").f
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    u, v = x * 1, y * 1
    z = op(u, v)
    u += 1
    z.sum().backward(retain_graph=True)
    v += 1
    with pytest.raises(RuntimeError, match="inplace"):
        z.sum().backward()


def list_saved_shapes(call: Callable[[], Any]) -> list[tuple[int, ...]]:
    """The shapes of what autograd saves in a call."""
    shapes: list[tuple[int, ...]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()
    return sorted(shapes)


def test_a_call_keeps_sums_for_its_gradient() -> None:
    op = tc.define(defs.LAYERNORM).layernorm
    x, w, b = torch.randn(3, 5, requires_grad=True), torch.randn(5), torch.randn(5)
    assert list_saved_shapes(lambda: op(x, w, b)) == [(3,), (3,), (3, 5), (5,)]
    kernel = op.compile(x.detach(), w, b)
    assert list_saved_shapes(lambda: kernel(x, w, b)) == [(3, 5), (5,)]
    softmax = tc.define(defs.SOFTMAX).softmax
    assert list_saved_shapes(lambda: softmax(x)) == [(3, 5)]


def test_what_a_call_keeps_starts_where_its_ranges_do() -> None:
    """Temporaries with indices from 1 on, and initial values beside them."""
    op = define_double("""def f(float(N,M) x) -> (y) {
        s(i) +=! x(i-1,j) * x(i-1,j)
        y(i) = sqrt(s(i)) * y(i) where i in 1:N
    }""")
    assert "double(" in op.function.source
    check(op, (4, 3), y=(3,))


def test_what_others_raise_while_a_call_is_recorded_stays_what_it_is() -> None:
    op = tc.define(defs.MATMUL).matmul
    A, B = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    for _ in range(2):  # checkpoints stop the second forward by an exception
        y = checkpoint(lambda x: op(op(x, B), B.t()), A, use_reentrant=False)
        (found,) = torch.autograd.grad(y.sum(), A)
        torch.testing.assert_close(found, torch.ones(3, 4) @ B @ B.t())
        with torch.inference_mode():
            inference = torch.randn(4, 5)
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            op(A, inference)


def test_autocast_casts_for_recorded_calls_whatever_came_before() -> None:
    op = tc.define(defs.MATMUL).matmul
    A, B = torch.randn(3, 4).bfloat16().requires_grad_(), torch.randn(4, 5)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = op(A, B)
        (found,) = torch.autograd.grad(y.sum(), A)
        assert (y.dtype, found.dtype) == (torch.float32, torch.bfloat16)
        op(A.detach().float(), B)


# --- gradients of one's own ----------------------------------------------------------------------------------------

SQUARE = "def square(float(N) x) -> (y) { y(i) = x(i) * x(i) }"


def test_a_gradient_can_be_given_as_text() -> None:
    tripled = "def b(float(N) x, float(N) d_y) -> (d_x) { d_x(i) = 3 * d_y(i) * x(i) }"
    op = tc.define(SQUARE, backward={"square": tripled}).square
    assert op.backward_source() == tripled
    for each in (op, copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert gradient(each, [1.0, 2.0]) == [[3.0, 6.0]]
    own = tc.define(SQUARE, backward={"square": tc.define(SQUARE).square.backward_source()}).square
    assert gradient(own, [1.0, 2.0]) == [[2.0, 4.0]]


def test_a_gradient_can_be_given_as_a_function() -> None:
    def backward(inputs: Any, outputs: Any, gradients: Any) -> Any:
        return [gradients[0] * inputs[0] * 5 + 0 * outputs[0]]

    op = tc.define(SQUARE, backward={"square": backward}).square
    assert gradient(op, [1.0, 2.0]) == [[5.0, 10.0]]
    with pytest.raises(tc.ArgumentError, match="Python function"):
        op.backward_source()


# --- what is refused -----------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no such def": (lambda: tc.define(SQUARE, backward={"sqare": ""}), "did you mean 'square'"),
    "no text": (lambda: tc.define(SQUARE, backward={"square": 3}), "text of a def"),  # type: ignore[dict-item]
    "unknown parameter": (
        lambda: tc.define(SQUARE, backward={"square": "def b(float(N) w) -> (d_x) { d_x(i) = w(i) }"}), "'w'",
    ),
    "unknown return": (
        lambda: tc.define(SQUARE, backward={"square": "def b(float(N) x) -> (d_w) { d_w(i) = x(i) }"}), "'d_w'",
    ),
    "function of the wrong length": (
        lambda: gradient(tc.define(SQUARE, backward={"square": lambda *_: (None, None)}).square, [1.0]), "2 values",
    ),
    "function of the wrong shape": (
        lambda: gradient(tc.define(SQUARE, backward={"square": lambda *_: torch.ones(4)}).square, [1.0, 2.0]),
        "by 'x' is of shape",
    ),
    "function of the wrong kind": (
        lambda: gradient(tc.define(SQUARE, backward={"square": lambda *_: ["x"]}).square, [1.0]), "by 'x' is a str",
    ),
    "out": (
        lambda: tc.define(SQUARE).square(torch.ones(2, requires_grad=True), out=torch.ones(2)), "'out'",
    ),
    "lgamma": (
        lambda: gradient(tc.define("def f(float(N) x) -> (y) { y(i) = lgamma(x(i)) }").f, [1.0]), "backward=",
    ),
    "a maximum that scatters": (
        lambda: tc.define("def f(float(N) x, long(N) I) -> (float(3) y) { y(I(i)) max=! x(i) }").f.backward_source(),
        "backward=",
    ),
    "integers only": (lambda: tc.define("def f(int(N) x) -> (y) { y(i) = x(i) }").f.backward_source(), "floating"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistakes(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(tc.TCError, match=message.replace("(", r"\(")):
        call()


# --- random programs -----------------------------------------------------------------------------------------------


RANDOM = 300 if settings().max_examples > 1000 else 12  # with --long


@given(programs(most_statements=4))
@settings(max_examples=RANDOM, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_programs(program: Program) -> None:
    sizes = {name: n % 4 + 1 for name, n in program.sizes}
    op = define_double(program.source)
    check(op, *(tuple(sizes[d] for d in dims) for _, dims in program.inputs))


def test_a_temporary_of_literals() -> None:
    check(
        define_double("def f(float(A) x) -> (t) { t +=! 1.5 * 1.5 where exists x(a) s +=! t * x(a) t = t + s }"), (3,)
    )


def test_a_gradient_by_what_many_statements_read() -> None:
    """It has more terms than are looked at for zeros among them."""
    body = " ".join(f"t{n}(i) = a(i) * b(i+{n}) y(i) = y(i) + t{n}(i) * t{n}(i)" for n in range(70))
    op = tc.define(f"def f(float(N) a, float(M) b) -> (y) {{ y(i) = a(i) {body} }}").f
    a, b = torch.randn(4, requires_grad=True), torch.randn(73)
    op(a, b).sum().backward()
    wanted = 1 + 2 * a.detach() * b.unfold(0, 4, 1).square().sum(0)
    torch.testing.assert_close(a.grad, wanted, atol=1e-3, rtol=1e-3)
