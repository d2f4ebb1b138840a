"""A promoted schedule tree in, the loop program of a kernel out."""
