"""Sparse defs as loops over the stored elements (TACO: "The Tensor Algebra Compiler", OOPSLA 2017).

In: a checked function whose tensors have formats. Out: a loop program. Invariant: a kernel does not depend on the sizes
of its operands or on how many elements they store, except for the sizes in `SparseProblem.fixed`.
"""
