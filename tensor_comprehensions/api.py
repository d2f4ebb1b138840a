"""`define`, and the operators it gives: Python callables on torch tensors and NumPy arrays.

Always holds: whatever is passed, only a `TCError` (the caller's mistake) or an `InternalError` (our bug) leaves a call,
and then nothing of the caller's has changed.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from logging import DEBUG
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from . import knobs
from .calls import (
    Arguments,
    Shape,
    Sizes,
    allocate,
    bind_sizes,
    check_machine,
    check_runs_here,
    deliver,
    destinations,
    evaluate,
    fill_initial,
    gather,
    hand_back,
    launcher,
    normal_strides,
    plain_call,
    sizes_from_shapes,
    sizes_of,
    with_strides,
)
from .compiler import Compiled, compile_function
from .describe import documentation, python_signature, signature
from .errors import ArgumentError, InternalError, TCError
from .inspection import Picture, logger
from .once import OncePerKey
from .options import CpuOptions
from .runtime.dispatch import Launcher
from .runtime.host import host
from .target import Target
from .tc_lang import compile_source
from .tc_lang.function import BoundFunction, Function

Value = Any
"""A tensor, an array or a number."""
Out = Tensor | tuple[Tensor, ...] | None

P = ParamSpec("P")
R = TypeVar("R")

KERNELS = 256
"""How many kernels an operator keeps: those that were used last."""


def guarded(call: Callable[P, R]) -> Callable[P, R]:
    """`call`, with an exception that is not meant to leave it told as what it is: our bug."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except (TCError, InternalError):
            raise
        except MemoryError as error:
            raise ArgumentError(f"there is no memory for this: {error}") from error
        except Exception as error:
            raise InternalError(f"{type(error).__name__}: {error}") from error

    return wrapper


@guarded
def define(source: str) -> Library:
    """Check a TC program and give its defs as operators.

    Nothing is compiled before the first call. Raises ParseError, CheckError or RangeError, which show the place.
    """
    return Library(compile_source(source))


class UnknownDef(ArgumentError, AttributeError):
    """A library has no def of this name."""


class Library:
    """The operators of a TC program, in order: `library.name`, or `library["name"]`."""

    def __init__(self, functions: Sequence[Function]) -> None:
        self.__ops = {f.name: Op(f) for f in functions}

    def __getitem__(self, name: str) -> Op:
        if name in self.__ops:
            return self.__ops[name]
        near = difflib.get_close_matches(str(name), self.__ops, 1)
        raise UnknownDef(
            f"the program has no def {name!r}",
            expected="one of " + ", ".join(self.__ops) if self.__ops else "",
            suggestion=f"did you mean {near[0]}?" if near else "",
        )

    def __getattr__(self, name: str) -> Op:
        if name.startswith("_") and name not in self.__dict__.get("_Library__ops", ()):
            raise AttributeError(name)
        return self[name]

    def __iter__(self) -> Iterator[Op]:
        return iter(self.__ops.values())

    def __len__(self) -> int:
        return len(self.__ops)

    def __contains__(self, name: object) -> bool:
        return name in self.__ops

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.__ops]

    def __repr__(self) -> str:
        return "\n".join(["Library of", *(f"  {signature(op.function)}" for op in self)])


@dataclass(frozen=True, slots=True)
class Route:
    """A kernel and the way to run it."""

    compiled: Compiled
    launcher: Launcher


class Op:
    """A def as a function of tensors; `help(op)` tells what this one takes and gives.

    Tensors go in by position, in the order of the def; numbers where the def has numbers. In/out outputs take their
    initial value by keyword and are not changed. One output comes back as a tensor, several as a tuple; NumPy arrays in
    give NumPy arrays out. `out` is a tensor, or a tuple of them, to write to instead of fresh memory.

    Raises:
        ArgumentError: an argument has another type, rank, size or device than the def says.
        RangeError: a subscript leaves its tensor.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = function.name
        self.__doc__ = documentation(function)
        self.__signature__ = python_signature(function)
        self._bound: OncePerKey[Sizes, BoundFunction] = OncePerKey(KERNELS)
        self._kernels: OncePerKey[Hashable, Route] = OncePerKey(KERNELS)
        self._out_is_inout = any(p.name == "out" for p in function.initial)
        # Tensors alone choose the kernel of a def without in/out outputs and specialised numbers: calls of such a
        # def look for a launcher that accepts the tensors as they are, the last one first.
        self._direct = not function.initial and not function.scalars
        self._last: Launcher | None = None
        self._launchers: dict[Hashable, Launcher] = {}

    def __repr__(self) -> str:
        return signature(self.function)

    def __call__(self, /, *tensors: Value, out: Out = None, **initial: Value) -> Any:
        if out is None and not initial:
            launcher = self._last
            if launcher is not None and launcher.accepts(*tensors) and plain_call(tensors):
                try:
                    return launcher(*tensors)
                except RuntimeError:  # torch has no memory: the long way says it better
                    pass
        return self._call(tensors, out, initial, CpuOptions(), None)

    @guarded
    def infer(self, /, *shapes: Any, **initial: Any) -> Shape | tuple[Shape, ...]:
        """The shapes of the outputs for the shapes of the arguments (tuples, tensors or arrays), without running.

        A number that is part of the kernel is given by its value. One output: its shape; several: a tuple of shapes.
        """
        bound = self._bind(sizes_from_shapes(self.function, shapes, initial))
        found = tuple(bound.tensor(name).shape for name in bound.returns)
        return found[0] if len(found) == 1 else found

    @guarded
    def compile(
        self, /, *tensors: Value, options: CpuOptions | None = None, target: Target | None = None, **initial: Value
    ) -> Kernel:
        """The kernel for these tensors, compiled now if there is none yet.

        Args:
            tensors, initial: as in a call; only their types, sizes and strides count.
            options: how to lower, instead of the choice made from the sizes.
            target: a machine to compile for, instead of this one.
        """
        options, target = options or CpuOptions(), target or host()
        check_machine(options, target)
        arguments = gather(self.function, tensors, initial)
        return Kernel(self, self._route(arguments, None, options, target).compiled)

    @guarded
    def reference(self, /, *tensors: Value, **initial: Value) -> Any:
        """What a call gives, computed by the reference evaluator: by the definition of the language, and slowly."""
        arguments = gather(self.function, tensors, initial)
        return hand_back(evaluate(self._bind(sizes_of(self.function, arguments)), arguments), arguments.numpy)

    @guarded
    def show(self, /, *tensors: Value, **initial: Value) -> Picture:
        """The schedule tree of the kernel for `tensors`, or without tensors of the kernel used last.

        It prints as indented text, and a notebook shows it as a picture.
        """
        last = None if tensors or initial else self._kernels.last()
        compiled = last.compiled if last is not None else self.compile(*tensors, **initial).compiled
        return Picture(compiled.source("schedule"))

    @guarded
    def _call(
        self,
        tensors: Sequence[object],
        out: object,
        initial: dict[str, Any],
        options: CpuOptions,
        target: Target | None,
    ) -> Any:
        if self._out_is_inout and out is not None:
            out, initial = None, {"out": out, **initial}
        arguments = gather(self.function, tensors, initial)
        bound = self._bind(sizes_of(self.function, arguments))
        wanted = None if out is None else destinations(bound, arguments, out)
        if knobs.current().interpret:
            outputs = evaluate(bound, arguments)
        else:
            outputs = self._compute(bound, arguments, wanted, options, target or host())
        if wanted is None:
            return hand_back(outputs, arguments.numpy)
        deliver(outputs, wanted)
        return out

    def _compute(
        self,
        bound: BoundFunction,
        arguments: Arguments,
        wanted: tuple[Tensor, ...] | None,
        options: CpuOptions,
        target: Target,
    ) -> tuple[Tensor, ...]:
        """The outputs, in `wanted` where nothing can fail any more once it is written, else in fresh memory."""
        check_runs_here(bound.name, target)
        route = self._route(arguments, wanted, options, target)
        if wanted is not None and route.compiled.sites:
            wanted, route = None, self._route(arguments, None, options, target)
        outputs = wanted or tuple(allocate(bound, name) for name in bound.returns)
        fill_initial(bound, arguments, outputs)
        route.launcher.run(*arguments.inputs, *outputs)
        return outputs

    def _bind(self, sizes: Sizes) -> BoundFunction:
        return self._bound.get(sizes, lambda: bind_sizes(self.function, sizes))

    def _route(self, arguments: Arguments, out: Sequence[Tensor] | None, options: CpuOptions, target: Target) -> Route:
        sizes = sizes_of(self.function, arguments)
        strides = tuple(normal_strides(x) for x in (*arguments.inputs, *(out or ())))
        found = True

        def make() -> Route:
            nonlocal found
            found = False
            bound = with_strides(self._bind(sizes), strides)
            compiled = compile_function(bound, self.function.source, options, target)
            return Route(compiled, launcher(compiled))

        route = self._kernels.get((sizes, strides, options, target), make)
        if logger("cache").isEnabledFor(DEBUG):
            what = "found" if found else "compiled"
            logger("cache").debug("%s: %s for %s, strides %s, %s", self.__name__, what, sizes, strides, options)
        return route


class Kernel:
    """A kernel of an operator, made with certain options. It is called like the operator.

    Attributes:
        compile_seconds: what making it took.
        resources: kernels launched, bytes of temporaries, bytes of emitted text.
    """

    def __init__(self, op: Op, compiled: Compiled) -> None:
        self._op, self.compiled = op, compiled

    def __repr__(self) -> str:
        return f"<kernel of {signature(self._op.function)}, compiled in {self.compile_seconds * 1e3:.0f} ms>"

    def __call__(self, /, *tensors: Value, out: Out = None, **initial: Value) -> Any:
        """As the operator, with this kernel's options; other sizes than it was made for get a kernel of their own."""
        return self._op._call(tensors, out, initial, self.compiled.options, self.compiled.target)

    @property
    def compile_seconds(self) -> float:
        return self.compiled.compile_seconds

    @property
    def resources(self) -> dict[str, int]:
        return self.compiled.resources

    @guarded
    def source(self, kind: str = "llvm") -> str:
        """The kernel as text of a kind: "tc", "schedule", "loops", "c", "llvm" or "asm"."""
        return self.compiled.source(kind)

    def show(self) -> Picture:
        """The schedule tree: text in a terminal, a picture in a notebook."""
        return Picture(self.source("schedule"))
