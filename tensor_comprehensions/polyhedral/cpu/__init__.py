"""Scheduled groups in, loop programs for a CPU out."""
