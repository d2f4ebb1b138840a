"""Expected values of the conformance programs that a short NumPy expression cannot give."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Array = Any


def conv(images: Array, W: Array) -> Array:
    """A 2-D convolution without padding, NCHW and OIHW."""
    windows = sliding_window_view(images, W.shape[2:], axis=(2, 3))
    return np.einsum("nchwab,mcab->nmhw", windows, W, dtype="f8").astype(images.dtype)


def tcg(A: Array, B: Array, C: Array) -> tuple[Array, Array, Array]:
    """Three chained sums, each over the range that two accesses share."""
    O1 = A.sum(2)
    j = min(B.shape[0], A.shape[1])
    O2 = sum(B[:j] + O1[i, :j, None, None] for i in range(A.shape[0]))
    k, m = min(C.shape[0], B.shape[1]), min(C.shape[1], B.shape[2])
    O3 = sum(C[:k, :m] + O2[q, :k, :m, None] for q in range(j))
    return O1, O2, O3


def fc(x: Array, *layers: tuple[Array, Array]) -> Array:
    """Fully connected layers with relu; the results of all of them."""
    outputs = []
    for W, b in layers:
        x = np.maximum(x @ W.T + b, 0)
        outputs.append(x)
    return tuple(outputs) if len(outputs) > 1 else outputs[0]
