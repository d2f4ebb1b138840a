"""The polyhedral strategy for graphics processors: blocks, threads, promotion to shared memory and registers."""
