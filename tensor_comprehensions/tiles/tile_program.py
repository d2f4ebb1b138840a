"""A tile kernel: a header and a Python function, which is traced once for each combination of sizes and target."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..core.errors import ArgumentError, InternalError, TCError
from ..loop_ir.nodes import Space
from ..target import GpuTarget
from . import specs
from .builder.program_builder import ProgramBuilder
from .builder.tile_views import MemoryView
from .lower.lower_tiles import decompose
from .notation import Header, Parameter, header


@dataclass(frozen=True, slots=True)
class TileProgram:
    """A tile kernel for any sizes.

    Attributes:
        header: the output and input tensors.
        function: takes the builder, the tensors under their names in the header, and other parameters.
    """

    header: Header
    function: Callable[..., None]

    @staticmethod
    def of(text: str, function: Callable[..., None]) -> TileProgram:
        """The kernel of the header `text` and `function`. Raises ArgumentError if they disagree."""
        if not callable(function) or isinstance(function, type):
            raise ArgumentError("a tile kernel is made of a function", found=type(function).__name__)
        known = header(text)
        names = [p.name for p in (*known.outputs, *known.inputs)]
        taken = list(inspect.signature(function).parameters)[1:]
        if taken[: len(names)] != names:
            raise ArgumentError(
                f"{function.__name__} takes other tensors than its header",
                expected=f"({', '.join(['k', *names])})", found=f"({', '.join(['k', *taken])})",
            )  # fmt: skip
        return TileProgram(known, function)

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that are not tensors."""
        count = 1 + len(self.header.outputs) + len(self.header.inputs)
        return tuple(inspect.signature(self.function).parameters)[count:]

    def trace(
        self, shapes: Mapping[str, Sequence[int]], target: GpuTarget, parameters: Mapping[str, Any]
    ) -> specs.Program:
        """Trace the program for inputs of these shapes and decompose it into instructions.

        Raises:
            ArgumentError: the shapes disagree with the header, or the program is wrong.
        """
        if unknown := [n for n in parameters if n not in self.parameters]:
            raise ArgumentError(
                f"{self.name} has no parameter '{unknown[0]}'", expected=", ".join(self.parameters) or "none"
            )
        if not target.async_copies:
            raise ArgumentError(f"tile kernels need sm_80 or newer, not {target.name}")
        sizes = self.header.match_sizes(shapes)
        k = ProgramBuilder(self.name, target)
        views = [_make_argument_view(p, sizes) for p in (*self.header.outputs, *self.header.inputs)]
        with self._errors_of_the_function():
            self.function(k, *views, **parameters)
            if not k.num_threads:
                raise ArgumentError(f"{self.name} has no threads", suggestion="begin with k.threads(128)")
            program = specs.Program(
                self.name, tuple(v.buffer for v in views), len(self.header.outputs), k.num_blocks, k.num_threads,
                tuple(k.names), k.body(), cluster=k.cluster,
            )  # fmt: skip
            return decompose(program, target)

    @contextmanager
    def _errors_of_the_function(self) -> Iterator[None]:
        """Convert exceptions of the user's code to ArgumentErrors; those of the package stay unchanged."""
        try:
            yield
        except (TCError, InternalError, RecursionError, MemoryError):
            raise
        except Exception as error:
            if not self._was_raised_by_function(error):
                raise
            raise ArgumentError(f"the function of {self.name} raised {type(error).__name__}: {error}") from error

    def _was_raised_by_function(self, error: Exception) -> bool:
        """Whether the innermost frame is outside the package; kernels of `tiles.library` count as user code."""
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        module = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__", ""))
        return module == self.function.__module__ or module.partition(".")[0] != __name__.partition(".")[0]


def _make_argument_view(p: Parameter, sizes: Mapping[str, int]) -> MemoryView:
    shape = [sizes[n] if isinstance(n, str) else n for n in p.shape]
    if 0 in shape:
        raise ArgumentError(f"{p.name} has no elements", expected="sizes of 1 or more", found=str(shape))
    return MemoryView.of(p.name, shape, p.dtype, Space.GLOBAL)
