"""Loop programs in, text out: one file per target.

Always holds: emitters make no decisions, and the same module gives the same bytes in any process.
"""
