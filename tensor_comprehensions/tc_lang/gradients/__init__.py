"""The gradient of a def, as a def: text that a person can read, checked and compiled like any other.

Always holds: only terms that algebra proves to be zero are left out.
"""

from __future__ import annotations

from .differentiate import differentiable, differentiate
from .gradient import Gradient, Key, given_gradient
from .keep import keeping

__all__ = ["Gradient", "Key", "differentiable", "differentiate", "given_gradient", "keeping"]
