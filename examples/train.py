"""Train a recommender with a layer written in TC: a rating is the inner product of a user's and an item's factors.

The ratings are synthetic: hidden factors plus noise, so the best possible error is known. The gradients, which scatter
into the tables of factors, are derived from the def.

Usage: python examples/train.py [--epochs N]
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

import tensor_comprehensions as tc

RATING = """
def rating(long(B) user, long(B) item, float(U,F) users, float(I,F) items, float(U) generous, float(I) good, float mean)
        -> (y) {
    y(b) +=! users(user(b),f) * items(item(b),f)
    y(b) = y(b) + generous(user(b)) + good(item(b)) + mean
}
"""
USERS, ITEMS, FACTORS, NOISE = 400, 300, 8, 0.3


def synthetic(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Users, items and ratings, from hidden factors, means of users and items, and noise."""
    hidden = torch.randn(USERS, 4), torch.randn(ITEMS, 4), torch.randn(USERS), torch.randn(ITEMS)
    user, item = torch.randint(USERS, (count,)), torch.randint(ITEMS, (count,))
    clean = (hidden[0][user] * hidden[1][item]).sum(1) + hidden[2][user] + hidden[3][item] + 3
    return user, item, clean + NOISE * torch.randn(count)


def model() -> tc.Module:
    """The layer, with small random factors and all other parameters 0."""
    return tc.Module(
        RATING,
        {name: lambda x: x.normal_(std=0.1) for name in ("users", "items")}
        | dict.fromkeys(("generous", "good", "mean")),
        sizes={"U": USERS, "I": ITEMS, "F": FACTORS},
    )


def train(epochs: int) -> tuple[float, float]:
    """Train, print the error on held-out ratings after each epoch, and return the first and the last error."""
    torch.manual_seed(0)
    user, item, score = synthetic(60_000)
    seen, held = slice(0, 50_000), slice(50_000, None)
    layer = model()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02, weight_decay=1e-5)
    errors = []
    for epoch in range(epochs):
        for batch in torch.arange(50_000)[torch.randperm(50_000)].split(1000):
            optimizer.zero_grad()
            loss = (layer(user[seen][batch], item[seen][batch]) - score[seen][batch]).square().mean()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            error = (layer(user[held], item[held]) - score[held]).square().mean().sqrt().item()
        errors.append(error)
        print(f"epoch {epoch + 1:2}: error {error:.3f} (spread {score[held].std():.3f}, noise {NOISE})", flush=True)
    return errors[0], errors[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    first, last = train(parser.parse_args().epochs)
    return 0 if last < first else 1


if __name__ == "__main__":
    sys.exit(main())
