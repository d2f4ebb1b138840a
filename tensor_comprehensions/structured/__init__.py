"""One class of op (named iterators, affine operand maps, scalar body) lowered to register-tiled loop programs.

Always holds: nothing here depends on isl; a schedule that does not apply is refused with a reason.
"""
