"""Graphs of torch operations in, regions of them compiled as defs out: the backend of `torch.compile`.

Always holds: what cannot be expressed stays as it was, and the result is that of the graph.
"""
