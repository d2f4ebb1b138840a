"""The polyhedral lowering: `BoundFunction` in, loop program out. Only this package imports isl.

Invariant: the emitted order respects the dependences of the program, and `legality` can prove it.
"""
