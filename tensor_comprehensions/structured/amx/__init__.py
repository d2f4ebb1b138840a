"""Plans and micro-kernels that multiply matrices in tile registers."""
