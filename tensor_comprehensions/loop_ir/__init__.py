"""The loop program, which lowerings produce and emitters print.

Invariants: nodes are immutable values; a module that passes `verify` computes the same under every emitter and under
`interpret`.
"""
