"""What planners ask of a `StructuredOp`: strides, operands, reuse in windows."""
