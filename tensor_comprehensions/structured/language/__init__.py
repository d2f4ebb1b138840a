"""The schedule language: primitives that compose, and the `Plan` that they mean for an op."""
