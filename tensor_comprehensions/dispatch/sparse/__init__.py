"""Sparse tensors as a caller holds them: storage, conversions, other libraries' kinds, files.

Invariant: the parts of a `SparseTensor` keep the rules of its format, which `verify.py` checks once.
"""
