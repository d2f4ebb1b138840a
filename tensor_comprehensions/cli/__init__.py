"""The commands of `tensorc` beyond `show` and `run`: the cache, tuning, contractions, sparse expressions."""
