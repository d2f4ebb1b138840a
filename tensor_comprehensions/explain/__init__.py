"""Reports on kernels: def, schedule, loops and machine code next to each other, with the reasons of the compiler.

Only `explain` of operators and kernels, and `tensorc explain`, import it.
"""
