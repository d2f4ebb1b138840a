"""Calls that need no Python once their kernel is known: machine code checks arguments, finds and launches kernels."""
