"""A `StructuredOp` and its `Plan` in, a loop program out."""
