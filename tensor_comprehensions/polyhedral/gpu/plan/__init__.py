"""A fusion group in, the mapping of its loops to blocks, threads and vectors out."""
