"""`BoundFunction` in, loop program out, scheduled and proved with isl, whose only importer this is.

Always holds: the order that is emitted respects the dependences of the program, and `legality` can prove it.
"""
