"""`BoundFunction` in, loop program out, by way of isl schedule trees. The only importer of isl.

Always holds: after every transform the dependences of the original program are respected, and a checker can prove it.
"""
