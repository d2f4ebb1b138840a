"""Statements in, a `StructuredOp` out if they are a contraction with its epilogue."""
