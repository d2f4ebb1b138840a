"""Verify tile programs by running their decompositions on tags, and count the bank conflicts of their accesses."""
