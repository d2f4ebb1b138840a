"""Sizes that may change from call to call: the rows they count, and the stages that run over these."""
