"""The gradient of a def, as a def: readable text that is checked and compiled like any other.

Invariant: only terms that algebra proves to be zero are dropped.
"""

from __future__ import annotations

from .differentiate import differentiable_inputs, differentiate
from .gradient import Gradient, Key, parse_given_gradient
from .saved_tensors import with_saved_outputs

__all__ = ["Gradient", "Key", "differentiable_inputs", "differentiate", "parse_given_gradient", "with_saved_outputs"]
