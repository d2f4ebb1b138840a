"""Other ways to write a def: in a function's docstring, as bare statements, in index notation, as a tile kernel."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from .api import Op, define
from .core.error_boundary import only_tc_errors
from .core.errors import ArgumentError
from .core.lazy_import import lazy_module
from .tc_lang.semantics.infer_signature import def_of_statements
from .torch_ext.autograd import PythonGradient

if TYPE_CHECKING:
    from .dispatch.cuda import tile_kernels
    from .tiles import tile_program as tile_programs
else:
    tile_kernels, tile_programs = lazy_module("dispatch.cuda.tile_kernels"), lazy_module("tiles.tile_program")


@overload
def op(function: Callable[..., Any]) -> Op: ...
@overload
def op(*, backward: str | PythonGradient | None = None) -> Callable[[Callable[..., Any]], Op]: ...
@only_tc_errors
def op(
    function: Callable[..., Any] | None = None, *, backward: str | PythonGradient | None = None
) -> Op | Callable[[Callable[..., Any]], Op]:
    """Make an operator from a Python function whose docstring is a TC program with a def of the function's name.

        @tc.op
        def scale(x, a):
            \"\"\"def scale(float(N) x, float a) -> (y) { y(i) = a * x(i) }\"\"\"

    The function itself never runs. Its parameters, if it has any, must be those of the def, in order.

    Args:
        backward: the gradient of the def, as for `define`.

    Raises:
        ArgumentError: the function has no docstring, no def has its name, or the parameters differ.
        ParseError, CheckError, RangeError: as `define`.
    """
    if function is None:
        return partial(_define_from_docstring, backward=backward)
    return _define_from_docstring(function, backward)


@only_tc_errors
def _define_from_docstring(function: Callable[..., Any], backward: str | PythonGradient | None) -> Op:
    name = getattr(function, "__name__", "")
    text = inspect.getdoc(function) if inspect.isfunction(function) else None
    if not text:
        raise ArgumentError(
            f"tc.op makes an operator of a function whose docstring is a def, and {name or function!r} has none",
            suggestion=f'write """def {name or "name"}(...) -> (...) {{ ... }}""" below its first line',
        )
    made = define(text, None if backward is None else {name: backward})[name]
    written = [p.name for p in inspect.signature(function).parameters.values()]
    taken = list(inspect.signature(made).parameters)
    if written and written != taken[: len(written)]:
        raise ArgumentError(
            f"the function {name} and its def take different arguments",
            expected=", ".join(taken),
            found=", ".join(written),
        )
    made.__module__ = function.__module__
    return made


@only_tc_errors
def from_expression(statements: str, /, name: str = "expression", **types: str) -> Op:
    """Make an operator from statements alone: `from_expression("y(i) = a * x(i) + b(i)")`, called as `op(a, x, b)`.

    Its parameters are the names that the statements read and never write, in the order of the text: tensors if they
    have subscripts, numbers otherwise. Dimensions with the same index have the same size. The operator returns the
    tensor of the last statement.

    Args:
        statements: the text.
        name: the name of the def.
        types: the types of parameters that are not `float`: `from_expression("y(i) = t(w(i))", w="int64")`.

    Raises:
        ParseError, CheckError, RangeError: as `define`; positions are in the def made from the statements.
    """
    if not isinstance(statements, str):
        raise ArgumentError(f"the statements are a {type(statements).__name__}, not a string")
    return define(def_of_statements(name, textwrap.dedent(statements), types))[name]


@only_tc_errors
def from_notation(
    equation: str, /, formats: Mapping[str, str] | None = None, name: str = "expression", **types: str
) -> Op:
    """Make an operator from index notation: `from_notation("y(i) = b(i) - A(i,j)*x(j)", formats={"A": "csr"})`.

    Sums are implied: each term of the right side is summed over the indices that the left side lacks. The parameters
    are the tensors and numbers that are read, in the order of the text, as for `from_expression`.

    Args:
        equation: one equation, or several; the last one defines the result.
        formats: storage formats by the names of tensors. Without one, an operand may have any format, and a result is
            dense.
        name: the name of the def.
        types: the types of parameters that are not `float`: `from_notation("y(i) = A(i,j)*x(j)", A="double",
            x="double")`.

    Raises:
        ParseError, CheckError, RangeError: as `define`; positions are in the def made from the notation.
        ArgumentError: a format is unknown, or names no tensor of the equation.
    """
    from .sparse.index_notation import notation_to_def

    if not isinstance(equation, str):
        raise ArgumentError(f"the equation is a {type(equation).__name__}, not a string")
    return define(notation_to_def(name, textwrap.dedent(equation), types), formats=formats)[name]


@only_tc_errors
def tile_kernel(header: str) -> Callable[[Callable[..., None]], tile_kernels.TileKernel]:
    """Make a GPU kernel from a function that decomposes it into tiles, down to tensor-core instructions.

        @tc.tile_kernel("C:[M,N].fp16 <- A:[M,K].fp16, B:[N,K].fp16")
        def product(k, C, A, B, tile=(128, 128, 32)): ...

    The function gets a builder, the tensors of the header and parameters; it is traced once for each combination of
    sizes and target. Follows "Graphene: An IR for Optimized Tensor Computations on GPUs" (ASPLOS 2023), section 3.

    Args:
        header: the outputs, `<-`, and the inputs, with numbers or names as sizes.

    Raises:
        ArgumentError: the header is malformed (the message shows where), or the function takes other tensors.
    """

    @only_tc_errors
    def make(function: Callable[..., None]) -> tile_kernels.TileKernel:
        return tile_kernels.TileKernel(tile_programs.TileProgram.of(header, function))

    return make
