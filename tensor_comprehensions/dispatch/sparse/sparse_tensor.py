"""`SparseTensor`: a tensor stored in a format, whose arrays are plain torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...core.error_boundary import only_tc_errors
from ...core.errors import ArgumentError
from ...core.lazy_import import lazy_module
from ...tc_lang.formats import Format, LevelKind, parse_format
from ...tc_lang.ir import Symbol
from ...tc_lang.unlocated_error import UnlocatedTypeError
from .array_input import check_index_type, check_shape, to_plain_tensor
from .check_storage import check_parts

if TYPE_CHECKING:
    import scipy.sparse

    from . import pack
else:
    pack = lazy_module("dispatch.sparse.pack")

Level = tuple[Tensor | None, Tensor] | None
"""The arrays of one level: None if it is dense, else (pos, crd), where pos is None for a singleton."""
FormatLike = Format | str
_ARRAYS = {LevelKind.DENSE: 0, LevelKind.SINGLETON: 1, LevelKind.COMPRESSED: 2}
"""How many arrays a level of each kind has: none, crd, or pos and crd."""
_is_traced = torch.compiler.is_dynamo_compiling


class SparseTensor:
    """A tensor that stores only some of its elements.

    Attributes:
        format: the storage format, level by level.
        shape: the extent of each dimension.
        levels: one item per level: None if the level is dense, else `(pos, crd)` of int32 or int64. The children of
            position q of the level above are the positions from pos[q] up to but not including pos[q+1], with the
            coordinates crd; pos is None for a singleton.
        values: the stored elements, shaped (positions of the last level that is not dense, *extents of the dense levels
            below it).
    """

    def __init__(self, format: Format, shape: Sequence[int], levels: Sequence[Level], values: Tensor) -> None:
        """Store the arrays without checking them; `from_arrays` checks them.

        Raises:
            ArgumentError: format, shape or levels have the wrong type. Values may have any type, as pytrees require.
        """
        if not _is_traced():
            _check_fields(format, shape, levels)
        self.format = format
        self.shape = (
            tuple(shape) if _is_traced() else tuple(n if isinstance(n, torch.SymInt) else int(n) for n in shape)
        )
        self.levels = tuple(levels)
        self.values = values

    @staticmethod
    def from_known(format: Format, shape: tuple[int, ...], levels: tuple[Level, ...], values: Tensor) -> SparseTensor:
        """Make a tensor from arrays that a kernel wrote, without any checks."""
        made = SparseTensor.__new__(SparseTensor)
        made.format, made.shape, made.levels, made.values = format, shape, levels, values
        return made

    @staticmethod
    @only_tc_errors
    def from_arrays(format: FormatLike, shape: Sequence[int], levels: Sequence[Any], values: Any) -> SparseTensor:
        """Make a tensor from existing arrays. They are checked, not copied.

        Args:
            format: a `Format` or its name: "csr", "sss(2,0,1)", "bsr(4,4)".
            shape: extents of the dimensions.
            levels: as the attribute `levels`; arrays may be anything that `torch.as_tensor` takes.
            values: as the attribute `values`.

        Raises:
            ArgumentError: the arrays violate the format; the message has the level, the position and the value.
        """
        extents = check_shape(shape)
        known = to_format(format, len(extents))
        if not isinstance(levels, Sequence):
            raise ArgumentError("levels are a sequence", expected="[None, (pos, crd)]", found=repr(levels))
        arrays = tuple(_to_level(n, level) for n, level in enumerate(levels))
        return SparseTensor(known, extents, arrays, to_plain_tensor(values, "the values")).check()

    @staticmethod
    @only_tc_errors
    def from_coordinates(
        coordinates: Any,
        values: Any,
        shape: Sequence[int],
        format: FormatLike,
        index_dtype: torch.dtype | None = None,
    ) -> SparseTensor:
        """Make a tensor from the coordinates and values of its elements, in any order.

        Elements with the same coordinates are added, unless the format keeps repeated coordinates.

        Args:
            coordinates: integers, shaped (rank, number of elements).
            values: one per column of `coordinates`.
            shape: extents of the dimensions.
            format: a `Format` or its name.
            index_dtype: the type of pos and crd; None: int32, or int64 if an extent or the number of elements needs it.

        Raises:
            ArgumentError: a coordinate is out of range, the numbers of coordinates and values differ, or there is no
                memory for a dense level.
        """
        extents = check_shape(shape)
        known = to_format(format, len(extents))
        check_index_type(index_dtype, extents)
        places, elements = _to_coordinates(coordinates), to_plain_tensor(values, "the values")
        return pack.from_coordinates(places, elements, extents, known, index_dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (str(self.format), self.shape, self.levels, self.values)

    # --- properties ----------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the arrays."""
        return self.values.device

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nnz(self) -> int:
        """The number of stored elements, including stored zeros."""
        return self.values.numel()

    @property
    def index_dtype(self) -> torch.dtype:
        """The type of pos and crd; int32 if all levels are dense."""
        return next((level[1].dtype for level in self.levels if level is not None), torch.int32)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"SparseTensor({self.format}, shape={self.shape}, nnz={self.nnz}, dtype={dtype})"

    # --- conversions ---------------------------------------------------------------------------------------------

    def coordinates(self) -> Tensor:
        """The coordinates of all stored elements, in the order of `values.reshape(-1)`: int64, shaped (rank, nnz)."""
        return pack.to_coordinates(self)

    def to_dense(self) -> Tensor:
        """The dense tensor, with 0 for elements that are not stored; repeated elements are added.

        Raises:
            ArgumentError: there is no memory for it.
        """
        if self.dtype in pack.SIGNED:
            return self.with_values(self.values.view(pack.SIGNED[self.dtype])).to_dense().view(self.dtype)
        places, flat = self.coordinates(), self.values.reshape(-1)
        zeros = flat.new_zeros(self.shape) if _is_traced() else _new_zeros(flat, self.shape)
        if self.dtype is torch.bool:  # an element is true if one of its repetitions is
            return zeros.index_put(tuple(places[:, flat]), flat.new_ones(())) if self.ndim else flat.reshape(())
        return zeros.index_put(tuple(places), flat, accumulate=True) if self.ndim else flat.reshape(())

    def as_strided(self) -> Tensor:
        """A tensor in an all-dense format as a strided torch tensor that shares its memory."""
        order = self.format.order
        return self.values.permute([order.index(d) for d in range(len(order))])

    @only_tc_errors
    def to(self, format: FormatLike) -> SparseTensor:
        """The tensor in another format; itself if it already has that format. Stored zeros stay stored."""
        known = to_format(format, self.ndim)
        if known == self.format:
            return self
        places, flat = self.coordinates(), self.values.reshape(-1)
        return pack.from_coordinates(places, flat, self.shape, known, self.index_dtype)

    def with_values(self, values: Tensor) -> SparseTensor:
        """A tensor with the same pattern and other values.

        Raises:
            ArgumentError: the values are not a tensor, or have another shape.
        """
        if not isinstance(values, Tensor):
            raise ArgumentError("values are a torch tensor", found=type(values).__name__)
        if values.shape != self.values.shape:
            raise ArgumentError(
                "the values do not fit the stored places",
                expected=f"a shape of {tuple(self.values.shape)}",
                found=f"a shape of {tuple(values.shape)}",
            )
        return SparseTensor(self.format, self.shape, self.levels, values)

    def check(self) -> SparseTensor:
        """Check the arrays against the format, and return the tensor itself.

        Raises:
            ArgumentError: the arrays violate the format; the message has the level, the position and the value.
        """
        check_parts(self.format, self.shape, self.levels, self.values)
        return self

    def torch(self) -> Tensor:
        """The tensor as a torch tensor that shares its arrays: COO, CSR, CSC, BSR, BSC or strided.

        Raises:
            ArgumentError: torch has no such layout.
        """
        from .interop import to_torch

        return to_torch(self)

    def scipy(self) -> scipy.sparse.sparray:
        """The tensor as a SciPy array that shares its arrays: COO, CSR, CSC or BSR.

        Raises:
            ArgumentError: SciPy has no such format, or is not installed.
        """
        from .interop import to_scipy

        return to_scipy(self)


def _to_coordinates(given: Any) -> Tensor:
    """Coordinates as int64. An empty array may have any type."""
    found = to_plain_tensor(given, "the coordinates")
    if found.numel() and (found.dtype.is_floating_point or found.dtype.is_complex or found.dtype is torch.bool):
        raise ArgumentError("coordinates are integers", found=str(found.dtype).removeprefix("torch."))
    return found.long()


def _check_fields(format: object, shape: object, levels: object) -> None:
    """Check the types of the constructor's arguments. Raises ArgumentError."""
    if not isinstance(format, Format) or not isinstance(shape, Sequence) or not isinstance(levels, Sequence):
        raise ArgumentError(
            "a SparseTensor has a Format, a shape and a sequence of levels",
            found=", ".join(type(x).__name__ for x in (format, shape, levels)),
            suggestion="SparseTensor.from_arrays takes names of formats, and whatever torch makes tensors of",
        )
    if not all(isinstance(n, Integral | torch.SymInt) for n in shape):
        raise ArgumentError("the extents of a SparseTensor are whole numbers", found=str(tuple(shape)))


def to_format(format: FormatLike, rank: int) -> Format:
    """Parse a format for a tensor of `rank` dimensions.

    Raises:
        ArgumentError: no format has this name, or it has another rank.
    """
    if isinstance(format, Format):
        if format.rank != rank:
            raise ArgumentError(f"the format '{format}' is for {format.rank} dimensions, the tensor has {rank}")
        return format
    if not isinstance(format, str):
        raise ArgumentError(
            "a format is a word", expected='"csr", "ds(1,0)", "bsr(4,4)"', found=repr(format)
        )  # fmt: skip
    word, numbers = split_format(format)
    try:
        return parse_format(word, numbers, rank)
    except UnlocatedTypeError as m:
        raise ArgumentError(m.message, expected=m.expected, found=m.found, suggestion=m.suggestion) from None


def split_format(text: str) -> tuple[str, tuple[int, ...]]:
    """The word and the numbers of `word(numbers)`.

    Raises:
        ArgumentError: the text has another form.
    """
    word, bracket, rest = text.replace(" ", "").partition("(")
    numbers = rest.removesuffix(")").split(",") if bracket else []
    if not word.isidentifier() or (bracket and not rest.endswith(")")) or not all(n.isdecimal() for n in numbers):
        raise ArgumentError(f"'{text}' is not a format", expected='a word, or a word and numbers: "csr", "bsr(4,4)"')
    return word, tuple(map(int, numbers))


def _to_level(n: int, level: Any) -> Level:
    if level is None:
        return None
    try:
        pos, crd = level
    except (TypeError, ValueError):
        raise ArgumentError("a level is None or a pair of arrays", expected="(pos, crd)", found=repr(level)) from None
    if pos is not None:
        pos = to_plain_tensor(pos, f"pos of level {n}")
    return pos, to_plain_tensor(crd, f"crd of level {n}")


def _new_zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    try:
        return like.new_zeros(shape)
    except RuntimeError as error:
        raise ArgumentError(
            "there is no memory for the dense tensor", found=f"a shape of {shape}", suggestion="keep it sparse"
        ) from error


def _rebuild(format: str, shape: tuple[int, ...], levels: tuple[Level, ...], values: Tensor) -> SparseTensor:
    """Rebuild a pickled tensor. It is not checked before a kernel takes it."""
    return SparseTensor(to_format(format, len(shape)), shape, levels, values)


torch.serialization.add_safe_globals([_rebuild])


def _flatten(tensor: SparseTensor) -> tuple[list[Any], Any]:
    return [tensor.levels, tensor.values], (_name_of(tensor.format), tensor.shape)


_formats_by_name: dict[tuple[str, int], Format] = {}
"""The formats of flattened tensors: Dynamo can read a dictionary, but cannot construct a `Format`."""


def _name_of(format: Format) -> str:
    name = str(format)
    _formats_by_name.setdefault((name, format.rank), format)
    return name


_name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _unflatten(parts: Any, context: Any) -> SparseTensor:
    (levels, values), (name, shape) = parts, context
    known = _formats_by_name.get((name, len(shape)))
    return SparseTensor(to_format(name, len(shape)) if known is None else known, shape, levels, values)


def _flatten_with_keys(tensor: SparseTensor) -> tuple[list[tuple[Any, Any]], Any]:
    (levels, values), context = _flatten(tensor)
    return [(pytree.GetAttrKey("levels"), levels), (pytree.GetAttrKey("values"), values)], context


def _from_dumpable(dumped: Any) -> Any:
    name, shape = dumped
    return name, tuple(shape)


pytree.register_pytree_node(
    SparseTensor,
    _flatten,
    _unflatten,
    serialized_type_name="tensor_comprehensions.SparseTensor",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=list,
    from_dumpable_context=_from_dumpable,
)


def storage_of(t: Symbol) -> tuple[Format | None, tuple[int, ...] | None]:
    """The format of a sparse tensor and how many arrays each level has; (None, None) for a dense tensor."""
    return (t.format, count_arrays(t.format)) if t.format is not None and t.is_sparse else (None, None)


def count_arrays(format: Format) -> tuple[int, ...]:
    """How many arrays each level has."""
    return tuple(_ARRAYS[level.kind] for level in format.levels)


def flat_values(values: Sequence[Any]) -> list[Any]:
    """Values with each sparse tensor replaced by its stored values."""
    return [x.values if isinstance(x, SparseTensor) else x for x in values]
