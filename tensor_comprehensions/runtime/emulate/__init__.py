"""CUDA text in, the same kernels on the CPU out, with every access checked."""
