"""Functions at which Dynamo breaks its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def run_outside_graphs(reason: str) -> Callable[[F], F]:
    """Make Dynamo break its graph at the function, and trace nothing that the function calls.

    Equivalent to `torch.compiler.disable`, which imports Dynamo. `fullgraph=True` reports the reason.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP

    def mark(function: F) -> F:
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return function

    return mark
