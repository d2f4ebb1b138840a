"""Promotion: a schedule tree in, the tree with copies to shared memory and registers out."""
