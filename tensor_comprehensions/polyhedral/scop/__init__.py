"""A bound def in, statements that isl knows out: index fusion, split reductions, domains and dependences."""
