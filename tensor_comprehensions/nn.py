"""A def as a layer: a `torch.nn.Module` whose parameters are some of the def's inputs, sized by its declarations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .api import Op, define
from .core.checked_fields import describe_value, suggest_word
from .core.error_boundary import only_tc_errors
from .core.errors import ArgumentError
from .dispatch.arguments import TORCH_TYPES
from .dispatch.kernel_table import may_be_sparse
from .dispatch.signatures import format_signature
from .tc_lang.formats import Format
from .tc_lang.ir import Const, Expr, Size, Symbol

Initial = Callable[[Tensor], Any] | Tensor | float
"""A function that fills a tensor in place, as those of `torch.nn.init`; or the value itself, which may be sparse."""


class Module(nn.Module):
    """A layer whose parameters are some inputs of a def. Call it with the other inputs, in order.

        layer = tc.Module(TEXT, parameters=("weight", "bias"), sizes={"I": 256, "O": 512})
        y = layer(x)

    You can save, copy and pickle it like any other module; its `state_dict` has the parameters.

    Args:
        source: a TC program, or an operator.
        parameters: the names of the inputs to learn, or a mapping from names to initial values: a function of
            `torch.nn.init`, a tensor or a number. For a sparse tensor, the stored values are learned. Without a value,
            weights of two and more dimensions start uniformly in +-1/sqrt(elements of a row), as in `torch.nn.Linear`,
            and all others at 0.
        sizes: values of the size names in the declarations of the parameters.
        buffers: values of inputs that are stored but not learned, by name. They may be sparse.
        name: the def to use; by default, the last of the program.

    Raises:
        ArgumentError: the def has no input of a given name, a size is missing, or an initial value does not fit.
        ParseError, CheckError, RangeError: as `tc.define`.
    """

    @only_tc_errors
    def __init__(
        self,
        source: str | Op,
        parameters: Iterable[str] | Mapping[str, Initial] = (),
        *,
        sizes: Mapping[str, int] | None = None,
        buffers: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.op = source if isinstance(source, Op) else _select_def(source, name)
        for what, given, type_ in (
            ("parameters", parameters, Iterable), ("sizes", sizes, Mapping | None), ("buffers", buffers, Mapping | None)
        ):  # fmt: skip
            if not isinstance(given, type_):
                raise ArgumentError(f"{what} is {describe_value(given)}", expected="names, each with its value")
        names = (parameters,) if isinstance(parameters, str) else parameters
        names = names if isinstance(names, Mapping) else tuple(names)
        for given in (*names, *(buffers or ())):
            if not isinstance(given, str):
                raise ArgumentError(f"an input is called {describe_value(given)}", expected="the name of an input")
        initial = dict(names if isinstance(names, Mapping) else ((name, None) for name in names))
        inputs = {p.name: p for p in self.op.function.parameters}
        for given in (*initial, *(buffers or {})):
            if given not in inputs:
                suggestion = suggest_word(given, inputs)
                raise ArgumentError(
                    f"{self.op.__name__} has no input {describe_value(given)}",
                    expected=", ".join(inputs), suggestion=suggestion,
                )  # fmt: skip
            if hasattr(self, given):
                raise ArgumentError(f"a module has something called '{given}' already", suggestion="rename the input")
        self._formats: dict[str, Format] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for parameter, value in initial.items():
            if may_be_sparse(value):
                self._register_sparse(inputs[parameter], value, is_learned=True)
                continue
            shape = _compute_parameter_shape(inputs[parameter], sizes or {}, self.op.__name__)
            self.register_parameter(parameter, nn.Parameter(_initial_tensor(inputs[parameter], shape, value)))
        for buffer, tensor in (buffers or {}).items():
            if buffer not in initial and may_be_sparse(tensor):
                self._register_sparse(inputs[buffer], tensor, is_learned=False)
                continue
            if buffer in initial or not isinstance(tensor, Tensor):
                found = "a parameter" if buffer in initial else f"a {type(tensor).__name__}"
                raise ArgumentError(f"'{buffer}' cannot be a buffer", expected="a tensor, no parameter", found=found)
            self.register_buffer(buffer, tensor)
        self._held = tuple(p if p in initial or p in (buffers or {}) else None for p in inputs)

    def _register_sparse(self, p: Symbol, value: Any, *, is_learned: bool) -> None:
        """Register the arrays of a sparse tensor: `name_values`, `name_pos1`, `name_crd1`."""
        from .dispatch.sparse.interop import as_sparse

        stored = as_sparse(value, None if p.format is None else p.format)
        if is_learned and not p.dtype.is_float:
            raise _no_gradient_error(p, self.op.__name__)
        values = stored.values.detach().to(TORCH_TYPES[p.dtype], copy=True)
        parts: dict[str, Tensor | None] = {}
        for n, level in enumerate(stored.levels):
            parts |= {} if level is None else {f"{p.name}_pos{n}": level[0], f"{p.name}_crd{n}": level[1]}
        for part in (*parts, f"{p.name}_values"):
            if hasattr(self, part):
                raise ArgumentError(f"a module has something called '{part}' already", suggestion="rename the input")
        for part, array in parts.items():
            self.register_buffer(part, array)
        if is_learned:
            self.register_parameter(f"{p.name}_values", nn.Parameter(values))
        else:
            self.register_buffer(f"{p.name}_values", values)
        self._formats[p.name], self._shapes[p.name] = stored.format, stored.shape

    def _held_operand(self, name: str) -> Any:
        """The parameter or buffer `name` as the operand that the def takes."""
        if name not in self._formats:
            return getattr(self, name)
        from .dispatch.sparse.sparse_tensor import SparseTensor

        format = self._formats[name]
        levels: list[Any] = []
        for n in range(len(format.levels)):
            crd = getattr(self, f"{name}_crd{n}", None)
            levels.append(None if crd is None else (getattr(self, f"{name}_pos{n}"), crd))
        return SparseTensor(format, self._shapes[name], levels, getattr(self, f"{name}_values"))

    def forward(self, *inputs: Any, **initial: Any) -> Any:
        """The outputs of the def: one tensor, or a tuple. Pass initial values of in/out outputs by keyword."""
        rest = iter(inputs)
        held = self._held
        missing = held.count(None)
        if len(inputs) != missing:
            names = (p.name for p, h in zip(self.op.function.parameters, held, strict=True) if h is None)
            raise ArgumentError(
                f"{self.op.__name__} takes {missing} inputs beside its parameters, not {len(inputs)}",
                expected=", ".join(names),
            )
        return self.op(*[next(rest) if name is None else self._held_operand(name) for name in held], **initial)

    def extra_repr(self) -> str:
        return format_signature(self.op.function)


def _select_def(source: str, name: str | None) -> Op:
    library = define(source)
    if name is not None:
        return library[name]
    if not len(library):
        raise ArgumentError("the program has no def")
    return list(library)[-1]


def _compute_parameter_shape(p: Symbol, sizes: Mapping[str, int], op: str) -> tuple[int, ...]:
    if not p.dtype.is_float:
        raise _no_gradient_error(p, op)

    def extent(e: Expr) -> int:
        match e:
            case Const(int(value)):
                return value
            case Size(name) if type(sizes.get(name)) is int and 0 <= sizes[name] < 1 << 63:
                return sizes[name]
            case Size(name) if name in sizes:
                raise ArgumentError(
                    f"the size '{name}' is {describe_value(sizes[name])}", expected="a number of elements"
                )
            case Size(name):
                raise ArgumentError(
                    f"the size '{name}' of the parameter '{p.name}' of {op} is not known",
                    suggestion=f"pass sizes={{'{name}': ...}}",
                )
        raise ArgumentError(f"'{p.name}' of {op} is declared without sizes")

    return tuple(extent(e) for e in p.extents or ())


def _no_gradient_error(p: Symbol, op: str) -> ArgumentError:
    return ArgumentError(f"'{p.name}' of {op} is {p.dtype}, which has no gradient", suggestion="make it a buffer")


def _initial_tensor(p: Symbol, shape: tuple[int, ...], value: Initial | None) -> Tensor:
    tensor = torch.zeros(shape, dtype=TORCH_TYPES[p.dtype])
    if isinstance(value, Tensor):
        if value.shape != tensor.shape:
            raise ArgumentError(
                f"the initial value of '{p.name}' has another shape than its declaration says",
                expected=str(shape),
                found=str(tuple(value.shape)),
            )
        return value.detach().to(tensor.dtype, copy=True)
    if callable(value):
        _fill_parameter(p, tensor, value)
    elif isinstance(value, int | float):
        tensor.fill_(value)
    elif value is not None:
        raise ArgumentError(
            f"the initial value of '{p.name}' is a {type(value).__name__}",
            expected="a function that fills a tensor, a tensor or a number",
        )
    elif len(shape) > 1 and tensor.numel():
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        tensor.uniform_(-bound, bound)
    return tensor


def _fill_parameter(p: Symbol, tensor: Tensor, value: Callable[[Tensor], Any]) -> None:
    try:
        with torch.no_grad():
            value(tensor)
    except Exception as error:  # of the caller's function
        raise ArgumentError(f"the function that fills '{p.name}' failed: {error}") from error
