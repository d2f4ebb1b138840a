"""Reports on kernels: def, schedule, loops and machine code side by side, with the compiler's decisions and reasons.

It is imported only by `explain` of operators and kernels, by `tensorc explain`, and with `TC_EXPLAIN`.
"""
