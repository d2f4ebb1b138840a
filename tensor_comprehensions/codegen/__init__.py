"""Loop programs in, text out: one file per target.

Always holds: an emitter decides nothing, and the same module gives the same bytes in any process.
"""
