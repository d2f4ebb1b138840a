"""Tile kernels that come with the package, written only with its public API."""
