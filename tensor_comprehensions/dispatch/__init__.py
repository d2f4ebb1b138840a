"""Calls of operators: normalize the arguments, find, load or compile the kernel, run it, convert the outputs.

Invariant: a caller's tensor is written only when everything that can fail has succeeded.
"""
