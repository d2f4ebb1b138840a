"""Statements in, a `StructuredOp` out where they are a contraction with its epilogue."""
