"""Calls that need no Python once their kernel is known: machine code that guards, finds and launches."""
