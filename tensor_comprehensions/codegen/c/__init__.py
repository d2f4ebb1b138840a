"""Loop programs in, C99 with OpenMP out."""
