"""Analyses of a `StructuredOp` for planners: strides, operands, reuse in windows."""
