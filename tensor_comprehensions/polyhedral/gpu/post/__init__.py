"""Optimizations of kernels' loop programs: unrolling, double buffering, full tiles without guards; bounds checks."""
