"""Passes over loop programs: a statement or a kernel in, an equivalent one out."""
