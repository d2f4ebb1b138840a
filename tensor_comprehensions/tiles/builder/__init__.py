"""The language of tile kernels: words that a kernel calls, each of which adds a spec to its program."""
