"""Small pieces that every package shares: errors, scalar types, environment variables, logs, lazy imports."""
