"""Search for the options that make a def fast: candidates in, the fastest that is right out.

Always holds: no candidate runs in the caller's process; what is kept computes what the reference evaluator does; the
same seed and the same timings give the same search.
"""
