"""Name resolution and type checking: syntax trees to checked functions, and back."""
