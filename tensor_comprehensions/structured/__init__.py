"""One class of op (named iterators, affine operand maps, scalar body) lowered to register-tiled loop programs.

Always holds: nothing here knows of isl; a pipeline that does not apply refuses with a reason.
"""
