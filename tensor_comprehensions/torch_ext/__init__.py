"""Defs as operators of torch's dispatcher: `torch.ops.tc.<name>`, and what torch asks of an operator.

In: a def with its kernels and gradients. Out: an `OpOverload` that torch can run, trace, batch, differentiate and cast
for. Always holds: an operator is functional (fresh outputs, no input changed), and its name tells what it computes, so
that another definition never changes what a traced graph means.
"""
