"""The same programs as operators of torch: what autograd, torch.func and forward mode give, against differences."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.core.dtypes import FLOAT64
from tensor_comprehensions.core.errors import CheckError, RangeError
from tests.helpers.gradient_checks import Rejected, check_close, difference, refusals_rejected
from tests.helpers.gradient_programs import GradientProgram

func: Any = torch.func


@refusals_rejected()
def check_operator(program: GradientProgram, seed: int) -> None:
    """Raise Mismatch for a wrong derivative, Rejected where the program says nothing."""
    random = np.random.default_rng(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            op = tc.define(program.source).f
    except CheckError as error:
        raise Rejected("CheckError") from error
    names = [p.name for p in op.function.parameters] + [p.name for p in op.function.inouts]
    count = len(op.function.parameters)
    floats = [n for n in names if op.function.tensor(n).dtype.is_float]
    if not all(op.function.tensor(n).dtype == FLOAT64 for n in (*floats, *op.function.returns)):
        raise Rejected("a tensor of literals")
    arrays = {n: torch.from_numpy(np.array(program.arrays[n])) for n in names}
    arrays |= {n: torch.from_numpy(random.uniform(-1.5, 1.5, tuple(arrays[n].shape))) for n in floats}

    def call(*xs: Tensor) -> tuple[Tensor, ...]:
        values = {**arrays, **dict(zip(floats, xs, strict=True))}
        results = op(*[values[n] for n in names[:count]], **{n: values[n] for n in names[count:]})
        return results if isinstance(results, tuple) else (results,)

    point = tuple(arrays[n] for n in floats)
    try:
        outputs = call(*point)
    except RangeError as error:
        raise Rejected("RangeError") from error
    if not all(bool(y.isfinite().all()) and bool((y.abs() < 1e4).all()) for y in outputs):
        raise Rejected("large values")
    weights = [torch.from_numpy(random.uniform(-1, 1, tuple(y.shape))) for y in outputs]
    along = tuple(torch.from_numpy(random.uniform(-1, 1, tuple(x.shape))) for x in point)
    others = tuple(torch.from_numpy(random.uniform(-1, 1, tuple(x.shape))) for x in point)
    places = tuple(range(len(point)))

    def loss(*xs: Tensor) -> Tensor:
        return sum(
            ((w * y).sum() for w, y in zip(weights, call(*xs), strict=True)), torch.zeros((), dtype=torch.double)
        )

    def moved(h: float) -> tuple[Tensor, ...]:
        return tuple(x + h * d for x, d in zip(point, along, strict=True))

    tangents = difference(lambda h: np.concatenate([y.numpy().ravel() for y in call(*moved(h))]))
    gradients = func.grad(loss, places)(*point)
    slope = sum(float(w.sum()) for w in (torch.from_numpy(tangents) * torch.cat([w.ravel() for w in weights]),))
    size = 1 + sum(float((g * d).abs().sum()) for g, d in zip(gradients, along, strict=True))
    check_close("gradient", sum(float((g * d).sum()) for g, d in zip(gradients, along, strict=True)), slope, size)
    taken = tuple(x.clone().requires_grad_() for x in point)
    for found, wanted in zip(torch.autograd.grad(loss(*taken), taken, allow_unused=True), gradients, strict=True):
        check_close("gradient of a plain call", torch.zeros_like(wanted) if found is None else found, wanted)
    found = func.jvp(call, point, along)[1]
    check_close("jvp", np.concatenate([y.numpy().ravel() for y in found]), tangents)

    def slope_along(*xs: Tensor) -> Tensor:
        parts = func.grad(loss, places)(*xs)
        return sum(((g * d).sum() for g, d in zip(parts, others, strict=True)), torch.zeros((), dtype=torch.double))

    wanted_second = difference(lambda h: np.asarray(float(slope_along(*moved(h)))))
    second = func.grad(slope_along, places)(*point)
    size = 1 + sum(float((g * d).abs().sum()) for g, d in zip(second, along, strict=True))
    total = sum(float((g * d).sum()) for g, d in zip(second, along, strict=True))
    check_close("second derivative", total, wanted_second, size, 1e-5)
    batch = tuple(torch.stack([x, x + 0.1 * d]) for x, d in zip(point, along, strict=True))
    slices = [tuple(x[n] for x in batch) for n in range(2)]
    for n, y in enumerate(func.vmap(call)(*batch)):
        check_close("vmap", y, torch.stack([call(*xs)[n] for xs in slices]))
    for n, g in enumerate(func.vmap(func.grad(loss, places))(*batch)):
        check_close("vmap of the gradient", g, torch.stack([func.grad(loss, places)(*xs)[n] for xs in slices]))
