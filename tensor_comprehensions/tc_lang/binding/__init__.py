"""Functions with sizes: the range of every index, and a proof, guard or check for every access."""
