"""What `tensorc` can do beyond looking at a def: exchange what the cache has, tune, and compare contractions."""
