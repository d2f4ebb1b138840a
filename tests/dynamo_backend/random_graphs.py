"""Random programs over some hundred functions of torch: views, in-place operations, dropout, types, sizes, gradients.

A program is a text, so that a report can be run. While it is drawn, each step runs in eager. A step stays where its
result is finite and not too large, and where small errors stay small: sums in another order must not flip comparisons.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_comprehensions.core.single_flight import SingleFlightCache
from tensor_comprehensions.dynamo_backend import backend, kernel_or_eager

LARGEST = 1e4
ERROR = 1e-6
"""The relative error that each step gets when it is tried how errors grow."""
ALLOWED = 1e-4
"""What may become of it."""
F32, F64, BF16, I64, I32, U8, BOOL = (
    torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
FLOATS, WHOLE = (F32, F64, BF16), (I64, I32, U8)

POINTWISE = (
    "torch.relu({a})", "torch.sigmoid({a})", "torch.tanh({a})", "F.gelu({a})", "F.silu({a})", "F.elu({a})",
    "torch.exp({a}.clamp(max=3))", "torch.log({a}.abs() + 0.5)", "torch.sqrt({a}.abs() + 0.1)", "torch.sin({a})",
    "torch.cos({a})", "torch.erf({a})", "torch.abs({a})", "torch.neg({a})", "torch.rsqrt({a} * {a} + 0.5)",
    "torch.reciprocal({a} * {a} + 1)", "torch.log1p({a}.abs())", "torch.expm1({a}.clamp(max=2))",
    "F.leaky_relu({a}, 0.2)", "F.hardswish({a})", "F.hardtanh({a}, -0.5, 0.5)", "F.softplus({a})",
    "F.relu6({a} * 3)", "F.mish({a})", "F.logsigmoid({a})", "torch.square({a})", "{a} ** 3", "{a} * 0.3 + 0.7",
    "1.5 - {a}", "{a} / 2.5", "torch.clamp({a}, -1, 1)", "torch.nan_to_num({a})",
    "torch.addcmul({a}, {a}, {a}, value=0.5)", "torch.lerp({a}, {a} * 2, 0.25)", "torch.floor({a})",
    "torch.round({a})", "torch.sign({a})", "torch.atan({a})", "torch.where({a} > 0.2, {a}, -{a})",
    "{a}.masked_fill({a} < 0, 0.5)", "torch.special.expit({a})", "F.tanhshrink({a})",
    "torch.heaviside({a}, {a}.new_ones(()))", "F.dropout({a}, 0.4)", "F.dropout({a}, 0.25, training=True) + {a}",
    "torch.rand_like({a}) * {a}", "torch.bernoulli({a}.sigmoid())", "{a} + torch.tensor(1.25)",
    "{a} * {a}.new_tensor([2.0])", "{a}.float()", "{a}.double()", "{a}.bfloat16()", "{a}.to(torch.int32)",
    "({a} * 3).to(torch.int64)", "{a} > 0", "{a} != 0", "torch.atan2({a}, {a} + 2)", "torch.hypot({a}, {a} + 1)",
    "torch.logit({a}.sigmoid() * 0.8 + 0.1)", "F.hardsigmoid({a})",
)  # fmt: skip
PAIRS = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / ({b}.abs() + 1)", "torch.maximum({a}, {b})",
    "torch.minimum({a}, {b})", "torch.add({a}, {b}, alpha=2)", "torch.where({a} < {b}, {a}, {b})",
    "({a} <= {b}) & ({b} < 1)", "torch.fmod({a}, 1.5)", "torch.addcdiv({a}, {b}, {b}.abs() + 1, value=0.5)",
    "torch.lerp({a}, {b}, 0.3)", "torch.eq({a}, {b})", "F.mse_loss({a}, {b})", "F.smooth_l1_loss({a}, {b})",
    "torch.stack([{a}, {b}]).sum(0)", "torch.broadcast_tensors({a}, {b})[0]", "torch.logical_or({a} > 0, {b} > 0)",
    "torch.dist({a}, {b})", "torch.sub({a}, {b}, alpha=0.5)",
)  # fmt: skip
REDUCTIONS = (
    "{a}.sum({d})", "{a}.mean({d}, keepdim=True)", "{a}.amax({d})", "{a}.amin({d}, keepdim=True)",
    "torch.var({a}, {d})", "torch.std({a}, {d}, correction=0)", "torch.softmax({a}, {d})",
    "torch.log_softmax({a}, {d})", "{a}.cumsum({d})", "torch.logsumexp({a}, {d})",
    "torch.linalg.vector_norm({a}, dim={d})", "{a}.sum()", "{a}.mean()", "{a}.max({d})[0]",
    "torch.sort({a}, {d})[0]", "{a}.prod({d})", "F.normalize({a}, dim={d})", "torch.var_mean({a}, {d})[0]",
    "{a}.argmax({d})", "torch.cummax({a}, {d})[0]", "torch.median({a}, {d})[0]", "{a}.any({d})",
    "{a}.norm(dim={d})", "{a}.topk(1, {d})[0]",
)  # fmt: skip
VIEWS = (
    "{a}.transpose({d}, -1)", "{a}.flip({d})", "{a}.unsqueeze({d})", "{a}.narrow({d}, 0, {a}.shape[{d}] - 1)",
    "{a}.flatten()", "{a}.roll(1, {d})", "{a}.select({d}, 0)", "{a}.chunk(2, {d})[0]", "{a}.contiguous()",
    "{a}.reshape(-1, {a}.shape[-1])", "{a}[..., ::2]", "{a}[..., -1:]", "{a}.repeat_interleave(2, {d})",
    "{a}.unbind({d})[-1]", "{a}.movedim({d}, 0)", "{a}.split([1, {a}.shape[{d}] - 1], {d})[1]",
    "torch.cat([{a}, {a} * 2], {d})", "torch.stack([{a}, {a} + 1], {d})",
    "{a}.index_select({d}, torch.tensor([0, 0, 1]))", "{a}[[1, 0]]", "F.pad({a}, (1, 2))",
    "F.pad({a}, (1, 0), value=0.5)", "{a}.squeeze()", "torch.tril({a})", "torch.triu({a}, 1)",
    "{a}.diagonal(0, 0, -1)", "{a}.unfold({d}, 2, 1)", "{a}.expand(3, *{a}.shape)", "torch.tile({a}, (2, 1))",
    "{a}.clone()", "{a}.detach()", "{a}.masked_fill(torch.ones_like({a}) > 2, 1)",
    "torch.gather({a}, {d}, torch.zeros_like({a}, dtype=torch.int64))", "{a}.take_along_dim({a}.argsort({d}), {d})",
    "{a} * torch.arange({a}.shape[-1])", "{a} + torch.zeros({a}.shape[-1])", "torch.full_like({a}, 0.5) * {a}",
    "{a}.permute(*range({a}.dim() - 1, -1, -1))", "{a}.view_as({a})", "{a}[None, ..., 0]",
    "torch.rot90({a}, 1, (0, -1))",
)  # fmt: skip
PRODUCTS = (
    "{a} @ {b}.transpose(-1, -2)", "torch.einsum('...i,...i->...', {a}, {b})", "F.layer_norm({a}, {a}.shape[-1:])",
    "F.rms_norm({a}, {a}.shape[-1:])", "F.linear({a}, {a}.reshape(-1, {a}.shape[-1])[:3])",
    "torch.outer({a}.flatten()[:5], {b}.flatten()[:4])",
    "F.scaled_dot_product_attention({a}[None, None], {b}[None, None], {b}[None, None])",
    "F.embedding({b}.abs().long().clamp(max=1), {a})",
    "F.conv1d({a}[None], {a}[None, :, :2].transpose(0, 1)[:2, :1].expand(2, {a}.shape[0], 2) * 0.3, padding=1)",
    "F.avg_pool1d({a}[None], 2)", "F.max_pool1d({a}[None], 2)", "F.cosine_similarity({a}, {b}, dim=-1)",
    "F.group_norm({a}[None], 1)", "F.max_pool2d({a}[None, None], 2, 1)", "F.avg_pool2d({a}[None, None], 2, 1, 1)",
    "F.cross_entropy({a}, {a}.argmax(-1))", "F.conv2d({a}[None, None], {a}[None, None, :2, :2] * 0.3, padding=1)",
    "F.interpolate({a}[None, None], scale_factor=2.0)", "F.pad({a}[None], (1, 1), mode='reflect')",
    "F.interpolate({a}[None, None], scale_factor=2, mode='bilinear')",
    "F.interpolate({a}[None], scale_factor=3, mode='nearest-exact')",
    "torch.addmm({a}, {a}, {a}.t() @ {a}, beta=0.5)",
    "torch.baddbmm({a}[None], {a}[None], {b}.t()[None] @ {a}[None])",
    "F.batch_norm({a}, None, None, training=True)", "F.instance_norm({a}[None])", "torch.cdist({a}, {b})",
    "F.glu({a})", "F.avg_pool2d({a}[None, None], 3, 1, 1, count_include_pad=False)",
    "F.avg_pool2d({a}[None, None], 2, count_include_pad=False)", "torch.roll({a}, (1, -2), (0, -1))",
    "F.conv2d({a}[None, None].repeat(2, 36, 1, 1), torch.linspace(-1, 1, 1296).view(4, 36, 3, 3).to({a}.dtype) * 0.05, "
    "padding=1)",
    "F.conv2d(F.conv2d({a}[None, None].repeat(1, 6, 1, 1), {a}.new_full((6, 3, 1, 2), 0.25), groups=2), "
    "{a}.new_full((3, 2, 2, 1), 0.5), groups=3, padding=1)",
    "F.conv2d({a}[None, None].repeat(1, 3, 1, 1), {a}.flatten()[:6].repeat(4, 6).view(8, 3, 3, 2), stride=2, "
    "padding=1)",
    "F.conv_transpose2d({a}[None, None].repeat(1, 2, 1, 1), {a}.new_full((2, 3, 3, 3), 0.1), stride=2, padding=1)",
)  # fmt: skip
MUTATIONS = (
    "{a}.add_(1)", "{a}.mul_(0.5)", "{a}.relu_()", "{a}[0] = 0.25", "{a}[..., 0] += 1", "{a}.clamp_(-1, 1)",
    "{a}.copy_({b})", "{a}[..., 1:].mul_(2)", "{a}.zero_()", "{a}.fill_(0.5)", "{a}.neg_()",
    "{a}.masked_fill_({a} > 0.5, 0.1)", "{a}.t_()", "{a}.transpose(0, -1).add_(0.5)", "{a}.sub_({b})",
    "{a}.index_add_(0, torch.tensor([0, 1]), {b}[:2])",
    "{a}.scatter_(0, torch.zeros_like({a}, dtype=torch.int64)[:1], {b}[:1])", "{a}[1:] = {b}[:-1]",
    "{a}[..., 1:] = {b}[..., :1]", "{a}[0] = {b}[1]", "{a}[:2][..., 0] = 0.75", "{a}.diagonal().fill_(0.5)",
    "{a}.index_copy_(0, torch.tensor([1]), {b}[:1])", "{a}[torch.tensor([1, 0])] = {b}[0]",
)  # fmt: skip
KINDS = ((POINTWISE, 8), (PAIRS, 7), (REDUCTIONS, 4), (VIEWS, 6), (PRODUCTS, 4), (MUTATIONS, 2))
NAMESPACE = {"torch": torch, "F": F}


@dataclass(frozen=True)
class RandomGraph:
    """A program with what it is called with.

    Attributes:
        steps: statements, in order. results: the names that it returns.
        calls: the sizes of the first dimension of its inputs, call after call.
        inputs: the shape, from the second dimension on, and type of each; gradients: whether they are asked for.
    """

    steps: tuple[str, ...]
    results: tuple[str, ...]
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    calls: tuple[int, ...]
    gradients: bool
    seed: int

    @property
    def text(self) -> str:
        names = ", ".join(f"x{k}" for k in range(len(self.inputs)))
        lines = [*self.steps, f"return ({', '.join(self.results)},)"]
        return f"def program({names}):\n" + "".join(f"    {line}\n" for line in lines)

    def function(self) -> Callable[..., Any]:
        space: dict[str, Any] = dict(NAMESPACE)
        exec(self.text, space)
        found: Callable[..., Any] = space["program"]
        return found

    def arguments(self, rows: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed + rows)
        return [_input((rows, *rest), dtype, generator) for rest, dtype in self.inputs]

    def __str__(self) -> str:
        return f"{self.text}# inputs {self.inputs}, calls {self.calls}, gradients {self.gradients}, seed {self.seed}"


def _input(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype is BOOL:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype in WHOLE:
        return torch.randint(0 if dtype is U8 else -3, 5, tuple(shape), generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def run_program(graph: RandomGraph, call: Callable[..., Any], rows: int, gradients: bool | None = None) -> list[Tensor]:
    """The results of a call, what became of its inputs, and the gradients."""
    inputs = graph.arguments(rows)
    wanted = graph.gradients if gradients is None else gradients
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()] if wanted else []
    torch.manual_seed(graph.seed)
    outputs = [torch.as_tensor(x) for x in call(*inputs)]
    roots = [x for x in outputs if x.requires_grad]
    found: Sequence[Tensor | None] = ()
    if roots:
        directions = [torch.linspace(-1, 1, x.numel(), dtype=F64).reshape(x.shape).to(x.dtype) for x in roots]
        found = torch.autograd.grad(roots, leaves, directions, allow_unused=True)
    return [x.detach() for x in (*outputs, *inputs, *(g for g in found if g is not None))]


def random_graph(r: Random) -> RandomGraph:
    """A program of a few steps that eager runs, for every size of its calls."""
    rest = (r.choice((3, 4, 6, 7)),) if r.random() < 0.8 else (3, 4)
    inputs = tuple((rest, _dtype(r)) for _ in range(r.choice((1, 2, 2, 3))))
    first = r.choice((2, 4, 5))
    calls = (first, first) if r.random() < 0.7 else (first, first + 2, first + 1, first + 1, first + 2, first)
    steps: list[str] = []
    graph = RandomGraph((), ("x0",), inputs, calls, r.random() < 0.5, r.randrange(2**31))
    for _ in range(r.choice((3, 5, 8, 12, 20))):
        for _ in range(6):
            longer = _with_steps(graph, [*steps, _step(r, len(inputs), len(steps))])
            if _is_sound(longer):
                graph, steps = longer, list(longer.steps)
                break
    return graph


def _with_steps(graph: RandomGraph, steps: list[str]) -> RandomGraph:
    made = [s.split(" = ")[0] for s in steps if s.startswith("v")]
    read = " ".join(s.split(" = ", 1)[-1] for s in steps)
    last = [
        v for v in made if f"{v}." not in read and f"{v} " not in read and f"{v})" not in read and f"{v}," not in read
    ]
    return RandomGraph(tuple(steps), tuple(last or ["x0"]), graph.inputs, graph.calls, graph.gradients, graph.seed)


def _dtype(r: Random) -> torch.dtype:
    return r.choices((F32, F64, BF16, I64, I32, U8, BOOL), (60, 8, 8, 8, 5, 5, 6))[0]


def _step(r: Random, inputs: int, number: int) -> str:
    names = [f"x{k}" for k in range(inputs)] + [f"v{k}" for k in range(number)]
    weights = [1 + 3 * (k >= len(names) - 3) for k in range(len(names))]
    a, b = r.choices(names, weights, k=2)
    (kind,) = r.choices([k for k, _ in KINDS], [w for _, w in KINDS])
    text = r.choice(kind).format(a=a, b=b, d=r.choice((0, -1, 1)))
    return text if kind is MUTATIONS and "=" in text else f"v{number} = {text}"


def _is_sound(graph: RandomGraph) -> bool:
    """Does eager run the program for all sizes, with results of moderate size that hardly depend on rounding?"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for rows in sorted(set(graph.calls)):
                expected = run_program(graph, graph.function(), rows)
                if not all(_is_moderate(x) for x in expected):
                    return False
                if any(
                    difference(run_program(graph, _add_errors(graph, k), rows), expected, ALLOWED) for k in range(2)
                ):
                    return False
        except Exception:
            return False
    return True


def _is_moderate(x: Tensor) -> bool:
    return x.numel() < 3000 and (not x.numel() or bool((x.double().abs() <= LARGEST).all()))


def _add_errors(graph: RandomGraph, seed: int) -> Callable[..., Any]:
    """The program with an error after each step."""
    generator = torch.Generator().manual_seed(seed)

    def disturb(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        error = ERROR * (2**16 if x.dtype is BF16 else 1)
        return x * (1 + error * torch.randn(x.shape, generator=generator)).to(x.dtype)

    lines = []
    for step in graph.steps:
        lines.append(step)
        if step.startswith("v") and not any(word in step for word in ("[", "_(", "view", "squeeze", "select", "chunk")):
            name = step.split(" = ")[0]
            lines.append(f"{name} = disturb({name})")
    text = "\n".join(
        [graph.text.split("\n", 1)[0], *(f"    {x}" for x in lines), f"    return ({', '.join(graph.results)},)"]
    )
    space: dict[str, Any] = {**NAMESPACE, "disturb": disturb}
    exec(text, space)
    found: Callable[..., Any] = space["program"]
    return found


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-3) -> str:
    """Where the results differ, "" if they agree."""
    if len(ours) != len(theirs):
        return f"{len(ours)} results instead of {len(theirs)}"
    coarse = any(x.dtype is BF16 for x in theirs)
    for k, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        scale = max(1.0, y.double().abs().max().item()) if y.numel() else 1.0
        if y.is_floating_point():
            rtol = 3e-2 if coarse else tolerance
            atol = rtol * scale
        else:
            rtol = atol = 0.0
        try:
            torch.testing.assert_close(x, y, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return f"result {k}: {error}"
    return ""


def find_fault(graph: RandomGraph) -> str:
    """What the backend gives or raises that neither eager nor `aot_eager` does; "" if nothing."""
    fault = _fault_of("tensor_comprehensions", graph)
    return fault if fault and not _fault_of("aot_eager", graph) else ""


@contextmanager
def draw_winners(seed: int) -> Iterator[None]:
    """Every kernel wins its race, or in half of all cases some do, so that forward and backward round differently."""
    r = Random(seed)
    wins = 1.0 if r.random() < 0.5 else 0.6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_or_eager, "kernel_is_faster", lambda ours, theirs: r.random() < wins)
        patch.setattr(backend, "_kernels", SingleFlightCache(backend.LIMIT))  # races of other graphs are forgotten
        yield


def _fault_of(name: str, graph: RandomGraph) -> str:
    with draw_winners(graph.seed):
        return _find_difference(name, graph)


def _find_difference(name: str, graph: RandomGraph) -> str:
    torch._dynamo.reset()
    eager, compiled = graph.function(), torch.compile(graph.function(), backend=name)
    for number, rows in enumerate(graph.calls):
        expected = run_program(graph, eager, rows)
        try:
            found = run_program(graph, compiled, rows)
        except Exception as error:
            return f"call {number} raises {type(error).__name__}: {error}"
        if text := difference(found, expected):
            return f"call {number}: {text}"
    return ""


def reduce_program(graph: RandomGraph) -> RandomGraph:
    """`graph` with as few steps as show the fault."""
    for k in reversed(range(len(graph.steps))):
        shorter = _with_steps(graph, [s for n, s in enumerate(graph.steps) if n != k])
        if _is_sound(shorter) and find_fault(shorter):
            graph = shorter
    return graph
