"""The pass lists: a bound def in, a compiled kernel out."""
