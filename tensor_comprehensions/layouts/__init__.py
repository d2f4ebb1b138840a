"""The algebra of hierarchical (shape : stride) layouts.

In: shapes and strides, of tensors or of the reads of a def. Out: layouts, and what a read does along each iterator.
Always holds: a layout is a function from coordinates to offsets, and an operation that cannot give exactly the function
it promises refuses with both operands in its message.
"""

from .algebra import coalesce, complement, compose, divide_layout, layout_product, left_inverse, right_inverse
from .layout import Layout, concatenate
from .reads import AccessMovement, LayoutRead, can_merge, coalesce_together

__all__ = [
    "AccessMovement",
    "Layout",
    "LayoutRead",
    "can_merge",
    "coalesce",
    "coalesce_together",
    "complement",
    "compose",
    "concatenate",
    "divide_layout",
    "layout_product",
    "left_inverse",
    "right_inverse",
]
