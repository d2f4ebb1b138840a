"""Emitted text in, loaded kernels out, and their launches on real memory.

Invariant: nothing here knows the language; a failing kernel raises, it never kills the process.
"""
