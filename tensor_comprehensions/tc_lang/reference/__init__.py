"""The reference evaluator: the meaning of a def, computed with NumPy."""
