"""Schedule trees of kernels as values, their barriers, and what isl proves of them."""
