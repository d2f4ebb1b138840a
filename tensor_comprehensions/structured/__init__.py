"""Lowering of structured ops (named iterators, affine operand maps, scalar body) to register-tiled loop programs.

Nothing here depends on isl. A schedule that does not apply raises CannotLower with the reason.
"""
