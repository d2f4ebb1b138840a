"""Values that look like tensors, and have no memory with their elements or not the expected one."""

from __future__ import annotations

from typing import Any

import torch


class Subclass(torch.Tensor):
    """A tensor that might have no memory of its own."""


def strange_values(n: int) -> dict[str, Any]:
    """By what is strange about them; `n` is how many elements those have that have a shape."""
    complex_ = torch.zeros(n, dtype=torch.complex64)
    return {
        "none": None,
        "number": 1.0,
        "list": [1.0] * n,
        "numpy": torch.zeros(n).numpy(),
        "subclass": torch.zeros(n).as_subclass(Subclass),
        "negated view": torch.view_as_real(complex_).select(1, 0)._neg_view(),
        "zero tensor": torch._efficientzerotensor((n,)),
        "meta": torch.empty(n, device="meta"),
        "complex": complex_,
        "quantized": torch.quantize_per_tensor(torch.zeros(n), 0.1, 0, torch.qint8),
        "sparse": torch.zeros(n).to_sparse(),
        "mkldnn": torch.zeros(n).to_mkldnn(),
    }
