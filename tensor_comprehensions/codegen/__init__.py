"""Code generators: loop programs in, text out, one printer per target.

Invariants: emitters make no decisions, and the same module gives the same bytes in any process.
"""
