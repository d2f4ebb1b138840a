"""Sparse defs as loops over the stored elements (TACO: "The Tensor Algebra Compiler", OOPSLA 2017).

A checked function whose tensors have formats goes in, a loop program comes out. Always holds: a kernel depends neither
on the sizes of its operands nor on how many elements they store.
"""
