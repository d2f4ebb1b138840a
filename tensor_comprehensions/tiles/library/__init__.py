"""Tile kernels that come with the package, written with its public names, as users write theirs."""
