"""The frozen option records of the strategies: keyword arguments, command-line flags and search genes at once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .errors import ArgumentError
from .structured.strategy import Strategies, frozen

FUSION_STRATEGIES = ("max", "preserve3", "min")


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """How the polyhedral strategy lowers for a CPU. Every field has a default that is chosen from the sizes.

    Attributes:
        fusion: "max" fuses wherever dependences allow, "preserve3" only where parallelism survives,
            "min" keeps one loop nest per statement.
        tile: sizes for the outer band, outermost first; 0 leaves a dimension alone; empty chooses.
        vectors: vectors in flight in an innermost vector loop; 0 chooses.
        grain: least number of scalar operations worth a thread; 0 never runs in parallel.
        structured: hand contractions to the register-tiled micro-kernels of `structured`.
        contract: keep temporaries that fusion makes local in small thread-private buffers.
        strategy: how contractions are lowered, instead of as the cost model says: a pipeline, an expert (a function
            of an op and a target that returns one), or pairs of the tensor that a contraction defines and one of these.
    """

    fusion: str = field(default="preserve3", metadata={"choices": FUSION_STRATEGIES})
    tile: tuple[int, ...] = field(default=(), metadata={"choices": ((), (8,), (16,), (32,), (64,))})
    vectors: int = field(default=0, metadata={"choices": (0, 1, 2, 4, 8)})
    grain: int = field(default=32768, metadata={"choices": (0, 8192, 32768, 131072)})
    structured: bool = field(default=True, metadata={"choices": (False, True)})
    contract: bool = field(default=True, metadata={"choices": (False, True)})
    strategy: Strategies = None


def check_fields(options: Any) -> None:
    """Has every field of a record of options a value that means something? Raises ArgumentError."""
    for f in fields(options):
        value = getattr(options, f.name)
        if f.name == "strategy":
            frozen(value)
        if "choices" not in f.metadata:
            continue
        choices, numbers = f.metadata["choices"], value if isinstance(value, tuple) else (value,)
        if type(value) is not type(f.default):
            wrong = True
        elif isinstance(value, str):
            wrong = value not in choices
        else:
            wrong = not all(isinstance(n, int) and 0 <= n < 1 << 31 for n in numbers)
        if wrong:
            raise ArgumentError(
                f"the option {f.name} is {value!r}", expected=f"such as {', '.join(map(repr, choices))}"
            )
