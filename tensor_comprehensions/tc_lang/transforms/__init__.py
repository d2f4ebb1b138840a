"""Semantics-preserving transforms of functions, and canonical forms."""
