"""The tuner: asks a search for candidates, has them evaluated, and accepts only correct and faster ones.

Invariant: outcomes are processed in the order of the requests, never in that of their completion; a winner has beaten
the default, interleaved, on fresh inputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, TypeVar

from ..cache.options_proto import to_message
from ..core.diagnostics import get_logger
from ..core.errors import ArgumentError
from ..options import CpuOptions
from . import tuner_pb2 as pb
from .evaluators import Evaluator, future_reply
from .journal import Journal
from .outcomes import Outcome, failure_reasons, outcome_from_message, outcome_message, outcome_reply
from .problem import Problem
from .search import GENERATIONS, POPULATION, SEARCHES, Candidate, Search
from .space import CpuSearchSpace, Genome
from .timing import MIN_ROUNDS
from .worker import VERSION

FINALISTS = 5
"""Candidates that race with the default in the end: the best of many noisy times is seldom the best."""
MIN_GAIN = 0.01
"""The relative gain over the default that a winner needs."""
RACE_FRACTION, RACE_SECONDS = 0.05, (0.2, 5.0)
"""The share of the budget for the race, and the minimum and maximum of its seconds."""
ABORT_FACTOR, EARLY_STOP_FACTOR = 4.0, 1.25
"""Multiples of the best time so far: a measurement ends if its first run, or its lower quartile, takes longer."""
BATCH_FRACTION, MAX_BATCH_WIDTHS = 0.03, 4
"""The share of the budget for one batch of candidates, and the maximum batch size in widths of the evaluator."""
MIN_ABORT_SECONDS = 2e-3
"""The seconds that any first run may take, since caches are cold."""
COMPILE_SECONDS, FIRST_RUN_SECONDS = 60.0, 300.0
"""Seconds to compile a candidate, and to run the first one."""
RUN_LIMIT_FACTOR = 10.0
"""The time limit of a candidate, as a multiple of checking and timing the first one: load slows both equally."""
PREPARATION_FACTOR = 1.5
"""The time to prepare the race, as a multiple of the preparation before the first candidate."""
MAX_WRITE_BANDWIDTH = 2e14
"""Bytes per second that no machine can write: a kernel that seems faster is rejected."""
SILENCE_SECONDS = 10.0
"""Seconds without an answer after which the user is warned."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """The effort of a search.

    Attributes:
        seconds: the time limit of the whole search; infinite for none.
        generations, population: the maximum number of generations, and of candidates in each.
        search: "genetic", "random" or "sweep".
        seed: makes the search reproducible.
        part: (number, count) if this search is one of several for the same problem: they divide the first candidates.
    """

    seconds: float = 120.0
    generations: int = GENERATIONS
    population: int = POPULATION
    search: str = "genetic"
    seed: int = 0
    part: tuple[int, int] = (0, 1)


O_co = TypeVar("O_co", covariant=True)


@dataclass(frozen=True, slots=True)
class TuningResult(Generic[O_co]):
    """The result of a search.

    Attributes:
        options: the fastest options, which later calls use; the default options if nothing is faster.
        default: the options that the search started from.
        seconds, default_seconds: lower quartiles of the interleaved race between the two, in seconds.
        validated: whether the winner was right on fresh inputs.
        outcomes: the outcomes of all candidates, in order.
        elapsed: seconds of the whole search.
        interrupted: whether the search was ended early.
        raced: seconds of kernel time in the race.
    """

    options: O_co
    default: O_co
    seconds: float
    default_seconds: float
    spread: float
    runs: int
    validated: bool
    outcomes: tuple[Outcome, ...] = field(repr=False)
    elapsed: float
    interrupted: bool
    raced: float = 0.0

    @property
    def speedup(self) -> float:
        return self.default_seconds / self.seconds


@dataclass(slots=True)
class StopFlag:
    """A request to end the search and keep the best result so far."""

    wanted: bool = False


class Clock:
    """Seconds since the start of a search, including those of the search that it resumes."""

    def __init__(self, start: float | None = None) -> None:
        self._start = time.monotonic() if start is None else start

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def advance_to(self, elapsed: float) -> None:
        """Advance to `elapsed`, when a candidate from the journal ended."""
        self._start -= max(0.0, elapsed - self.elapsed())


Observer = Callable[["Tuner", int], None]
"""Called after every batch of candidates, with the number of the generation."""


class Tuner:
    """One search for one problem."""

    def __init__(
        self,
        problem: Problem,
        space: CpuSearchSpace,
        seeds: Sequence[Genome],
        effort: SearchBudget,
        evaluator: Evaluator,
        *,
        journal: Journal | None = None,
        stop: StopFlag | None = None,
        start: float | None = None,
        observe: Observer = lambda tuner, generation: None,
    ) -> None:
        if effort.search not in SEARCHES:
            raise ArgumentError(f"there is no search {effort.search!r}", expected=", ".join(SEARCHES))
        self.problem, self.effort, self.outcomes = problem, effort, list[Outcome]()
        self._space, self._seeds, self._evaluator = space, seeds, evaluator
        self._journal = Journal(None) if journal is None else journal
        self._stop, self._observe, self._clock = StopFlag() if stop is None else stop, observe, Clock(start)
        self._by_options: dict[CpuOptions, Outcome] = {}
        self._by_code: dict[str, Outcome] = {}
        self._codes: dict[str, tuple[pb.Code, ...]] = {}
        self._speeds: dict[str, float] = {}
        self._default_schedule_costs = 1.0
        self._preparing = self._racing = self._last = 0.0
        self._complaints: list[str] = []
        self.best: Outcome | None = None

    def run(self) -> TuningResult[CpuOptions]:
        """Search until the budget is spent. Raises ArgumentError if no candidate works, not even the default."""
        default = self._space.options(self._seeds[0])
        number, count = self.effort.part
        seeds = (self._seeds[0], *self._seeds[1:][number::count])
        search = SEARCHES[self.effort.search](self._space, seeds, self.effort.population, self.effort.seed)
        if self._evaluator.separate and self._find_recorded(default) is None:
            self._prepare()
        first: tuple[Candidate, ...] = (Candidate(self._seeds[0], default),)
        for generation in range(1, self.effort.generations + 1):
            if not self._evaluate_generation(search, generation, first):
                break
            first = ()
        return self._decide_winner(default)

    def _prepare(self) -> None:
        """Prepare inputs and expected results during the first compilation, by requesting a race of no candidates."""
        made = self._evaluator.submit(self._request(pb.RACE))
        start = self.elapsed()  # excludes the start of workers, which the race does not repeat

        def note_ready(future: Future[bytes]) -> None:
            self._preparing = self.elapsed() - start

        made.add_done_callback(note_ready)

    def _evaluate_generation(self, search: Search, generation: int, first: Sequence[Candidate]) -> bool:
        """Evaluate `first` and one generation; False if nothing is left to try, or no time."""
        asked = search.ask()
        rest = [*first, *(c for c in asked if c not in first)]
        while rest:
            size = self._batch_size(len(rest))
            batch, rest = rest[:size], rest[size:]
            fresh = [*{c.options: c for c in batch if c.options not in self._by_options}.values()]
            if (
                self.outcomes
                and self._is_time_to_decide()
                and all(self._find_recorded(c.options) is None for c in fresh)
            ):
                return False
            begun = self.elapsed()
            self._evaluate(fresh, generation)
            self._last = self.elapsed() - begun
            for c in batch:
                if c in asked and c.options in self._by_options:
                    search.tell(c, self._by_options[c.options].seconds)
            self._observe(self, generation)
        return bool(asked)

    def _batch_size(self, count: int) -> int:
        """The number of candidates, at most `count`, to evaluate at once: more if they take little of the budget.

        Between compiling and running, and at the end of a batch, processes wait for each other. In the first batch,
        which contains the default, other candidates compile while inputs and expected results are computed.
        """
        width = max(1, self._evaluator.width)
        if not self.outcomes:
            return max(1, width // 2) if self._evaluator.separate and not self._is_time_to_decide() else 1
        spent = sum(o.compiling + o.running for o in self.outcomes) / len(self.outcomes)
        several = BATCH_FRACTION * self.effort.seconds / max(spent, 1e-3) if self._evaluator.separate else 0
        size = round(max(width, min(several, MAX_BATCH_WIDTHS * width)))
        return -(-count // max(1, round(count / size)))

    def elapsed(self) -> float:
        return self._clock.elapsed()

    def _is_time_to_decide(self) -> bool:
        """Whether to race now, as the rest of the budget is needed for a batch like the last one and for the race,
        which prepares inputs as the start did, and of one more kind.
        """
        whole = self.effort.seconds
        reserve = min(self._last + _race_seconds(whole) + PREPARATION_FACTOR * self._preparing, whole / 3)
        return self._stop.wanted or self.elapsed() >= whole - reserve

    # --- evaluating ---

    def _evaluate(self, candidates: Sequence[Candidate], generation: int) -> None:
        known = {c.options: self._find_recorded(c.options) for c in candidates}
        fresh = [c.options for c in candidates if known[c.options] is None]
        replies = self._compiled_and_measured(fresh) if self._evaluator.separate else self._evaluate_all(fresh)
        for c in candidates:
            remembered = known[c.options]
            if remembered is not None:
                self._clock.advance_to(remembered.elapsed)
                self._add_outcome(outcome_from_message(remembered, c.options))
                continue
            reply = next(replies, None)
            if reply is None:  # stopped
                return
            outcome = outcome_message(c.options, self._reject_impossible_time(reply), generation, self.elapsed())
            self._journal.add(self.problem.digest, outcome)
            self._add_outcome(outcome_from_message(outcome, c.options))

    def _find_recorded(self, options: CpuOptions) -> pb.Outcome | None:
        return self._journal.find(self.problem.digest, to_message(options).SerializeToString(deterministic=True))

    def _add_outcome(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._by_options[outcome.options] = outcome
        if outcome.digest:
            self._by_code.setdefault(outcome.digest, outcome)
        if outcome.seconds is not None and (self.best is None or outcome.seconds < (self.best.seconds or math.inf)):
            self.best = outcome
        if outcome.status != pb.OK:
            get_logger("tune").debug("%s: %s: %s", self.problem.function.name, outcome.kind, outcome.message)

    def _compiled_and_measured(self, options: Sequence[CpuOptions]) -> Iterator[pb.Reply]:
        """Compile all, then run all distinct ones: compiling would disturb the timing."""
        compiled = self._compile_all(options)
        alone = int(self.best is None)  # the time of the first sets the limit of the others
        if (yield from self._measure_replies(compiled[:alone])):
            yield from self._measure_replies(compiled[alone:])

    def _compile_all(self, options: Sequence[CpuOptions]) -> list[pb.Reply]:
        """Compile, longest code first; return replies in the order of `options`, fewer if the search is stopped."""
        order = sorted(range(len(options)), key=lambda n: self._space.length(options[n]), reverse=True)
        replies = dict(
            zip(order, self._collect_replies([self._request(pb.COMPILE, [options[n]]) for n in order]), strict=False)
        )
        return [replies[n] for n in takewhile(replies.__contains__, range(len(options)))]

    def _measure_replies(self, compiled: Sequence[pb.Reply]) -> Generator[pb.Reply, None, bool]:
        """Measure the compiled candidates; returns whether the search goes on."""
        first: set[str] = set()
        measured: dict[int, pb.Request] = {}
        for number, reply in enumerate(compiled):
            if reply.status == pb.OK and reply.digest not in self._by_code and reply.digest not in first:
                first.add(reply.digest)
                measured[number] = self._measure_request(reply.codes)
        times = self._collect_replies(list(measured.values()))
        for number, reply in enumerate(compiled):
            if reply.status != pb.OK:
                yield reply
            elif number in measured:
                found = next(times, None)
                if found is None:  # stopped
                    return False
                found.digest, found.compiling = reply.digest, reply.compiling
                self._scale_to_default_time(found)
                self._keep_finalist_codes(found, reply.codes)
                yield found
            else:
                yield outcome_reply(self._by_code[reply.digest], reply)
        return True

    def _measure_request(self, codes: Sequence[pb.Code]) -> pb.Request:
        """A request to time a code interleaved with the default, so that other load affects both."""
        usual = next(iter(self._codes.values()), ())
        request = self._request(pb.MEASURE, codes=[*codes, *usual])
        if usual:
            request.losing /= self._default_schedule_costs
        return request

    def _scale_to_default_time(self, reply: pb.Reply) -> None:
        """Scale a time that was interleaved with the default's, as if the default took as long as at first."""
        if len(reply.timings) > 1:
            timing, usual = reply.timings
            times = (
                self._default_schedule_costs / usual.median if usual.median > 0 else math.nan
            )  # NaN is rejected as impossible
            timing.median, timing.low, timing.high = (times * t for t in (timing.median, timing.low, timing.high))
            del reply.timings[1:]

    def _keep_finalist_codes(self, reply: pb.Reply, codes: Sequence[pb.Code]) -> None:
        """Keep the code of candidates for the race: the default, which is timed first, and the fastest."""
        if reply.status != pb.OK or not reply.timings:
            return
        if not self._codes:
            self._default_schedule_costs = reply.timings[0].median
        self._codes[reply.digest] = tuple(codes)
        self._speeds[reply.digest] = reply.timings[0].low
        first = next(iter(self._codes))
        for digest in sorted(self._speeds, key=self._speeds.__getitem__)[FINALISTS + 1 :]:
            if digest != first:
                del self._codes[digest], self._speeds[digest]

    def _evaluate_all(self, options: Sequence[CpuOptions]) -> Iterator[pb.Reply]:
        yield from self._collect_replies([self._request(pb.EVALUATE, [o]) for o in options])

    def _request(
        self, stage: pb.Stage, options: Sequence[CpuOptions] = (), codes: Sequence[pb.Code] = ()
    ) -> pb.Request:
        best = self.best.seconds if self.best is not None else None
        return pb.Request(
            version=VERSION, stage=stage, problem=self.problem.message, options=map(to_message, options), codes=codes,
            fingerprint=self._evaluator.fingerprint,
            hopeless=0.0 if best is None else max(ABORT_FACTOR * best, MIN_ABORT_SECONDS),
            losing=0.0 if best is None else EARLY_STOP_FACTOR * best,
            seconds=0.1 if best is None else min(max(5 * best, 0.01), 0.1),
            compile_limit=COMPILE_SECONDS,
            run_limit=FIRST_RUN_SECONDS if best is None
            else 1.0 + 40 * best + RUN_LIMIT_FACTOR * self.outcomes[0].running,
        )  # fmt: skip

    def _collect_replies(self, requests: Sequence[pb.Request]) -> Iterator[pb.Reply]:
        """Yield the replies in the order of the requests; fewer if the search is stopped."""
        futures = [self._evaluator.submit(r) for r in requests]
        for n, (request, future) in enumerate(zip(requests, futures, strict=True)):
            if not self._wait_for(future):
                for other in futures[n:]:
                    other.cancel()
                return
            reply = future_reply(future, self._evaluator.fingerprint if request.stage != pb.COMPILE else "")
            if reply.status == pb.UNKNOWN:  # retry once: another worker may succeed
                reply = future_reply(self._evaluator.submit(request), self._evaluator.fingerprint)
                reply.status = reply.status or pb.CRASH
            yield reply

    def _wait_for(self, future: Future[bytes]) -> bool:
        """Wait for a future; False if the search is to stop."""
        silent, warned = time.monotonic(), False
        while not wait([future], 0.1).done:
            if self._stop.wanted:
                return False
            if not warned and time.monotonic() - silent > SILENCE_SECONDS and not self._evaluator.separate:
                get_logger("tune").warning(
                    "no worker has answered for %.0f s: does the executor have any?", SILENCE_SECONDS
                )
                warned = True
        return True

    def _reject_impossible_time(self, reply: pb.Reply) -> pb.Reply:
        """Turn a success with an impossible time into a failure."""
        if reply.status != pb.OK:
            return reply
        timing = reply.timings[0] if reply.timings else pb.Timing(median=math.nan)
        written = sum(self.problem.bound.tensor(n).size * self.problem.bound.tensor(n).dtype.size
                      for n in self.problem.bound.returns)  # fmt: skip
        least = max(1e-8, written / MAX_WRITE_BANDWIDTH)
        wrong = [t for t in (timing.median, timing.low) if not least <= t <= 1e5]
        if wrong:
            reply.status, reply.message = pb.IMPOSSIBLE, f"a time of {wrong[0]:g} s, and {least:.1g} s is the least"
        return reply

    # --- deciding ---

    def _decide_winner(self, default: CpuOptions) -> TuningResult[CpuOptions]:
        good = sorted((o for o in self.outcomes if o.seconds is not None), key=lambda o: o.seconds or 0.0)
        if not good:
            raise ArgumentError(f"no way to lower {self.problem.function.name} works: {failure_reasons(self.outcomes)}")
        most = max(
            1, min(FINALISTS, round(2 * _race_seconds(self.effort.seconds) / MIN_ROUNDS / (good[0].seconds or 1.0)))
        )
        finalists = [default]
        digests = {o.digest for o in self.outcomes if o.options == default}
        for o in good:
            if o.digest not in digests and len(finalists) <= most:
                digests.add(o.digest)
                finalists.append(o.options)
        timings = self._race(finalists)
        if len(finalists) > 1 and not any(t.gain for t in timings):
            get_logger("tune").warning(
                "%s: other load disturbed the race, so it decides nothing; search on an idle machine",
                self.problem.function.name,
            )
        winner = find_significant_winner(timings)
        if winner is None:
            raise ArgumentError(
                f"the best ways to lower {self.problem.function.name} fail in the end, and so does the default: "
                + "; ".join(dict.fromkeys(self._complaints))
            )
        chosen, baseline = timings[winner], timings[0] if timings[0].runs else timings[winner]
        return TuningResult(
            finalists[winner], default, chosen.low, baseline.low,
            (chosen.high - chosen.low) / chosen.median, chosen.runs, True,
            tuple(self.outcomes), self.elapsed(), self._stop.wanted, self._racing,
        )  # fmt: skip

    def _race(self, finalists: Sequence[CpuOptions]) -> list[pb.Timing]:
        """The timings of the finalists, interleaved, from the journal or measured now; one that fails has no runs."""
        messages = [to_message(o) for o in finalists]
        known = self._journal.decision(self.problem.digest)
        if known is not None and list(known.finalists) == messages:
            self._clock.advance_to(known.elapsed)
            return list(known.timings)
        timings = self._time_finalists(finalists)
        if not self._stop.wanted:
            decision = pb.Decision(finalists=messages, timings=timings, elapsed=self.elapsed())
            self._journal.add(self.problem.digest, decision)
        return timings

    def _time_finalists(self, finalists: Sequence[CpuOptions]) -> list[pb.Timing]:
        seconds = _race_seconds(self.effort.seconds)
        reply = self._race_once(finalists, 1.0 if self._stop.wanted else seconds)
        if reply.status == pb.OK and len(reply.timings) == len(finalists):
            if reply.message:
                get_logger("tune").warning("%s: rejected at last: %s", self.problem.function.name, reply.message)
            return list(reply.timings)
        alone = [self._race_once([o], seconds) for o in finalists]
        fit = [n for n, r in enumerate(alone) if r.status == pb.OK and r.timings and r.timings[0].runs]
        again = self._race_once([finalists[n] for n in fit], seconds) if fit else pb.Reply()
        times = dict(zip(fit, again.timings, strict=False)) if again.status == pb.OK else {}
        return [times.get(n, pb.Timing()) for n in range(len(finalists))]

    def _race_once(self, finalists: Sequence[CpuOptions], seconds: float) -> pb.Reply:
        codes = self._find_measured_codes(finalists)
        request = self._request(pb.RACE, () if codes else finalists, codes)
        request.seconds, request.fresh = seconds, True
        request.run_limit = FIRST_RUN_SECONDS
        reply = future_reply(self._evaluator.submit(request), self._evaluator.fingerprint)
        self._racing += reply.running
        if reply.message:
            self._complaints.append(f"{pb.Status.Name(reply.status).lower()}: {reply.message[:200]}")
        return reply

    def _find_measured_codes(self, options: Sequence[CpuOptions]) -> list[pb.Code]:
        """The compiled codes of `options`; empty unless all are in memory: a resumed search has none, an interrupted
        one may lack the default's."""
        known = [self._by_options.get(o) for o in options]
        codes = [self._codes.get(outcome.digest) for outcome in known if outcome is not None]
        return [c for found in codes if found for c in found] if len(codes) == len(options) and all(codes) else []


def _race_seconds(seconds: float) -> float:
    """Seconds for the race of a search, without its preparation."""
    least, most = RACE_SECONDS
    return min(most, max(least, seconds * RACE_FRACTION))


def find_significant_winner(timings: Sequence[pb.Timing]) -> int | None:
    """The index of the fastest timing that significantly beats the default (index 0), else 0; None if none ran."""
    ran = [n for n, t in enumerate(timings) if t.runs]
    if 0 in ran:
        default = timings[0]
        ran = [0, *(n for n in ran if timings[n].gain > 1 and default.low > timings[n].low * (1 + MIN_GAIN))]
    return min(ran, key=lambda n: timings[n].low, default=None)
