"""Statements in, groups that run in one kernel out: fusion, tile sizes, loop nests, the proof of legality."""
