"""`tc.einsum`: an equation as a def.

In: an equation with operands. Out: a def with one statement for each contraction of a pair, in the order that takes
the fewest operations, and its result. Always holds: equations mean what they mean to `torch.einsum`, and whatever is
wrong with one is an `ArgumentError` that speaks of subscripts and operands, not of the def.
"""

from .call import einsum

__all__ = ["einsum"]
