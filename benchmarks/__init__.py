"""Times of compiled defs beside torch's versions of the same work: `python -m benchmarks --help`.

In: the table of `kernels.py`. Out: a table, JSON and a chart. Always holds: every time belongs to a result that was
compared with a float64 reference in the same process.
"""
