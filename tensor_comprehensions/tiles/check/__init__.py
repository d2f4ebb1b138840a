"""Proofs about tile programs, by running their bodies on tags and counting accesses."""
