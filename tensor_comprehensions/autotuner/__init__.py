"""Search for the options that make a def fast: candidates in, the fastest correct candidate out.

Invariant: no candidate runs in the caller's process; a stored winner agrees with the reference evaluator; the same
seed and the same timings give the same search.
"""
