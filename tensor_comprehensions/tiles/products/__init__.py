"""Products of defs on tensor cores: recognition, choice of tiles, tile programs."""
