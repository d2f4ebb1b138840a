"""The loop program: what lowerings produce and emitters print.

Always holds: nodes are immutable values; a module that passes `verify` runs the same under every emitter and under
`interpret`.
"""
