"""Structured kernels next to torch and to the limits of the machine: `python -m benchmarks.structured`."""
