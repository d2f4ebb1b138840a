"""The algebra of hierarchical (shape : stride) layouts.

In: shapes and strides of tensors or of the reads of a def, or the text of a layout. Out: layouts, swizzles, and the
step of a read along each iterator.
Invariant: a layout is a function from coordinates to offsets. An operation that cannot compute its result exactly
raises `CannotLower` with both operands in the message.
"""

from .access_layout import AccessStride, LayoutRead, can_merge, coalesce_together
from .algebra import (
    coalesce,
    complement,
    compose,
    compose_together,
    divide_layout,
    layout_product,
    left_inverse,
    right_inverse,
)
from .elements import common_vector, enlarge, narrow, widen
from .layout import Layout, concatenate
from .layout_notation import parse
from .modes import blocked_product, coalesce_modes, compose_modes, divide_modes, raked_product
from .swizzle import Swizzle

__all__ = [
    "AccessStride",
    "Layout",
    "LayoutRead",
    "Swizzle",
    "blocked_product",
    "can_merge",
    "coalesce",
    "coalesce_modes",
    "coalesce_together",
    "common_vector",
    "complement",
    "compose",
    "compose_modes",
    "compose_together",
    "concatenate",
    "divide_layout",
    "divide_modes",
    "enlarge",
    "layout_product",
    "left_inverse",
    "narrow",
    "parse",
    "raked_product",
    "right_inverse",
    "widen",
]
