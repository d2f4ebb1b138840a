"""The polyhedral strategy for graphics processors: blocks, threads, promotion to shared memory and registers.

A legalised `BoundFunction` and `MappingOptions` come in, a module of kernels with launches goes out.
"""

from .strategy import explain, lower

__all__ = ["explain", "lower"]
