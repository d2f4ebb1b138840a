"""The way of a call: arguments in, outputs out; the kernel between them found, loaded or compiled.

Invariant: a caller's tensor is written only when everything that can fail has succeeded.
"""
