"""Calls on CUDA devices, with the same steps as on the CPU, and kernels for GPUs that are not present."""
