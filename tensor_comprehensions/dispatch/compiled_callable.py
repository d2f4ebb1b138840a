"""The base class of the kernels that `compile` returns to users, for all devices and kinds of operands."""

from __future__ import annotations

from typing import Generic, NoReturn, Protocol, TypeVar

from ..core.diagnostics import ScheduleView
from ..core.error_boundary import only_tc_errors
from ..core.errors import ArgumentError


class Compiled(Protocol):
    """The interface of the compiler's kernels, for all devices."""

    @property
    def compile_seconds(self) -> float: ...

    @property
    def resources(self) -> dict[str, int]: ...

    def source(self, kind: str) -> str: ...


C = TypeVar("C", bound=Compiled)
K = TypeVar("K")


class CompiledCallable(Generic[C]):
    """A compiled kernel with its texts and metadata. Subclasses add the call.

    A kernel is immutable, so a copy is the kernel itself. It has code in the memory of this process, so it cannot be
    pickled.

    Attributes:
        compiled: the compiled kernel with its texts and metadata.
    """

    compiled: C

    def __copy__(self: K) -> K:
        return self

    def __deepcopy__(self: K, memo: object) -> K:
        return self

    def __reduce__(self) -> NoReturn:
        raise ArgumentError("a kernel is code of this process", suggestion="pickle the operator, and compile it there")

    @property
    def compile_seconds(self) -> float:
        """The seconds that compilation took; those of the lookup, if the kernel came from the cache."""
        return self.compiled.compile_seconds

    @property
    @only_tc_errors
    def resources(self) -> dict[str, int]:
        """Counts of kernels, bytes and threads by name, depending on the device."""
        return self.compiled.resources

    def show(self) -> ScheduleView:
        """The schedule tree: text in a terminal, a picture in a notebook."""
        return ScheduleView(self.compiled.source("schedule"))
