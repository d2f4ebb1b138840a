"""Bind functions to sizes: infer the range of every index, and prove, guard or check every access."""
