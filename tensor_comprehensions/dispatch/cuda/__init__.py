"""The way of a call on a GPU: the same steps as on the CPU, on one CUDA device or for none."""
