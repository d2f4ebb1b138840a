"""Structured kernels beside torch and beside what the machine does at most: `python -m benchmarks.structured`."""
