"""A fault of the package never ends a program, and a race has bounds."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tensor_comprehensions.core.knobs import override_knobs
from tensor_comprehensions.dynamo_backend import backend, dynamic_shapes, emit_def, fallback, kernel_or_eager, race
from tensor_comprehensions.dynamo_backend.fallback import FallbackWarning

pytestmark = pytest.mark.usefixtures("small_regions")


def product(x: Tensor) -> Tensor:
    """Operations with and without kernels; exponents are small, since powers of large ones lose digits."""
    return ((x / 8) @ x.t()).exp() + torch.sort(x)[0].sum()


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a fault")


PLACES: dict[str, tuple[Any, str, str]] = {
    "partition": (backend, "find_regions", "a graph cannot be taken apart"),
    "def": (emit_def._Writer, "write", "a def cannot be written"),
    "text": (backend, "define", "a def cannot be written"),
    "compilation": (kernel_or_eager.KernelOrEager, "_kernel", "a kernel cannot be compiled"),
    "race": (kernel_or_eager, "race_kernel", "a kernel cannot be compiled"),
}


@pytest.mark.parametrize("place", PLACES)
def test_torch_runs_what_fails(place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With one warning for each cause, however often it fails, and a line in the log each time."""
    owner, name, words = PLACES[place]
    monkeypatch.setattr(owner, name, fail)
    monkeypatch.setattr(fallback, "_warned", set())
    monkeypatch.setattr(backend, "_operators", type(backend._operators)(backend.LIMIT))
    caplog.set_level(logging.INFO, "tensor_comprehensions.graph")
    with override_knobs(strict=False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (3, 4):
            torch._dynamo.reset()
            x = torch.randn(n, 5)
            torch.testing.assert_close(torch.compile(product, backend="tensor_comprehensions")(x), product(x))
    assert f"{words}, torch runs it: ZeroDivisionError: a fault" in str(caught[0].message)
    assert {w.category for w in caught} == {FallbackWarning}
    assert len(caught) <= 2  # a cause is a kind of error at one place
    assert caplog.text.count(words) >= 2


@pytest.mark.parametrize("place", PLACES)
def test_strict_raises_what_fails(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, _ = PLACES[place]
    monkeypatch.setattr(owner, name, fail)
    monkeypatch.setattr(backend, "_operators", type(backend._operators)(backend.LIMIT))
    with pytest.raises(Exception, match="a fault"):
        torch.compile(product, backend="tensor_comprehensions")(torch.randn(3, 5))


def test_a_kernel_that_fails_later_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = torch.compile(product, backend="tensor_comprehensions")
    x = torch.randn(3, 5)
    fast(x)
    monkeypatch.setattr(kernel_or_eager.KernelOrEager, "_kernel", fail)
    monkeypatch.setattr(fallback, "_warned", set())
    with override_knobs(strict=False), pytest.warns(FallbackWarning, match="a kernel fails"):
        torch.testing.assert_close(fast(x), product(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(x), product(x))


def test_sizes_that_fail_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(dynamic_shapes, "make_fx", fail)
    monkeypatch.setattr(fallback, "_warned", set())
    fast = torch.compile(product, backend="tensor_comprehensions", dynamic=True)
    with override_knobs(strict=False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (3, 3, 3, 4):
            x = torch.randn(n, 5)
            torch.testing.assert_close(fast(x), product(x))
    assert ["sizes cannot be compiled" in str(w.message) for w in caught] == [True]


def test_what_the_program_does_wrong_is_its_own_error() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x * 2).index_select(0, y) + 1

    fast = torch.compile(function, backend="tensor_comprehensions")
    with pytest.raises(IndexError):
        fast(torch.randn(3, 4), torch.tensor([5]))


# --- races -------------------------------------------------------------------------------------------------------


def count_runs(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> list[int]:
    """How often both sides run until a choice is made, and what becomes of it."""
    counts = [0, 0]
    kernel, eager = kernel_or_eager.KernelOrEager._kernel, kernel_or_eager.KernelOrEager._torch

    def counting(k: int, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counts[k] += 1
            return run(*arguments)

        return call

    monkeypatch.setattr(kernel_or_eager.KernelOrEager, "_kernel", counting(0, kernel))
    monkeypatch.setattr(kernel_or_eager.KernelOrEager, "_torch", counting(1, eager))
    torch.compile(lambda x: (x * 2).exp() + 1, backend="tensor_comprehensions")(x)
    return counts


def test_what_takes_long_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "LONGEST_RUN_SECONDS", 0.0)
    kernel, eager = count_runs(monkeypatch, torch.randn(50))  # the kernel is checked and timed, one gives the result
    assert sorted((kernel - 2, eager - 1)) == [0, 1]


@pytest.mark.parametrize(("seconds", "wins"), [(0.6, True), (1.5, False)])
def test_a_kernel_races_against_the_only_run_that_takes_long(
    seconds: float, wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    for clock in ("thread_time", "perf_counter"):
        monkeypatch.setattr(race, clock, lambda: now[0])

    def run(*_: object) -> None:
        now[0] += seconds

    ours, theirs = race.race_kernel(run, lambda: pytest.fail("repeated"), (), 1.0)
    assert (ours < theirs) == wins


def test_what_gives_much_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "available_memory", lambda: 4 * 50 * 4 - 1)
    assert count_runs(monkeypatch, torch.randn(50)) == [0, 2]


def test_what_gives_little_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "available_memory", lambda: 4 * 50 * 4)
    assert min(count_runs(monkeypatch, torch.randn(50))) > 2


def test_a_race_that_takes_long_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "LONGEST_RACE_SECONDS", 0.0)
    assert count_runs(monkeypatch, torch.randn(50)) == [3, 2]


@pytest.mark.parametrize(("slower", "rounds"), [(4, 3), (1.6, 6)])
def test_a_race_that_is_decided_ends(slower: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, now = [0, 0], [0.0]
    for clock in ("thread_time", "perf_counter"):
        monkeypatch.setattr(race, clock, lambda: now[0])

    def wait(k: int) -> Callable[[], None]:
        def run() -> None:
            runs[k] += 1
            now[0] += (0.001, 0.001 * slower)[k]

        return run

    race.least_times((wait(0), wait(1)), ())
    assert runs == [rounds] * 2


def test_a_race_holds_the_results_of_one_run() -> None:
    alive: list[int] = []

    class Result(list[int]):
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    def run() -> Result:
        assert not alive
        return Result()

    assert race.time_first_run(run) is not None
    race.least_times((run, run), ())
    gc.collect()
    assert not alive


def test_equal_layers_race_once(monkeypatch: pytest.MonkeyPatch) -> None:
    races: list[object] = []
    choose = kernel_or_eager.KernelOrEager._choose
    monkeypatch.setattr(kernel_or_eager.KernelOrEager, "_choose", lambda self, x: races.append(self) or choose(self, x))

    def function(x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x * 2).exp().sort()[0].cumsum(0)
        return x

    torch.compile(function, backend="tensor_comprehensions")(torch.rand(3, 4) * 0.01)
    assert len(races) == 1


def test_races_run_without_the_modes_of_a_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch watches the first call of each graph by a mode in Python, which made its own operations lose."""
    modes: list[int] = []

    def note(runs: Sequence[object], inputs: object) -> list[float]:
        modes.append(len(_get_current_dispatch_mode_stack()))
        return [1.0] * len(runs)

    monkeypatch.setattr(race, "least_times", note)
    torch.compile(lambda x: (x * 3).exp().sum(), backend="tensor_comprehensions")(torch.rand(5, 7))
    assert modes
    assert not any(modes)
