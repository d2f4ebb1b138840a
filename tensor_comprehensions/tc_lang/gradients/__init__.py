"""The gradient of a def, as a def: text that a person can read, checked and compiled like any other.

Always holds: only terms that algebra proves to be zero are left out.
"""
