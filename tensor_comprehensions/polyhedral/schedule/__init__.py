"""Statements in, scheduled groups (one kernel each) out: fusion, tile sizes, loop nests, the proof of legality."""
