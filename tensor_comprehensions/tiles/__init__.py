"""GPU tile programs: data tensors and thread tensors with hierarchical layouts.

In: the notation of the Graphene paper. Out: tiled and partitioned tensors, with index expressions of the loop program;
swizzles and descriptors for them.
Invariant: a tensor addresses exactly the elements that its operations define, with a predicate where sizes were padded,
or an operation raises an error that names both operands.
"""

from ..core.dtypes import BFLOAT16 as bf16
from ..core.dtypes import FLOAT16 as fp16
from ..core.dtypes import FLOAT32 as fp32
from ..layouts import Layout, Swizzle
from .builder.scalars import exp, exp2, inf, max, min, rsqrt, sigmoid, sqrt, tanh, where
from .lower.descriptors import Descriptor, descriptor
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
    "bf16",
    "choose_swizzle",
    "conflicts",
    "descriptor",
    "exp",
    "exp2",
    "fp16",
    "fp32",
    "header",
    "inf",
    "max",
    "min",
    "rsqrt",
    "sigmoid",
    "sqrt",
    "tanh",
    "tensor",
    "threads",
    "where",
]
