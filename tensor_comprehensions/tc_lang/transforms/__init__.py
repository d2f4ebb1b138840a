"""Transforms of bound functions, which keep their meaning, and their canonical forms."""
