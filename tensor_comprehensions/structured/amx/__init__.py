"""Plans and micro-kernels for AMX, whose tile registers hold whole matrices."""
