"""The backend of `torch.compile`: graphs of torch operations in, regions of them compiled as defs out.

Invariant: operations without a formula stay with torch, and the graph computes the same results.
"""
