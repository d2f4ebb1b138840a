"""Small networks of the kinds that users compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Transformer(nn.Module):
    """A block: attention with four heads, then two layers, each after a normalization and around a residual."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projection, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(self.first(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.layers(self.second(x))


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


class Gated(nn.Module):
    """RMSNorm and SwiGLU."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Cell(nn.LSTMCell):
    """A step of an LSTM, with both of its states in one tensor."""

    def __init__(self) -> None:
        super().__init__(8, 16)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat(super().forward(x), 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Softmax(1)),
        lambda: torch.randn(5, 8),
    ),
    "transformer": (Transformer, lambda: torch.randn(2, 6, 32)),
    "residual": (Residual, lambda: torch.randn(2, 8, 6, 5)),
    "gated": (Gated, lambda: torch.randn(2, 6, 32)),
    "lstm": (Cell, lambda: torch.randn(5, 8)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4), nn.Tanh()),
        lambda: torch.randint(10, (3, 5)),
    ),
}
