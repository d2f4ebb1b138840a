"""Defs as operators of torch's dispatcher: `torch.ops.tc.<name>` with fake, autograd, vmap and autocast kernels.

Invariants: an operator is functional (fresh outputs, no input changed), and its name depends on the content of the
def, so that a later definition never changes a traced graph.
"""
