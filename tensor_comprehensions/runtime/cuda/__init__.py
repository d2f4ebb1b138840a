"""CUDA text in, kernels on a device out, and their launches."""
