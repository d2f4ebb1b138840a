"""The outcomes of candidates, as a search uses them and as a journal stores them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..cache.options_proto import to_message
from ..options import CpuOptions
from . import tuner_pb2 as pb


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a candidate.

    Attributes:
        seconds: lower quartile of the measured times, because other load only lengthens them. None if the candidate
            failed, or was too slow to be timed.
        spread: interquartile range, relative to the median.
        digest: a hash of the generated code. elapsed: seconds from the start of the search.
    """

    options: Any
    status: pb.Status
    message: str
    seconds: float | None
    spread: float
    runs: int
    digest: str
    generation: int
    compiling: float
    running: float
    elapsed: float

    @property
    def kind(self) -> str:
        """The name of the status in lower case, such as "crash"."""
        return pb.Status.Name(self.status).lower()


def failure_reasons(outcomes: Sequence[Outcome]) -> str:
    """Why candidates failed, the most frequent reasons first."""
    failed = [o for o in outcomes if o.seconds is None and o.status != pb.SLOW]
    counted = Counter(o.kind for o in failed)
    examples = {o.kind: o.message for o in reversed(failed)}
    return "; ".join(f"{count} x {kind} ({examples[kind][:200]})" for kind, count in counted.most_common(4))


def median_seconds(outcomes: Sequence[Outcome]) -> float | None:
    """The median time of the outcomes with a time."""
    times = [o.seconds for o in outcomes if o.seconds is not None]
    return statistics.median(times) if times else None


def outcome_message(options: CpuOptions, reply: pb.Reply, generation: int, elapsed: float) -> pb.Outcome:
    """The journal record of an outcome."""
    return pb.Outcome(
        options=to_message(options), status=reply.status, message=reply.message[:500],
        timing=reply.timings[0] if reply.timings else None, digest=reply.digest, generation=generation,
        compiling=reply.compiling, running=reply.running, elapsed=elapsed,
    )  # fmt: skip


def outcome_from_message(m: pb.Outcome, options: CpuOptions) -> Outcome:
    """The outcome in a journal record."""
    fine = m.status == pb.OK and m.timing.runs > 0
    seconds = m.timing.low if fine else None
    spread = (m.timing.high - m.timing.low) / m.timing.median if fine else 0.0
    return Outcome(
        options, m.status, m.message, seconds, spread, m.timing.runs, m.digest, m.generation, m.compiling, m.running,
        m.elapsed,
    )  # fmt: skip


def outcome_reply(known: Outcome, reply: pb.Reply) -> pb.Reply:
    """The reply for a candidate with the same code as that of `known`."""
    timing = pb.Timing(
        median=known.seconds or 0.0, low=known.seconds or 0.0, high=known.seconds or 0.0, runs=known.runs
    )
    return pb.Reply(
        status=known.status, message="the same code as another candidate", digest=reply.digest,
        timings=[timing] if known.seconds is not None else [], compiling=reply.compiling,
    )  # fmt: skip
