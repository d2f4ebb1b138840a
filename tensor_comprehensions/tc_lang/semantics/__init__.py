"""Names, types and defs: syntax trees to checked functions, and back."""
