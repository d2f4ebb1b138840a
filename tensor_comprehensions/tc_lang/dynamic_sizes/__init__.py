"""Sizes that may change from call to call: the rows that they count, and the stages that run over rows."""
