"""Analyses of a `StructuredOp` for planners: strides, operands, and the reuse of scalars in windows."""
