"""Reports on kernels: def, schedule, loops and machine code side by side, with the reasons of the compiler.

Nothing imports it but `explain` of operators and kernels, and `tensorc explain`.
"""
