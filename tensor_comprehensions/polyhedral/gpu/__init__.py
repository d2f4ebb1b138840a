"""The polyhedral strategy for graphics processors: blocks, threads, promotion to shared memory and registers.

A legalised `BoundFunction` and `MappingOptions` come in, a module of kernels with launches goes out.
"""

from .strategy import default_options, explain, lower

__all__ = ["default_options", "explain", "lower"]
