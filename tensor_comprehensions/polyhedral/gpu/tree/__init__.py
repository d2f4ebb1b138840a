"""Schedule trees of kernels as values, their barriers, and their verification by isl."""
