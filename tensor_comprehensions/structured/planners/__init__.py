"""A `StructuredOp` in, the plans worth comparing and the best of them out."""
