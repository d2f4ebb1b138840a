"""A bound def in, a scop for isl out: index fusion, split reductions, domains and dependences."""
