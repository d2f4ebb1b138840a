"""The embedded language of tile kernels: methods of a builder, each of which adds a node to the program."""
