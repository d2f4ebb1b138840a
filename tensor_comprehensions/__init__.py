"""Tensor Comprehensions: write the maths of an operator, get a fast, differentiable PyTorch operator."""
