"""GPU tile programs: data tensors and thread tensors with hierarchical layouts.

In: the notation of the paper on Graphene. Out: tensors, tiled and taken apart, with index expressions of the loop
program; swizzles and descriptors for them.
Always holds: a tensor finds exactly the elements that its operations say, with a predicate where sizes were enlarged,
or an operation refuses and names both operands.
"""

from ..layouts import Layout, Swizzle
from .descriptors import Descriptor, descriptor
from .notation import Header, Parameter, header, tensor, threads
from .swizzles import Access, choose_swizzle, conflicts
from .tensors import DataTensor, ThreadTensor

__all__ = [
    "Access",
    "DataTensor",
    "Descriptor",
    "Header",
    "Layout",
    "Parameter",
    "Swizzle",
    "ThreadTensor",
    "choose_swizzle",
    "conflicts",
    "descriptor",
    "header",
    "tensor",
    "threads",
]
