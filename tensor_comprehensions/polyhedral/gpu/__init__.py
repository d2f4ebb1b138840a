"""The polyhedral lowering for GPUs: blocks, threads, promotion to shared memory and registers.

A legalized `BoundFunction` and `MappingOptions` come in, a module of kernels with launches goes out.
"""
