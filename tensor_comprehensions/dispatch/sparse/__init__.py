"""Calls with sparse operands, and `SparseTensor`: storage, conversions, tensors of other libraries, files.

Invariant: a kernel gets only tensors whose arrays obey their format, which `check_storage.py` checks once per pattern.
"""
