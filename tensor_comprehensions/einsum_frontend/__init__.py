"""`tc.einsum`: an equation as a def.

In: an equation with operands. Out: a def with one statement for each contraction of a pair, in the order that takes
the fewest operations, and its result. Invariant: equations have the meaning of `torch.einsum`, and a mistake in one
is an `ArgumentError` about subscripts and operands, not about the def.
"""

from .call import einsum

__all__ = ["einsum"]
