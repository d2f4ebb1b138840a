"""The polyhedral lowering for GPUs: mapping to blocks and threads, promotion to shared memory and registers.

A legalized `BoundFunction` and `MappingOptions` in, a module of kernels with launches out.
"""
