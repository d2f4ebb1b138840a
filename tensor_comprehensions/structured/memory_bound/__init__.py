"""Schedules of reductions, permutations and copies, which memory bounds."""
